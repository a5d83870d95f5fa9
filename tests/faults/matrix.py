"""The matrix of faults: what befalls a run, and the tests that show what becomes of it.

Q: shown in every run of the tests. N: shown by `scripts/soak`. `python -m tests.faults.matrix` prints the table that
benchmarks/results/faults.md has, and with `files` the files of its tests.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

# A row that nothing but an engine of others can show: scripts/test-engines.
ENGINES = "engines"


@dataclass(frozen=True)
class Row:
    """A fault: its outcome in words, and its tests as pytest names them below tests/.

    `usual` are run every time, `soak` by scripts/soak. A name without brackets stands for all cases that are run then.
    """

    number: int
    tier: str  # Q, N or both
    fault: str
    outcome: str
    usual: tuple[str, ...] = ()
    soak: tuple[str, ...] = ()


def _in(module: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"{module}.py::{test}" for test in tests)


RECOVERY, PREEMPTED, INCIDENTS = "faults/test_recovery", "faults/test_preempted", "faults/test_incidents"
JOINING, OTHER_JOB, DAMAGE, STORAGE = (f"faults/test_{n}" for n in ("joining", "other_job", "damage", "storage"))
HUNG = "faults/test_hung_mounts"
HOSTS, ENDS, OUTPUT, SERVED = (f"faults/test_{n}" for n in ("hosts", "ends", "output", "parameter_server"))
STORE, WRITER = "unit/checkpoint/test_store", "unit/checkpoint/test_keeper_writer"
SURVIVES, WATCH, DECIDES = (
    "unit/checkpoint/test_store_survives",
    "unit/launch/supervise/test_heartbeat_watch",
    "unit/launch/supervise/test_recovery",
)

ROWS = (
    Row(
        1,
        "QN",
        "a rank is killed",
        "all ranks start again; the bits of the undisturbed run",
        _in(RECOVERY, "test_a_killed_rank"),
        _in(RECOVERY, "test_a_killed_rank", "test_killed_again_and_again"),
    ),
    Row(
        2,
        "Q",
        "a rank is killed in its start, a forward, a backward, an evaluation, a checkpoint, a load, its end",
        "the same from each place; no half step is saved",
        _in(ENDS, "test_killed_wherever_it_is[evaluation]")
        + _in(SURVIVES, "test_a_kill_before_every_call_leaves_a_state_to_go_on_from"),
        _in(ENDS, "test_killed_wherever_it_is"),
    ),
    Row(
        3,
        "Q",
        "SIGSEGV, SIGABRT, an exit with 1 or with 0, an exception",
        "each is named; an early exit with 0 is a loss",
        _in(ENDS, "test_how_it_ended[SIGSEGV]")
        + _in(JOINING, "test_a_worker_that_ends_with_0_in_the_midst_of_its_work")
        + _in("faults/test_raising", "test_one_rank_raises"),
        _in(ENDS, "test_how_it_ended"),
    ),
    Row(
        4,
        "Q",
        "all ranks are killed at once",
        "one new start",
        _in(RECOVERY, "test_a_killed_rank[all of 3]"),
    ),
    Row(
        5,
        "Q",
        "a rank is killed again before its first step",
        "starts with growing pauses",
        _in(DECIDES, "test_pauses_grow_until_a_new_step_comes"),
        _in(ENDS, "test_killed_again_before_its_first_step"),
    ),
    Row(
        6,
        "Q",
        "the same failure every time",
        "the run ends after the second, and says so",
        _in(RECOVERY, "test_lost_twice_in_the_same_way_it_ends"),
    ),
    Row(7, "Q", "the launcher is killed", "no rank is left", _in(PREEMPTED, "test_the_launcher_killed")),
    Row(
        8,
        "Q",
        "a host is lost",
        "the ranks of other hosts end within seconds and say so; a new start goes on",
        _in(HOSTS, "test_connections_to_a_host_that_is_gone"),
        _in(HOSTS, "test_a_lost_host"),
    ),
    Row(
        9,
        "Q",
        "more processes join, fewer go on",
        "the run goes on with them; the same bits",
        _in("faults/test_resize", "test_the_bits_are_those_of_a_run_that_was_left_alone"),
    ),
    Row(
        10,
        "Q",
        "rank 0 is killed, its host is lost",
        "as any other rank",
        _in(RECOVERY, "test_a_killed_rank[2 before a checkpoint]"),
        _in(RECOVERY, "test_a_killed_rank[3 rank 0]") + _in(HOSTS, "test_a_lost_host[of rank 0]"),
    ),
    Row(
        11,
        "Q",
        "a rank is stopped for good (SIGSTOP)",
        "noticed after 5 s, with its stacks; all ranks start again",
        _in(RECOVERY, "test_a_rank_that_does_not_go_on[stopped]"),
    ),
    Row(
        12,
        "Q",
        "a rank hangs: in a lock, in the interpreter's own, in data",
        "as one that is stopped",
        _in(WATCH, "test_how_long_is_waited", "test_who_waits_for_others_is_not_blamed")
        + _in("unit/launch/supervise/test_heartbeat", "test_the_end_of_a_rank_shows_where_it_was"),
        _in(RECOVERY, "test_a_rank_that_does_not_go_on") + _in(INCIDENTS, "test_a_data_worker_that_dies_or_hangs"),
    ),
    Row(
        13,
        "QN",
        "a pause of two seconds",
        "nothing",
        _in(RECOVERY, "test_a_pause_of_two_seconds_is_nothing"),
        _in(RECOVERY, "test_many_pauses_are_nothing"),
    ),
    Row(
        14,
        "Q",
        "a process that was replaced wakes up",
        "it commits nothing, says so and ends",
        _in("faults/test_fencing", "test_a_host_that_stood_still"),
    ),
    Row(
        15,
        "Q",
        "SIGTERM, SIGUSR1, to one process or to all",
        "a checkpoint of the step in hand, exit code 75",
        _in(PREEMPTED, "test_asked_to_stop", "test_the_whole_group_is_asked_to_stop")
        + _in(PREEMPTED, "test_asked_to_stop_in_an_evaluation")
        + _in("faults/test_handed_on", "test_by_the_launcher_and_later_by_a_scheduler"),
    ),
    Row(
        16,
        "Q",
        "SIGTERM twice; SIGKILL after it",
        "exit code 130; the newest checkpoint is whole",
        _in(PREEMPTED, "test_one_process_asked_twice_stops_at_once"),
        _in(PREEMPTED, "test_asked_twice_it_stops_at_once", "test_killed_altogether"),
    ),
    Row(
        17,
        "Q",
        "Ctrl-C at a terminal",
        "one message, a checkpoint, no traceback",
        _in(OUTPUT, "test_an_interrupt_at_a_terminal"),
    ),
    Row(
        18,
        "N",
        "SIGHUP",
        "as SIGTERM; nothing under nohup",
        soak=_in(PREEMPTED, "test_the_whole_group_is_asked_to_stop[SIGHUP]", "test_a_hangup_is_nothing_under_nohup"),
    ),
    Row(
        19,
        "Q",
        "hosts are cut off from each other",
        "both sides end within seconds; who goes on fences the others",
        _in(HOSTS, "test_connections_to_a_host_that_is_gone")
        + _in("faults/test_fencing", "test_a_host_that_stood_still"),
        _in(HOSTS, "test_a_lost_host"),
    ),
    Row(20, "N", "one direction is cut", "the same", soak=_in(HOSTS, "test_a_lost_host[one direction]")),
    Row(
        21,
        "N",
        "the connection comes back",
        "a short cut is nothing; after a long one a new start goes on, with the same bits",
        soak=_in(HOSTS, "test_a_short_cut_is_nothing", "test_a_lost_host"),
    ),
    Row(22, "N", "a slow connection", "the run goes on", soak=_in(HOSTS, "test_a_slow_connection")),
    Row(23, "N", "a connection is reset", "a lost rank", soak=_in(HOSTS, "test_a_connection_that_is_reset")),
    Row(
        24,
        "Q",
        "a slow rank",
        "named within 20 steps, and nobody else",
        _in(
            "unit/training/observe/test_step_records_stragglers",
            "test_a_slow_rank_is_named_within_twenty_steps_and_once",
        ),
        _in(INCIDENTS, "test_a_straggler_is_named_and_nobody_else"),
    ),
    Row(
        25,
        "Q",
        "a port is taken",
        "an error that names it",
        _in("faults/test_bad_input", "test_three_beats_and_exit_code_2[MASTER_PORT in use on 2]"),
    ),
    Row(
        26,
        "Q",
        "nobody answers at the master's address",
        "a line every 5 s, then an error",
        _in(JOINING, "test_rank_0_that_is_waited_for_is_told"),
        _in(JOINING, "test_a_rank_that_never_comes"),
    ),
    Row(
        27,
        "Q",
        "a rank twice, a rank missing, a wrong world size",
        "an error that names who is there",
        _in(JOINING, "test_two_processes_as_one_rank", "test_world_sizes_that_differ"),
        _in(JOINING, "test_a_rank_that_never_comes"),
    ),
    Row(
        28,
        "Q",
        "ranks with other versions, code, data or options",
        "refused before the first step",
        _in(OTHER_JOB, "test_ranks_with_another_model_or_other_data", "test_ranks_with_another_option")
        + _in("unit/launch/supervise/test_host_process", "test_differences_are_named"),
    ),
    Row(
        29,
        "Q",
        "a checkpoint of another format",
        "a newer one is refused, with the version that it needs",
        _in(DAMAGE, "test_a_newer_format"),
    ),
    Row(
        30,
        "Q",
        "a kill at any point of the checkpoint's writer",
        "the newest that was committed is read",
        _in(SURVIVES, "test_a_kill_before_every_call_leaves_a_state_to_go_on_from"),
    ),
    Row(
        31,
        "Q",
        "flipped bits, cuts, additions, exchanged and missing files, forged manifests",
        "all found; the one before is taken, the bad one kept aside",
        _in(SURVIVES, "test_random_damages_are_all_found")
        + _in(STORE, "test_every_flipped_byte_is_found")
        + _in(DAMAGE, "test_a_forged_manifest"),
        _in(DAMAGE, "test_a_flipped_bit_in_the_newest"),
    ),
    Row(32, "Q", "all checkpoints are bad or gone", "exit code 74", _in(DAMAGE, "test_all_damaged")),
    Row(
        33,
        "Q",
        "a full disk",
        "the training goes on; later checkpoints are written again",
        _in(WRITER, "test_a_disk_that_refuses_is_a_warning_and_is_counted")
        + _in(STORE, "test_a_full_disk_leaves_nothing_behind")
        + _in(STORAGE, "test_a_full_disk_loses_the_oldest_checkpoint_first"),
        _in(STORAGE, "test_the_last_checkpoint_cannot_be_written"),
    ),
    Row(
        34,
        "N",
        "storage that vanishes, is read-only or hangs",
        "a bounded wait; the training goes on",
        soak=_in(DAMAGE, "test_a_run_directory_that_vanishes_is_told_at_once")
        + _in(WRITER, "test_a_disk_that_hangs_is_waited_for_once")
        + _in(HUNG, "test_a_dataset_on_a_hung_mount_is_waited_for", "test_checkpoints_on_a_hung_mount_end_no_training"),
    ),
    Row(
        35,
        "Q",
        "a resume under another layout",
        "the same values",
        _in("ranks/test_relayout", "test_what_divided_stages_wrote_one_process_takes_up"),
        _in("ranks/test_relayout", "test_resumed_under_every_other_layout"),
    ),
    Row(
        36,
        "Q",
        "a stop at any step, and a resume",
        "the same bits",
        _in(PREEMPTED, "test_asked_to_stop"),
        _in(PREEMPTED, "test_killed_altogether"),
    ),
    Row(
        37,
        "Q",
        "a loss or gradient that is not finite on one rank",
        "all ranks leave the step out, go back or stop; the samples are named",
        _in("faults/test_nonfinite", "test_skip_leaves_the_step_out", "test_stop_exits_with_65_and_a_resume_may_skip"),
    ),
    Row(
        38,
        "N",
        "a loss spike",
        "named where the callback watches",
        soak=_in("unit/training/callbacks/test_ready_made_spikes", "test_spikes_in_a_row_are_told_once"),
    ),
    Row(
        39,
        "Q",
        "a sample that cannot be read",
        "another in its place, alike on any layout; or an error that names it",
        _in(
            INCIDENTS,
            "test_bad_samples_are_left_out_alike_on_any_number_of_devices",
            "test_more_bad_samples_than_are_allowed",
        ),
        _in(INCIDENTS, "test_bad_samples_with_workers_and_fused"),
    ),
    Row(
        40,
        "Q",
        "ranks with fewer samples, or none",
        "all end together; each sample weighs the same",
        _in(
            "ranks/test_samples",
            "test_a_rank_that_gets_nothing_in_exact_mode",
            "test_a_short_last_step_weighs_by_its_samples",
        ),
    ),
    Row(
        41,
        "Q",
        "a data worker dies, hangs or raises",
        "it is replaced at its exact place; what it raised is named",
        _in(INCIDENTS, "test_a_data_worker_that_dies_or_hangs"),
        _in(INCIDENTS, "test_a_data_worker_that_dies_or_hangs")
        + _in("faults/test_raising", "test_a_data_worker_that_raises"),
    ),
    Row(
        42,
        "Q",
        "/dev/shm is too small",
        "an error that says so, and how to make it larger",
        _in("unit/data/test_source", "test_shared_memory_that_is_too_small_is_no_fault_of_the_samples"),
        _in(ENDS, "test_too_little_shared_memory"),
    ),
    Row(
        43,
        "Q",
        "out of memory",
        "smaller microbatches and the same training, or an error",
        _in("faults/test_memory", "test_goes_on_with_smaller_microbatches", "test_one_grain_does_not_fit"),
    ),
    Row(
        44,
        "Q",
        "a bit flips in one replica",
        "found within K steps, and taken back",
        _in(INCIDENTS, "test_a_flipped_bit_is_found_and_taken_back"),
    ),
    Row(
        45,
        "Q",
        "collectives of the job's own that do not match",
        "both ranks are named, with call and line",
        _in("faults/test_mismatched_collectives", "test_both_ranks_and_their_calls_are_named"),
    ),
    Row(
        46,
        "Q",
        "the clock jumps",
        "nothing",
        _in(WATCH, "test_a_clock_that_jumps_raises_no_alarm", "test_the_launchers_own_pause_counts_for_nobody"),
    ),
    Row(
        47,
        "N",
        "too few file descriptors",
        "an error that says so",
        soak=_in(ENDS, "test_too_few_descriptors"),
    ),
    Row(
        48,
        "Q",
        "a worker or a parameter server dies; a push comes late or twice",
        "each push counts once",
        _in(SERVED, "test_killed_in_synchronous_mode_the_weights_are_those_of_one_process")
        + _in(
            "unit/training/parameter_server/test_task_queue",
            "test_what_is_put_back_comes_first_and_under_another_ticket",
        ),
        _in(
            SERVED,
            "test_a_server_that_dies_ends_the_run_which_goes_on_elsewhere",
            "test_killed_and_stopped_in_asynchronous_mode_the_run_goes_on",
        ),
    ),
    Row(
        49,
        ENGINES,
        "Ray, Spark, Slurm, ssh: a killed worker or driver, a requeue, a drained node, a lost host",
        "the run goes on, or ends with nothing left",
        soak=_in("engines/test_ray", "test_nothing_is_left_of_a_killed_driver")
        + _in("engines/test_spark", "test_a_lost_rank")
        + _in("engines/test_slurm", "test_preempted_and_requeued", "test_a_drained_node_is_named_and_waited_for")
        + _in("engines/test_ssh", "test_of_a_range_a_lost_host_is_left_out"),
    ),
    Row(
        50,
        "Q",
        "stdout is closed or full, the terminal is gone",
        "the training goes on",
        _in(OUTPUT, "test_stdout_and_stderr_take_no_more[closed-1]"),
        _in(OUTPUT, "test_stdout_and_stderr_take_no_more", "test_the_terminal_is_gone"),
    ),
    Row(
        51,
        "QN",
        "a mix of faults for as long as the run lasts",
        "90 % of the time counts at one a minute, 60 % at one in 15 s; simulated every time, real in the soak",
        _in("benchmarks/test_simulated", "test_most_of_the_time_counts_at_the_rates_of_the_soak"),
        ("scripts/soak",),
    ),
    Row(
        52,
        "Q",
        "any order of starts, takers, committers and pauses",
        "one commit a step; nothing that was committed is lost",
        _in("unit/runs/test_directory_lock_machine", "TestMembership")
        + _in("unit/runs/test_directory_lock_interleaved", "test_in_any_order"),
    ),
)


def page() -> str:
    """The table, as benchmarks/results/faults.md has it."""
    lines = [
        "| # | Fault | What becomes of it | In every run of the tests | In the soak besides |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        more = tuple(test for test in row.soak if test not in row.usual)
        cells = (str(row.number), row.fault, row.outcome, _shown(row.usual), _shown(more))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(tests: tuple[str, ...]) -> str:
    """Tests by name; of the same file only the first has it."""
    shown, before = [], ""
    for test in tests:
        file, _, name = test.partition("::")
        shown.append(f"`{file.removesuffix('.py')}: {name}`" if name and file != before else f"`{name or file}`")
        before = file
    return "<br>".join(shown)


def files() -> list[str]:
    """The files of all tests but those of engines, from the repository's root."""
    own = [test.partition("::")[0] for row in ROWS if row.tier != ENGINES for test in (*row.usual, *row.soak)]
    return sorted({f"tests/{name}" for name in own if name.endswith(".py")})


if __name__ == "__main__":
    print("\n".join(files()) if sys.argv[1:] == ["files"] else page(), end="")
