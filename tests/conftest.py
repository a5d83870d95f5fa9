"""Which cases of the larger tables every run takes; the others are marked slow and run with `scripts/test --all`.

Of a test that takes long and shows what others show too no case is usual.
"""

from __future__ import annotations

import gc

import pytest

# One of each kind of mistake; where only the value differs, what is said is tested without a process too.
_MISTAKES = (
    "plan typo",
    "plan value",
    "plan broken",
    "plan missing",
    "plan stages",
    "plan and other devices on 3",
    "unknown option",
    "devices in words",
    "set an unknown name",
    "set a wrong type",
    "no job file",
    "syntax error",
    "no job function",
    "out holds a run",
    "out holds a run, two devices on 2",
    "resume of nothing",
    "RANK alone",
    "MASTER_PORT in use on 2",
    "a plan for 2 in a world of 1",
    "returns_nothing",
    "raises",
    "wrong_fields",
    "empty_data",
    "data_raises",
    "data_ragged",
    "wrong_shape",
    "total_per_sample",
    "without_gradient",
    "lbfgs",
    "model_raises",
    "nothing_to_train",
    "metric_raises",
    "schedule_nan",
    "three_grains on 4",
    "bare_mean on 2",
    "resume with another model",
    "resume with a bad plan",
)

# By file and function: of each thing that is checked one case, the one that shows most.
USUAL: dict[tuple[str, str], tuple[str, ...]] = {
    ("test_dtypes.py", "test_is_verified"): (
        "float64-data",
        "float64-exact",
        "mixed-data",
        "rotary-data",
        "rotary-narrow",
    ),
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
    ("test_context.py", "test_what_cannot_be_divided_is_refused"): (
        "convolution",
        "keeping",
        "attention dropout",
        "few heads",
    ),
    ("test_context.py", "test_the_run_of_one_process"): ("with data",),
    ("test_pipeline.py", "test_gradients_are_those_of_one_process"): (),
    ("test_jobs.py", "test_each_case_of_the_conformance_suite"): (
        "frozen, unused, conditional",
        "pure bf16",
        "reentrant checkpointing",
        "a loss over pairs",
        "blocks computed again",
    ),
    ("test_counters.py", "test_stages_send_and_hold_what_the_formulas_say"): (
        "1f1b",
        "zero 2",
        "zero 3, late",
        "context",
        "context, pipeline",
    ),
    ("test_counters.py", "test_a_divided_model_sends_what_the_formulas_say"): (
        "tensor-small",
        "tensor on 3-gpt",
        "tensor, two microbatches-gpt",
        "tensor, by positions on 3-gpt",
    ),
    ("test_collectives.py", "test_every_algorithm"): ("3",),
    ("test_collectives.py", "test_the_fixed_tree_has_the_same_bits_through_shared_memory"): ("3",),
    ("test_collectives.py", "test_a_rank_that_dies_is_named"): ("shared_memory", "tree"),
    ("test_collectives.py", "test_a_rank_with_another_call_is_named"): ("shared_memory-shape", "ring-dtype"),
    ("test_collectives.py", "test_a_process_group_gives_what_gloo_gives"): ("3",),
    ("test_streams.py", "test_one_process_or_three_and_a_resume_in_the_middle"): ("sharded",),
    ("test_exact.py", "test_one_hash_on_any_number_of_devices"): ("gpt",),
    ("test_exact.py", "test_another_seed_is_another_hash"): (),
    ("test_fast.py", "test_losses_within_rounding"): ("gpt",),
    ("test_fast.py", "test_fast_is_the_exact_run_within_rounding"): ("convnet",),
    ("test_fast.py", "test_narrow_precisions"): ("bf16",),
    ("test_fast.py", "test_the_loss_scale_survives_a_resume"): (),
    ("test_fast.py", "test_float16_skips_steps_until_its_scale_fits"): ("1",),
    ("test_samples.py", "test_a_rank_that_gets_nothing"): (),
    ("test_known_bugs.py", "test_the_training_of_plain_torch"): ("zero 3 on 3", "tensor 2 x zero 3", "context 2"),
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
    ("test_bad_input.py", "test_three_beats_and_exit_code_2"): _MISTAKES,
    ("test_damage.py", "test_all_damaged"): ("2",),
    ("test_damage.py", "test_a_flipped_bit_in_the_newest"): ("model.safetensors", "manifest.json"),
    ("test_nonfinite.py", "test_skip_leaves_the_step_out"): ("exact",),
    ("test_nonfinite.py", "test_skip_changes_neither_parameters_nor_statistics"): ("exact",),
    ("test_preempted.py", "test_asked_to_stop"): ("SIGTERM-2-3",),
    ("test_preempted.py", "test_asked_to_stop_before_it_has_begun"): (),
    ("test_preempted.py", "test_killed_altogether"): ("3-2",),
    ("test_preempted.py", "test_one_worker_killed"): ("0",),
    ("test_preempted.py", "test_asked_twice_it_stops_at_once"): (),
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
    ("test_models.py", "test_keras_is_divided"): (),
}


def pytest_collection_finish() -> None:
    """What is there by now stays: no garbage collection looks at it again, in this process or in one forked from it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the others slow. Raises: pytest.UsageError for a case of the table that is not there any more."""
    cases: dict[tuple[str, str], set[str]] = {}
    for item in items:
        key = item.path.name, getattr(item, "originalname", "")
        case = item.name.partition("[")[2].removesuffix("]")
        cases.setdefault(key, set()).add(case)
        if key in USUAL and case not in USUAL[key]:
            item.add_marker(pytest.mark.slow)
    if any("::" in argument for argument in config.args):
        return
    gone = [f"{key}: {case}" for key in USUAL.keys() & cases.keys() for case in USUAL[key] if case not in cases[key]]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names cases that are not there: {gone}")
