"""The `shoal plan` command."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from shoal.cli.options import PlanOptions
from shoal.cli.script import refuse_script_options, script_of
from shoal.errors import CommandError, ExitCode, PlanError
from shoal.hardware import cluster as find_cluster
from shoal.jobs.job import Job
from shoal.jobs.job_file import load, parse_target
from shoal.jobs.secret_settings import command_without_secrets
from shoal.jobs.settings import setting_text, written
from shoal.launch.environment import inside_run
from shoal.planner.calibrate.lessons import learn_from
from shoal.planner.calibrate.processes import record
from shoal.planner.search.search import gib, parse
from shoal.plans.plan import Plan, layout_name
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.programs import emit
from shoal.report.quantities import seconds
from shoal.runs.directory import write_file

if TYPE_CHECKING:
    from shoal.planner.answer.display import Answer
    from shoal.planner.search.search import Candidate
    from shoal.programs.as_job import ObservedJob

_QUIET_SECONDS, _TERMINAL_SECONDS, _FILE_SECONDS = 1.5, 0.5, 5.0


class PlanProgress:
    """Context that says on stderr what a plan is doing, after 1.5 s and then regularly.

    On a terminal the line is updated in place and cleared at the end; a file or a pipe gets plain lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._stage, self._num_steps, self._width = "loading the job", 0, 0
        self._began, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shoal-plan-progress")

    def __enter__(self) -> PlanProgress:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_terminal and self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()

    def enter(self, stage: str) -> None:
        """Name what happens from here on."""
        self._stage, self._num_steps = stage, 0

    def step(self) -> None:
        """Count one more node of the search."""
        self._num_steps += 1

    def line(self) -> str:
        """Return what is happening, and for how long the plan has been made."""
        steps = f": {self._num_steps:,} groups of plans" if self._num_steps else ""
        return f"{self._stage}{steps} ({time.monotonic() - self._began:.0f} s)"

    def _run(self) -> None:
        wait = _QUIET_SECONDS
        while not self._ended.wait(wait):
            line, wait = self.line(), _TERMINAL_SECONDS if self._is_terminal else _FILE_SECONDS
            text = f"\r{line.ljust(self._width)}" if self._is_terminal else f"{line} ...\n"
            self._width = max(self._width, len(line))
            self._stream.write(text)
            self._stream.flush()


def plan(options: PlanOptions) -> ExitCode:
    """Answer the question in the options. Raises: ShoalError if there is no answer."""
    if options.learn is not None:
        given = [f.name for f in fields(options) if f.name != "learn" and getattr(options, f.name) != f.default]
        if given:
            names = ", ".join("JOBFILE" if name == "job" else f"--{name.replace('_', '-')}" for name in given)
            raise CommandError(
                given=f"shoal plan --learn {' '.join(options.learn)} with {names}",
                conflict="--learn only reads run directories, which name their clusters, and makes no plan",
                remedy="write two commands: shoal plan --learn RUNDIR, and then shoal plan JOBFILE with the others",
            )
        learn_from(options.learn)
        return ExitCode.DONE
    framework, _, emitted = (options.emit or "").partition("=")
    if options.emit is not None:
        emit.framework(framework)
    for text in (options.output, options.html, emitted):
        if text and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
            raise CommandError(
                given=f"-o, --html or --emit {text}",
                conflict="that is a folder" if Path(text).is_dir() else "there is no such folder",
                remedy="give the name of a file in a folder that exists",
            )
    if options.script is not None:
        from shoal.programs.command import job_answer  # torch

        script = script_of("plan", options)
        request = {**asdict(options), "script": None, "batch": None, "columns": shutil.get_terminal_size().columns}
        for name in ("output", "html"):
            request[name] = request[name] and str(Path(request[name]).absolute())
        with PlanProgress(sys.stderr) as progress:
            progress.enter("running one step of the script without values, and planning")
            print(job_answer(script, "shoal.cli.plan:of_observed", request), end="")
        return ExitCode.DONE
    refuse_script_options("plan", options)
    answer = answered(options)
    from shoal.jobs.configured_job import PREFIX

    trained = "JOBFILE" if str(options.job).startswith(PREFIX) else shlex.quote(str(options.job))
    words = ["shoal run", trained, *(f"--config {shlex.quote(path)}" for path in options.config)]
    texts = [one if isinstance(one, str) else f"{one[0]}={setting_text(*one)}" for one in options.set]
    words += [f"--set {shlex.quote(text)}" for text in command_without_secrets(texts)]
    is_default = all(getattr(options, name) == getattr(PlanOptions, name) for name in ("cluster", "aim", "max_devices"))
    if options.output:
        words += [f"--plan {shlex.quote(options.output)}"]
    elif is_default and trained != "JOBFILE":
        words += ["--plan auto"] + ([f"--precision {options.precision}"] if options.precision else [])
    else:
        words += ["--plan plan.toml  # by -o plan.toml"]
    _show(options, answer, " ".join(words))
    return ExitCode.DONE


