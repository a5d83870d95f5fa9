"""Which cases of the larger tables every run takes; the others are marked slow and run with `scripts/test --all`.

Of a test that takes long and shows what others show too no case is usual.
"""

from __future__ import annotations

import pytest

# By file and function: of each thing that is checked one case, the one that shows most.
USUAL: dict[tuple[str, str], tuple[str, ...]] = {
    ("test_tensor.py", "test_the_training_of_one_process"): ("gpt-3", "perceptron-2", "stubborn-2", "llama-2"),
    ("test_tensor.py", "test_the_models_of_the_examples_are_verified"): ("gpt",),
    ("test_tensor.py", "test_norms_that_see_a_part_of_the_positions_are_verified"): ("3",),
    ("test_tensor.py", "test_verified_with_other_axes"): ("2 x shard 2, parameters",),
    ("test_tensor.py", "test_resumed_under_another_layout"): (),
    ("test_counters.py", "test_a_step_sends_and_holds_what_the_formulas_say"): (
        "fast-several buckets",
        "exact-small",
        "zero 1-small",
        "zero 3-transformer",
        "zero 3, hybrid-small",
    ),
    ("test_counters.py", "test_fully_shard_sends_and_holds_what_the_formulas_say"): ("1-2",),
    ("test_counters.py", "test_what_autograd_keeps_is_what_the_plan_said"): ("1f1b, zero 3",),
    ("test_context.py", "test_the_gradient_of_one_process"): ("gpt-2", "masks and rotations-3"),
    ("test_context.py", "test_what_cannot_be_divided_is_refused"): ("convolution", "attention dropout", "few heads"),
    ("test_context.py", "test_the_run_of_one_process"): ("with data",),
    ("test_pipeline.py", "test_gradients_are_those_of_one_process"): ("gpt-2",),
    ("test_jobs.py", "test_each_case_of_the_conformance_suite"): (
        "frozen, unused, conditional",
        "pure bf16",
        "reentrant checkpointing",
        "a loss over pairs",
        "blocks computed again",
    ),
    ("test_collectives.py", "test_every_algorithm"): ("3",),
    ("test_streams.py", "test_one_process_or_three_and_a_resume_in_the_middle"): ("sharded",),
    ("test_exact.py", "test_a_session_under_torchrun_is_the_session_alone"): (),
    ("test_exact.py", "test_one_hash_on_any_number_of_devices"): ("gpt",),
    ("test_fast.py", "test_losses_within_rounding"): ("gpt",),
    ("test_fast.py", "test_narrow_precisions"): ("bf16",),
    ("test_fast.py", "test_the_loss_scale_survives_a_resume"): (),
    ("test_fast.py", "test_float16_skips_steps_until_its_scale_fits"): ("1",),
    ("test_samples.py", "test_a_rank_that_gets_nothing"): ("batches of 2 on 3 ranks",),
    ("test_sharded.py", "test_resumed_under_another_layout"): (),
    ("test_sharded.py", "test_parameters_kept_on_the_host_change_nothing"): (),
    ("test_compression.py", "test_a_step_sends_and_holds_what_the_formulas_say"): (
        "int8, native",
        "topk, ring on 3",
        "powersgd, halving on 3",
    ),
    ("test_compression.py", "test_replicas_stay_equal_and_a_resume_changes_nothing"): ("bfloat16", "powersgd"),
    ("test_compression.py", "test_a_gradient_that_is_not_finite_is_seen"): ("int8",),
    ("test_parameter_server.py", "test_synchronous_is_verified"): ("True",),
    ("test_parameter_server.py", "test_ahead_of_each_other_every_sample_counts_once"): ("bounded-1",),
    ("test_parameter_server.py", "test_a_worker_sends_and_gets_what_the_formula_says"): ("True",),
    ("test_parameter_server.py", "test_a_step_that_is_not_finite_is_left_out_on_all_servers"): ("asynchronous",),
    ("test_damage.py", "test_all_damaged"): ("2",),
    ("test_preempted.py", "test_asked_to_stop"): ("SIGTERM-2-3",),
    ("test_preempted.py", "test_asked_to_stop_before_it_has_begun"): ("15-2",),
    ("test_preempted.py", "test_killed_altogether"): ("3-2",),
    ("test_preempted.py", "test_one_worker_killed"): ("0",),
    ("test_preempted.py", "test_asked_twice_it_stops_at_once"): ("2",),
    ("test_raising.py", "test_one_rank_raises"): ("data-later", "backward-later"),
    ("test_raising.py", "test_exact_mode_on_three_ranks"): ("backward",),
    ("test_raising.py", "test_where_the_others_wait_in_the_same_forward"): (),
    ("test_raising.py", "test_the_run_goes_on_once_it_is_mended"): (),
    ("test_refused_layout.py", "test_a_layout_that_fits_is_not_looked_at_twice"): (),
    ("test_storage.py", "test_the_last_checkpoint_cannot_be_written"): ("to the end",),
    ("test_memory.py", "test_goes_on_with_smaller_microbatches"): ("2-4-host-dropout",),
    ("test_memory.py", "test_one_grain_does_not_fit"): ("2-host",),
    ("test_data_parallel.py", "test_modules_have_the_sizes_that_are_printed"): ("resnet50", "transformer_xl_base"),
    ("test_models.py", "test_verified_on_two_ranks"): ("llama", "keras-batch-norm"),
    ("test_models.py", "test_keras_is_divided"): ("shard-tensor",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        usual = USUAL.get((item.path.name, getattr(item, "originalname", "")))
        if usual is not None and item.name.partition("[")[2].removesuffix("]") not in usual:
            item.add_marker(pytest.mark.slow)
