"""Launcher on Slurm: writes a readable batch script, submits it, and follows its job to the end."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import CommandError, ExitCode, LaunchError
from shoal.launch.environment import RESTARTS
from shoal.launch.launchers.base import Submission, words_of
from shoal.launch.signals import Signals
from shoal.runs.directory import write_file

SCRIPT = "slurm.sh"
_LOOK_SECONDS = 1.0
# The ranks get a request to save and end this long before the time limit.
_NOTICE_SECONDS = 120
# Slurm's own word for the number of an array's task, in --set, --out and the name of the output.
_TASK = "%a"
# This is Slurm's default. If it is given, Slurm 22.05 gives a range of nodes only its minimum.
_ONE_A_NODE = "--ntasks-per-node=1"
_ENDED = {
    "COMPLETED": ExitCode.DONE,
    "CANCELLED": ExitCode.PREEMPTED,
    "PREEMPTED": ExitCode.PREEMPTED,
    "TIMEOUT": ExitCode.PREEMPTED,
    "DEADLINE": ExitCode.PREEMPTED,
    "NODE_FAIL": ExitCode.RANK_LOST,
    "BOOT_FAIL": ExitCode.RANK_LOST,
    "OUT_OF_MEMORY": ExitCode.RANK_LOST,
}
_FAILED = "FAILED"

_TEMPLATE = """\
#!/bin/bash
{directives}

# Written by shoal run --on slurm. To submit it again: sbatch {script}
# Of each task of srun, shoal is one rank. A job that Slurm starts again goes on from the newest checkpoint.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"
{restarts}=0
while true; do
    srun --mpi=none \\
        {command}
    code=$?
    # {lost} and what signals leave: a rank was lost, and all start again, here.
    if [ "$code" -ne {lost} ] && [ "$code" -lt 128 ]; then break; fi
    if [ "${restarts}" -ge {most} ]; then code={lost}; break; fi
    export {restarts}=$(({restarts} + 1))
    echo "note: a rank was lost; all ranks start again (${restarts} of {most})"
done
# {preempted}: a checkpoint was saved on request, such as before the time limit; the rest is another start's.
if [ "$code" -eq {preempted} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def render(submission: Submission) -> Mapping[str, str]:
    """Return the batch script. Raises: CommandError for options that do not have sbatch's form."""
    options = words_of(submission.options)
    wrong = [word for word in options if not word.startswith("-") or word == "--"]
    if wrong:
        raise CommandError(
            given=f"--on slurm:{submission.options}",
            conflict=f"{wrong[0]!r} is not an option of sbatch",
            remedy='write each as one word: --on "slurm:--partition=gpu --time=60"',
        )
    array = is_array(options)
    output = "slurm-%A_%a.out" if array else "slurm-%j.out"
    out = submission.address or str(submission.out)
    arguments = list(submission.arguments)
    if array and not any(_TASK in word for word in arguments[arguments.index("--out") :][:2]):
        arguments[arguments.index("--out") + 1] = f"{out}/{_TASK}"
    words = [*submission.command[: len(submission.command) - len(arguments)], *arguments]
    directives = [
        f"--job-name={submission.name}",
        *_sizes(submission, options),
        *([f"--nodes={submission.num_hosts}"] if submission.num_hosts else []),
        *(["--gpus-per-task=1"] if submission.gpus else []),
        f"--chdir={submission.folder}",
        f"--output={_folder(submission, options)}/{output}",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{_NOTICE_SECONDS}",
        *(option for option in options if submission.least_processes is None or option != _ONE_A_NODE),
    ]
    text = _TEMPLATE.format(
        directives="\n".join(f"#SBATCH {shlex.quote(directive)}" for directive in directives),
        script=shlex.quote(str(_folder(submission, options) / SCRIPT)),
        threads=submission.threads or "${SLURM_CPUS_PER_TASK:-1}",
        command=" ".join(_quoted(word) if array else shlex.quote(word) for word in words),
        restarts=RESTARTS,
        most=submission.max_restarts,
        lost=int(ExitCode.RANK_LOST),
        preempted=int(ExitCode.PREEMPTED),
    )
    return {SCRIPT: text}


def _sizes(submission: Submission, options: list[str]) -> list[str]:
    """Return the directive for the number of tasks or, for a range, of nodes: Slurm has ranges only of nodes."""
    if submission.least_processes is None:
        return [f"--ntasks={submission.num_processes}"]
    known = [word.partition("=")[2] for word in options if word.startswith("--ntasks-per-node=")]
    if not known or not known[-1].isdecimal() or int(known[-1]) < 1:
        raise CommandError(
            given=f"--devices {submission.least_processes}:{submission.num_processes} --on slurm:{submission.options}",
            conflict="Slurm gives a range of nodes, and nothing says how many ranks a node has",
            remedy='add it: --on "slurm:--ntasks-per-node=8"',
        )
    per_node = int(known[-1])
    least, most = -(-submission.least_processes // per_node), submission.num_processes // per_node
    if least > most:
        raise CommandError(
            given=f"--devices {submission.least_processes}:{submission.num_processes}, --ntasks-per-node={per_node}",
            conflict="no number of whole nodes is between the two",
            remedy="write limits that are multiples of it",
        )
    return [f"--nodes={least}-{most}"]


def is_array(options: list[str]) -> bool:
    """Check whether sbatch's options make a job array."""
    return any(word == "-a" or word.startswith(("--array", "-a")) for word in options)


def _folder(submission: Submission, options: list[str]) -> Path:
    """Return the folder for the script and the output: the run directory or, for an array, its tasks' common parent.

    If the run directory is at an address, the folder is a local one, since Slurm writes the output to a disk.
    """
    if submission.address is not None:
        return submission.folder / "runs" / f"{submission.name}.slurm"
    out = submission.out
    while is_array(options) and _TASK in str(out):
        out = out.parent
    return out


def _quoted(word: str) -> str:
    """Quote a word for bash, with the array's task number inserted."""
    if _TASK not in word:
        return shlex.quote(word)
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split(_TASK))


def start(submission: Submission, signals: Signals) -> int:
    """Submit the script, which stays in the run directory, and follow its job. Raises: LaunchError."""
    options = words_of(submission.options)
    text = render(submission)[SCRIPT]
    folder = _folder(submission, options)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / SCRIPT, text)
    number = _slurm("sbatch", "--parsable", str(folder / SCRIPT)).strip().partition(";")[0]
    print(f"slurm job {number}: {folder / SCRIPT}", flush=True)
    outputs = [] if is_array(options) else [folder / f"slurm-{number}.out"]
    if is_array(options):
        print(f"output of its tasks: {folder}/slurm-{number}_*.out", flush=True)
    return _SlurmJob(number, signals, dict.fromkeys(outputs, 0)).follow()


