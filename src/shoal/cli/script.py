"""Commands on a training script as it is: `shoal verify --script`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.cli.options import VerifyOptions
from shoal.errors import CommandError, say_note
from shoal.hardware.detect import visible_gpus
from shoal.runs.directory import default_directory
from shoal.runs.options import declared, whole_number

# Options that only a script has; the others but these are of jobs alone.
_OF_SCRIPTS = ("launcher", "batch", "keep", "cpu")
_OF_BOTH = ("job", "script", "devices", "steps", "out")
_STEPS, _BATCH = 10, 8


def refuse_script_options(options: VerifyOptions) -> None:
    """Check that a job is not given options of scripts. Raises: CommandError."""
    for one in declared(VerifyOptions):
        if one.name in _OF_SCRIPTS and getattr(options, one.name) != one.default:
            raise CommandError(
                given=f"{one.flag} and the job {options.job}",
                conflict="it says how a training script is started or recorded",
                remedy=f"leave out {one.flag}, or write --script COMMAND in place of the job",
            )


def verify_as_it_is(options: VerifyOptions) -> int:
    """Verify the script of the options. Raises: CommandError."""
    if options.script is None or options.job is not None:
        what = "a job and a script" if options.script is not None else "no job and no script"
        raise CommandError(
            given=f"shoal verify with {what}",
            conflict="one of them is verified",
            remedy='write shoal verify JOBFILE, or shoal verify --script "train.py --batch-size {batch}"',
        )
    for one in declared(VerifyOptions):
        value: Any = getattr(options, one.name)
        if one.name not in (*_OF_SCRIPTS, *_OF_BOTH) and value != one.default:
            raise CommandError(
                given=f"--script with {one.flag}",
                conflict="a script has its own layout, precision and settings",
                remedy=f"leave out {one.flag}, and give the script its own arguments",
            )
    from shoal.programs.command import Script, verify_script

    script = Script(options.script, options.launcher, options.batch or _BATCH, cpu=options.cpu)
    script.check()
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
