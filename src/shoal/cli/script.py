"""Commands on a training script as it is: `--script` of `shoal verify` and `shoal plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import PlanOptions, VerifyOptions
from shoal.errors import CommandError, say_note
from shoal.hardware.detect import visible_gpus
from shoal.runs.directory import default_directory
from shoal.runs.options import declared, option_names, whole_number

if TYPE_CHECKING:
    from shoal.programs.command import Script

# Options that only scripts have. Others that scripts have too, by command; the rest is of jobs alone.
_OF_SCRIPTS = ("launcher", "batch", "keep", "cpu")
_OF_BOTH = {
    "verify": ("job", "script", "devices", "steps", "out"),
    "plan": tuple(
        name for name in option_names(PlanOptions) if name not in ("set", "config", "seq", "launcher", "cpu")
    ),
}
_STEPS, _BATCH = 10, 8


def refuse_script_options(command: str, options: VerifyOptions | PlanOptions) -> None:
    """Check that a job is not given options of scripts. Raises: CommandError."""
    for one in declared(type(options)):
        value: Any = getattr(options, one.name)
        if one.name in _OF_SCRIPTS and one.name not in _OF_BOTH[command] and value != one.default:
            raise CommandError(
                given=f"{one.flag} and the job {options.job}",
                conflict="it says how a training script is started or recorded",
                remedy=f"leave out {one.flag}, or write --script COMMAND in place of the job",
            )


def script_of(command: str, options: VerifyOptions | PlanOptions) -> Script:
    """Return the script of the options. Raises: CommandError if there is none, or for options of jobs alone."""
    if options.script is None or options.job is not None:
        what = "a job and a script" if options.script is not None else "no job and no script"
        raise CommandError(
            given=f"shoal {command} with {what}",
            conflict="it is about one of them",
            remedy=f'write shoal {command} JOBFILE, or shoal {command} --script "train.py --batch-size {{batch}}"',
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


def verify_as_it_is(options: VerifyOptions) -> int:
    """Verify the script of the options. Raises: CommandError."""
    script = script_of("verify", options)
    from shoal.programs.command import verify_script

    devices = whole_number("devices", options.devices, 1) or (0 if options.cpu else visible_gpus()) or 2
    if options.devices is None:
        say_note(f"--devices is not given: {devices} processes")
    out = Path(options.out) if options.out else default_directory(f"{script.name}-verify", resume=False)
    if (out / "job.json").exists():
        raise CommandError(
            given=f"--out {out}", conflict="it holds a run of a job", remedy="give another directory, or none"
        )
    out.mkdir(parents=True, exist_ok=True)
    return int(verify_script(script, devices, options.steps or _STEPS, out, keep=options.keep))