def _slurm(*words: str) -> str:
    """Run a command of Slurm and return its output. Raises: LaunchError if it is missing or fails."""
    if shutil.which(words[0]) is None:
        raise LaunchError(
            given="--on slurm",
            conflict=f"{words[0]} is not on this host",
            remedy="give the command on a host that submits jobs, or add --dry-run and take the script there",
        )
    ended = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        said = ended.stderr.strip() or ended.stdout.strip()
        munge = "munge" in said.lower()
        raise LaunchError(
            given=shlex.join(words),
            conflict=said,
            remedy="start munged on this host with the cluster's key: Slurm authenticates users with it"
            if munge
            else "correct what Slurm reports; its options follow the colon of --on slurm:",
        )
    return ended.stdout


@dataclass
class _SlurmJob:
    """Progress of a job, or of an array's tasks, to the end. `outputs`: files, and how many bytes of each are shown."""

    number: str
    signals: Signals
    outputs: dict[Path, int]
    _shown: str = ""
    _seen: dict[str, dict[str, str]] = field(default_factory=dict)

    def follow(self) -> int:
        """Wait until all tasks have ended and return the highest exit code."""
        handed_on = 0
        while True:
            self._show_outputs()
            if not self._look():
                break
            if signal.SIGHUP in self.signals.received:  # the terminal is closed; the job continues under Slurm
                return int(ExitCode.DONE)
            if len(self.signals.received) > handed_on:
                handed_on = len(self.signals.received)
                words = ["scancel", *(["--signal=KILL"] if self.signals.twice else []), self.number]
                subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL)
            time.sleep(_LOOK_SECONDS)
        time.sleep(_LOOK_SECONDS / 4)  # for the last lines
        self._show_outputs()
        codes = [_code(task) for task in self._seen.values()]
        if any(codes):
            states = ", ".join(sorted({task["JobState"] for task in self._seen.values()}))
            print(f"slurm job {self.number}: {states}", file=sys.stderr)
        return max(codes, default=int(ExitCode.FAILED))

    def _show_outputs(self) -> None:
        for path, shown in self.outputs.items():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(shown)
                print(file.read().decode(errors="replace"), end="", flush=True)
                self.outputs[path] = file.tell()

    def _look(self) -> bool:
        """Print changes of the tasks' states. Return whether a task has not ended yet."""
        words = ["scontrol", "show", "job", "-o", self.number]
        shown = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        tasks = [dict(w.split("=", 1) for w in line.split() if "=" in w) for line in shown.stdout.splitlines()]
        self._seen.update({task["JobId"]: task for task in tasks if "JobId" in task})
        if not tasks:  # Slurm has removed the job or does not answer
            return shown.returncode != 0 and "Invalid job id" not in shown.stderr
        states = "; ".join(sorted({_described(task) for task in tasks}))
        if states != self._shown:
            self._shown = states
            print(f"slurm job {self.number}: {states}", file=sys.stderr, flush=True)
        for task in tasks:
            is_requeued = task.get("JobState") in ("PREEMPTED", "NODE_FAIL") and task.get("Requeue") == "1"
            if is_requeued or task.get("JobState") not in (*_ENDED, _FAILED):
                return True
        return False


def _described(task: dict[str, str]) -> str:
    state, reason = task.get("JobState", "?").lower(), task.get("Reason", "None")
    where = f" on {task['NodeList']}" if state == "running" else ""
    return f"{state}{where}" + (f" ({reason})" if reason not in ("None", "") else "")


def _code(task: dict[str, str]) -> int:
    state = task.get("JobState", "")
    if state == _FAILED:
        code, _, number = task.get("ExitCode", "1:0").partition(":")
        return int(code) or (int(ExitCode.RANK_LOST) if number != "0" else int(ExitCode.FAILED))
    return int(_ENDED.get(state, ExitCode.FAILED))
