"""Commands on a training script as it is: `--script` of `shoal verify`, `shoal plan` and `shoal doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import DoctorOptions, PlanOptions, VerifyOptions
from shoal.errors import CommandError, say_note
from shoal.hardware.detect import visible_gpus
from shoal.runs.directory import default_directory
from shoal.runs.options import declared, option_names, whole_number

if TYPE_CHECKING:
    from shoal.programs.command import Script

# Options that only scripts have. Others that scripts have too, by command; the rest is of jobs alone.
_OF_SCRIPTS = ("launcher", "batch", "keep", "cpu", "devices", "out")
_OF_BOTH = {
    "doctor": ("run", "script", "steps", "json"),
    "verify": ("job", "script", "devices", "steps", "out"),
    "plan": tuple(n for n in option_names(PlanOptions) if n not in ("set", "config", "seq", "launcher", "cpu")),
}
_STEPS, _BATCH = 10, 8


def _subject(options: VerifyOptions | PlanOptions | DoctorOptions) -> str:
    """Return what is examined in place of a script, in words that begin with "no" if there is none."""
    name, given = ("run", options.run) if isinstance(options, DoctorOptions) else ("job", options.job)
    return f"no {name}" if given is None else f"the {name} {given}"


def refuse_script_options(command: str, options: VerifyOptions | PlanOptions | DoctorOptions) -> None:
    """Check that what is no script is not given options of scripts. Raises: CommandError."""
    for one in declared(type(options)):
        value: Any = getattr(options, one.name)
        if one.name in _OF_SCRIPTS and one.name not in _OF_BOTH[command] and value != one.default:
            raise CommandError(
                given=f"{one.flag} and {_subject(options)}",
                conflict="it says how a training script is started or recorded",
                remedy=f"leave out {one.flag}, or write --script COMMAND in place of it",
            )


def script_of(command: str, options: VerifyOptions | PlanOptions | DoctorOptions) -> Script:
    """Return the script of the options. Raises: CommandError if there is none, or for options of jobs alone."""
    subject = _subject(options)
    if options.script is None or not subject.startswith("no "):
        kind, name = ("run", "RUN") if command == "doctor" else ("job", "JOBFILE")
        what = f"a {kind} and a script" if options.script is not None else f"no {kind} and no script"
        raise CommandError(
            given=f"shoal {command} with {what}",
            conflict="it is about one of them",
            remedy=f'write shoal {command} {name}, or shoal {command} --script "train.py --batch-size {{batch}}"',
        )
    for one in declared(type(options)):
        value: Any = getattr(options, one.name)
        if one.name not in (*_OF_SCRIPTS, *_OF_BOTH[command]) and value != one.default:
            raise CommandError(
                given=f"--script with {one.flag}",
                conflict="a script has its own layout, precision and settings",
                remedy=f"leave out {one.flag}, and give the script its own arguments",
            )
    from shoal.programs.command import Script

    script = Script(options.script, options.launcher, options.batch or _BATCH, cpu=options.cpu)
    script.check()
    return script


def place_of(options: VerifyOptions | DoctorOptions, name: str) -> tuple[int, Path]:
    """Return a script's number of processes, and the directory for what is written. Raises: CommandError."""
    devices = whole_number("--devices", options.devices, 1) or (0 if options.cpu else visible_gpus()) or 2
    if options.devices is None:
        say_note(f"--devices is not given: {devices} processes")
    out = Path(options.out) if options.out else default_directory(name, resume=False)
    if (out / "job.json").exists():
        raise CommandError(
            given=f"--out {out}", conflict="it holds a run of a job", remedy="give another directory, or none"
        )
    out.mkdir(parents=True, exist_ok=True)
    return devices, out


def verify_as_it_is(options: VerifyOptions) -> int:
    """Verify the script of the options. Raises: CommandError."""
    script = script_of("verify", options)
    from shoal.programs.command import verify_script

    devices, out = place_of(options, f"{script.name}-verify")
    return int(verify_script(script, devices, options.steps or _STEPS, out, keep=options.keep))