def _show(options: PlanOptions, answer: Answer, typed: str, seen: Sequence[list[str]] = ()) -> None:
    """Print an answer, below rows of what was seen of a script, and write the files of the options."""
    framework, _, emitted = (options.emit or "").partition("=")
    emission = configuration_for(answer, framework) if options.emit is not None else None
    from shoal.planner.answer.display import console_of_width, front, show

    rows = [*seen, *front(answer, typed, "--more")]
    if emission is not None:
        rows.insert(-1, ["emit", emission.row])
    show(answer, console_of_width(), rows, more=options.more)
    if options.output:
        answer.write(options.output)
        print(f"plan written: {options.output}")
    if options.html:
        answer.write_html(options.html)
        print(f"page written: {options.html}")
    if emission is not None:
        if emitted or not emit.FRAMEWORKS[framework].comment:
            print("\n".join(["", *emission.notes]))
        if emitted:
            write_file(Path(emitted), emission.text)
            print(f"configuration written: {emitted}")
        else:
            print(f"\n{emission.text}", end="")


def of_observed(observed: ObservedJob, request: dict[str, Any]) -> str:
    """Return what `shoal plan` prints of a script's Job, in the script's process. Raises: ShoalError."""
    width = request.pop("columns")
    os.environ["COLUMNS"] = str(width)
    options = PlanOptions(**{**request, "precision": request["precision"] or observed.precision})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        answer = answered(options, (observed.job, observed.name))
        profile, batch = answer.question.case.work.profile, observed.job.global_batch
        state = profile.num_parameters * profile.state_bytes_per_element
        rows = [*observed.rows, ["work", f"{profile.flops(batch):.3g} FLOPs a step, {gib(state)} of optimizer state"]]
        layout = answer.chosen.plan.layout
        ranks = layout.data * layout.shard
        risks = list(observed.risks)
        if batch % ranks:
            risks.insert(0, f"{batch} samples do not divide by {ranks} ranks: a mean over ranks weighs them unequally")
        rows += [["risk", text] for text in risks]
        typed = "the script, with its framework's own options: --emit NAME writes them"
        _show(options, answer, typed, rows)
    return printed.getvalue()


class Emission(NamedTuple):
    """Configuration of another framework, what it cannot say, its row of the answer, and the plan that it has."""

    text: str
    notes: list[str]
    row: str
    candidate: Candidate


