"""Builds wheel and sdist, compares their files with the sources, and runs the README's job from the wheel.

python scripts/wheel.py                    builds into dist/, and checks what the two files contain
python scripts/wheel.py --try              also runs the job, with no more packages of this environment than required
python scripts/wheel.py --python PYTHON    also runs it with PYTHON, of an environment with torch and scikit-learn
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def build(folder: Path, sources: Path = ROOT) -> tuple[Path, Path]:
    """Build the wheel and the sdist of a source tree into a folder, in place of older ones. Return their paths."""
    for old in folder.glob("shoal-*"):
        old.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder.resolve())]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"wheel: the build failed:\n{done.stdout}{done.stderr}")
    (wheel,), (sdist,) = folder.glob("shoal-*.whl"), folder.glob("shoal-*.tar.gz")
    return wheel, sdist


def differences(wheel: Path, package: Path = ROOT / "src" / "shoal") -> list[str]:
    """Return how a wheel's files differ from those of the package: missing, changed, or in excess."""
    files = {f"shoal/{path.relative_to(package).as_posix()}": path for path in package.rglob("*") if path.is_file()}
    wanted = {name: path.read_bytes() for name, path in files.items() if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    found = [f"{name}: not in the wheel" for name in sorted(wanted.keys() - packed.keys())]
    found += [f"{name}: changed in the wheel" for name in wanted.keys() & packed if wanted[name] != packed[name]]
    extra = sorted(packed.keys() - wanted.keys())
    return found + [f"{name}: only in the wheel" for name in extra if not re.match(r"shoal-[^/]+\.dist-info/", name)]


def rebuilt(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into a folder and return the wheel that is built from it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)  # noqa: S202  (an archive of our own; Python before 3.11.4 knows no filter)
    return build(folder / "dist", folder / sdist.name.removesuffix(".tar.gz"))[0]


def required(wheel: Path, extra: str) -> list[Distribution]:
    """Return the installed packages that a wheel requires with one extra, and those that they require."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    waiting = [line.split(":", 1)[1] for line in lines if line.startswith("Requires-Dist:")]
    found: dict[str, Distribution] = {}
    while waiting:
        wish = Requirement(waiting.pop())
        if wish.name not in found and (wish.marker is None or wish.marker.evaluate({"extra": extra})):
            found[wish.name] = distribution(wish.name)
            waiting += found[wish.name].requires or []
    return list(found.values())


def environment(folder: Path, wheel: Path, packages: list[Distribution]) -> Path:
    """Make a virtual environment of a wheel and links to those packages. Return its interpreter."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in packages:
        for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(package.locate_file(name))))
    return install(wheel, folder / "bin" / "python")


def install(wheel: Path, python: Path) -> Path:
    """Install a wheel alone, and check that what it requires is there. Return the interpreter."""
    pip = [*PIP, "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)], check=True)
    done = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    if broken := [line for line in done.stdout.splitlines() if line.startswith("shoal ")]:
        raise SystemExit("wheel: " + "; ".join(broken))
    return python


def run_readme(python: Path, folder: Path) -> None:
    """Run the README's job in a folder as a new user does, and make a report of it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (job,) = re.findall(r"```python\n(# digits_job\.py\n.*?)```", text, re.DOTALL)
    (folder / "digits_job.py").write_text(job, encoding="utf-8")
    outside = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}

    def call(*words: str) -> str:
        command = [str(python.parent / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"wheel: {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    home = call("python", "-c", "import shoal; print(shoal.__file__)")
    if not Path(home).is_relative_to(python.parent.parent):
        raise SystemExit(f"wheel: shoal is imported from {home}")
    for line in re.findall(r"^shoal (?:run|plan) .*", text, re.MULTILINE):
        call(*line.split("#")[0].split())
    call("shoal", "report", "runs/two", "-o", "report.html")
    results = [json.loads((folder / "runs" / name / "result.json").read_text()) for name in ("two", "three")]
    if results[0]["weights_sha256"] != results[1]["weights_sha256"]:
        raise SystemExit("wheel: two and three processes gave different weights")


def main() -> None:
    """Build, check and try what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="here", action="store_true")
    parser.add_argument("--python", type=Path)
    chosen = parser.parse_args()
    wheel, sdist = build(ROOT / "dist")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = differences(wheel)
        if rebuilt(sdist, folder / "sdist").read_bytes() != wheel.read_bytes():
            found.append(f"{sdist.name}: gives another wheel")
        if found:
            raise SystemExit("\n".join(f"wheel: {line}" for line in found))
        print(f"wheel: dist/{wheel.name} and dist/{sdist.name} have all files of the package and no others")
        pythons = [environment(folder / "environment", wheel, required(wheel, "examples"))] if chosen.here else []
        pythons += [install(wheel, chosen.python.absolute())] if chosen.python else []
        for number, python in enumerate(pythons):
            (folder / f"user{number}").mkdir()
            run_readme(python, folder / f"user{number}")
            version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
            print(f"wheel: the README's job ran from {wheel.name} on {version}")


if __name__ == "__main__":
    main()