def configuration_for(answer: Answer, name: str) -> Emission:
    """Return the configuration of another framework with the best layout that it can express.

    Raises: PlanError if none fits.
    """
    from shoal.planner.answer.elsewhere import elsewhere

    case, target = answer.question.case, emit.framework(name)
    cluster, space = case.cluster, case.space
    if cluster.kinds:
        raise PlanError(
            given=f"--emit {name} with a plan for {cluster.name}",
            conflict=f"{target.title} gives devices of several kinds equal shares",
            remedy="leave --emit out, or give a cluster with one kind of devices",
        )
    if space.base.precision.products != "same":
        raise PlanError(
            given=f'--emit {name} with precision.products = "{space.base.precision.products}"',
            conflict=f"shoal writes no float8 keys for {target.title}",
            remedy="write --precision bf16, or leave --emit out",
        )
    batch, grains = case.work.global_batch, case.work.num_grains
    if batch % grains:
        raise PlanError(
            given=f"--emit {name} with {batch} samples in {grains} grains",
            conflict=f"{target.title} has microbatches of one size, and {batch} is no multiple of {grains}",
            remedy=f"give the job grains={max(n for n in range(1, grains) if batch % n == 0)}, or leave --emit out",
        )
    facts = emit.Facts(
        case.work.global_batch,
        case.work.num_grains,
        device="cuda" if cluster.device.kind == "gpu" else "cpu",
        sequence=answer.question.sample_tokens,
        blocks=space.facts.blocks,
        pure=space.base.precision.parameters != "float32",
    )
    with PlanProgress(sys.stderr) as progress:
        progress.enter(f"searching for {target.title}")
        best = elsewhere(answer, name, target.axes, lambda plan: target.beyond(plan, facts))
    facts = replace(facts, hosts=-(-best.devices // cluster.devices_per_host))
    own, change = answer.chosen, best.seconds / answer.chosen.seconds - 1.0
    predicted = f"{layout_name(best.plan)} on {best.devices:,}: {seconds(best.seconds)} a step"
    text, notes = target.configuration(
        best.plan,
        facts,
        f"{target.title}, for {answer.job} on {cluster.name}, by shoal plan.",
        f"Predicted with its habits: {predicted}.",
        f"With shoal: {layout_name(own.plan)} on {own.devices:,}: {seconds(own.seconds)} a step.",
    )
    difference = f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'} than shoal's"
    return Emission(text, notes, f"{name}: {predicted}, {difference}", best)


def answered(options: PlanOptions, given: tuple[Job, str] | None = None, *, data_only: bool = False) -> Answer:
    """Return the answer to the question in the options.

    Args:
        options: of `shoal plan`.
        given: the job and its name, if it is in no file.
        data_only: only the data axis is planned.

    Raises: ShoalError if there is no answer.
    """
    if options.job is None and given is None:
        raise CommandError(
            given="shoal plan without a JOBFILE",
            conflict="there is nothing to plan",
            remedy="write shoal plan JOBFILE --cluster 8xH100, --script COMMAND in place of the job, or --learn RUNDIR",
        )
    aim = parse(options.aim)
    hours = _above_zero("--mtbf", options.mtbf, "hours", "8")
    dollars = _above_zero("--price", options.price, "US dollars", "2.50")
    tokens = _above_zero("--tokens", options.tokens, "tokens", "1e12")
    samples = _above_zero("--samples", options.samples, "samples", "1e9")
    if tokens is not None and samples is not None:
        raise CommandError(
            given=f"--tokens {options.tokens} --samples {options.samples}",
            conflict="each of them is the length of the job",
            remedy="write one of them",
        )
    with PlanProgress(sys.stderr) as progress:
        progress.enter("loading torch")
        from shoal.planner.answer.answer import answer, question

        progress.enter("loading the job")
        job, name, precision = _loaded(options, given)
        base = apply_wishes(Plan(), Wishes(precision=precision), from_file=False)
        progress.enter("tracing the model and reading samples")
        case = question(job, base, options.cluster, options.max_devices)
        case = case.of_length(tokens=tokens, samples=samples).at_price(dollars)
        space = replace(case.case.space, data_only=data_only)
        case = replace(case, case=replace(case.case, space=space, watch=progress.step))
        progress.enter("searching")
        result = answer(case, aim, name, hours, time.perf_counter)
    is_file = isinstance(options.job, str) and not name.startswith("hf:")
    if is_file and options.cluster == "here" and result.question.case.cluster.device.kind == "cpu":
        best = ((point.devices, point.best) for point in result.curve.points if point.best is not None)
        by_data = {n: one.seconds for n, one in best if one.plan.layout.data == n}  # as `--devices N` divides a job
        record(parse_target(str(options.job), options.set, options.config), options.precision, by_data)
    return result


def _loaded(options: PlanOptions, given: tuple[Job, str] | None) -> tuple[Job, str, str | None]:
    """Return the job, its name and its precision. The default for a configuration on GPUs is bfloat16."""
    from shoal.jobs.configured_job import PREFIX, configured_job  # torch

    target = given[1] if given is not None else str(options.job)
    if given is None and target.startswith(PREFIX):
        files = [f"--config {path}" for path in options.config]
        for setting in (*options.set, *files):
            raise CommandError(
                given=f"{setting if isinstance(setting, str) else written(*setting)} with {target}",
                conflict="a configuration has no job function to set parameters of",
                remedy="write --seq and --batch, and the other sizes into its config.json",
            )
        job = configured_job(target, options.seq, options.batch)
        is_gpu = find_cluster(options.cluster).device.kind == "gpu"
        return job, target, options.precision or ("bf16" if is_gpu else None)
    sizes = {"--seq": options.seq, "--batch": options.batch}
    for flag, size in sizes.items():
        if size is not None:
            raise CommandError(
                given=f"{flag} {size} with {target}",
                conflict=f"{flag} is for a configuration, hf:DIR: a job file says its own",
                remedy="write --set NAME=VALUE for a parameter of the job function",
            )
    if given is not None:
        return *given, options.precision
    request = parse_target(target, options.set, options.config)
    with inside_run(os.environ):
        loaded = load(request)
    return loaded.job, f"{request.target}:{loaded.function}", options.precision


def _above_zero(flag: str, text: str | float | None, unit: str, example: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise CommandError(
            given=f"{flag} {text}",
            conflict=f"{flag} takes a number of {unit} above zero",
            remedy=f"write {flag} {example}, say",
        )
    return value
