"""Source of a run: git commit, uncommitted changes, packages and command line, written beside the run's records."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from shoal.jobs.secret_settings import command_without_secrets
from shoal.runs.directory import NAME as LOCK
from shoal.runs.directory import read_json, write_file

FOLDER, COMMIT, PATCH, PACKAGES, COMMAND = "source", "commit.json", "uncommitted.patch", "packages.txt", "command.json"
_MOST_PATCH_BYTES = 1_000_000
_GIT_SECONDS = 10.0
_PLAIN = ("--submodule=short", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index")
_SECRET_FILES = (".env*", "*.pem", "*key*", "*secret*")
# Private keys, and access tokens of well-known services, in the text of a changed file.
_SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}|\bgh[opsu]_\w{30,}|\bhf_\w{30,}|\bsk-[\w-]{20,}|\bxox[abprs]-"
)


def write_source(directory: Path, code: Path, *, own_command: bool = False) -> None:
    """Write what `shoal runs reproduce` needs to a locked run directory, unless it is there already.

    This takes about 20 ms. A thread would not do: processes that are forked meanwhile inherit the pipes to git, and
    git seems to last as long as they do.

    Args:
        directory: the run directory; the command is that which has locked it.
        code: folder of the job's code, which may be in a git checkout.
        own_command: record the command of this process instead, with the path of its script.
    Raises: OSError.
    """
    folder = directory / FOLDER
    if (folder / COMMAND).exists():
        return
    commit, patch = commit_of(code)
    words = None if own_command else (read_json(directory / LOCK) or {}).get("command")
    command = {
        "arguments": shlex.split(words) if isinstance(words, str) else command_without_secrets(sys.argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if patch:
        write_file(folder / PATCH, patch)
    write_file(folder / COMMIT, json.dumps(commit, indent=2) + "\n")
    write_file(folder / PACKAGES, "".join(f"{line}\n" for line in _packages()))
    write_file(folder / COMMAND, json.dumps(command, indent=2) + "\n")


def commit_of(code: Path) -> tuple[dict[str, Any], str]:
    """Return the git commit of a folder, with what is left out of the patch, and the patch of uncommitted changes.

    The commit is None outside of a checkout, with the reason. Only tracked text files are in the patch.
    """

    def git(*arguments: str) -> bytes:
        known = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        command = ["git", "-c", "core.fsmonitor=false", "-C", str(code), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, env=known, check=True)
        return done.stdout

    try:
        root = git("rev-parse", "--show-toplevel").decode().rstrip("\n")
        commit = git("rev-parse", "--verify", "HEAD").decode().strip()
        changed = git("-C", root, "diff", "HEAD", "--numstat", "-z", "--no-renames").decode(errors="surrogateescape")
        untracked = git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", "*.py").decode(
            errors="replace"
        )
        texts, left_out = [], {}
        for entry in filter(None, changed.split("\0")):
            added, _, path = entry.split("\t", 2)
            parts = PurePosixPath(path.lower()).parts
            if any(fnmatch.fnmatch(part, one) for part in parts for one in _SECRET_FILES):
                left_out[path] = "its name suggests a secret"
            elif added == "-":
                left_out[path] = "it is no text"
            else:
                texts.append(path)
        patch = ""
        if texts:
            whole = git("--literal-pathspecs", "-C", root, "diff", "HEAD", *_PLAIN, "--", *texts)
            try:
                patch = _joined(whole, texts, left_out)
            except ValueError:  # git writes it in another form
                left_out |= dict.fromkeys(texts, "git's diff could not be read")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error).encode()
        return {"commit": None, "reason": words.decode(errors="replace").strip()[:200].partition("\n")[0]}, ""
    about: dict[str, Any] = {"commit": commit, "branch": None, "remote": None, "dirty": bool(changed), "checkout": root}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        about["branch"] = git("symbolic-ref", "--short", "HEAD").decode().strip()
    with contextlib.suppress(OSError, IndexError, subprocess.SubprocessError):
        name = git("remote").decode().split()[0]
        about["remote"] = _without_credentials(git("remote", "get-url", name).decode().strip())
    with contextlib.suppress(ValueError):
        about["folder"] = PurePosixPath(Path.cwd().resolve().relative_to(Path(root).resolve())).as_posix()
    about["untracked"] = sorted(filter(None, untracked.split("\0")))[:100]
    about["left_out"] = left_out
    return about, patch


def _joined(diff: bytes, texts: Iterable[str], left_out: dict[str, str]) -> str:
    """Return the parts of a diff, one for each file, that fit; add the other files to `left_out`."""
    parts, size = [], 0
    for path, part in zip(texts, re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE)[1:], strict=True):
        try:
            text = part.decode()
        except UnicodeDecodeError:
            left_out[path] = "it is not UTF-8"
            continue
        if _SECRET_TEXT.search(text):
            left_out[path] = "its text looks like a secret"
        elif size + len(part) > _MOST_PATCH_BYTES:
            left_out[path] = "the patch has at most 1 MB"
        else:
            parts.append(text)
            size += len(part)
    return "".join(parts)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    if not parts.scheme or not parts.netloc:
        return url  # a path, or the form git@host:path
    user, at, host = parts.netloc.rpartition("@")
    user = user.partition(":")[0] if parts.scheme == "ssh" else ""
    return urlunsplit((parts.scheme, f"{user}{at}{host}" if user else host, parts.path, "", ""))


def _packages() -> list[str]:
    """Return the installed distributions as lines of a requirements file; local ones are comments.

    Their folders have name and version; importlib.metadata would parse a file of each, which takes 0.1 s.
    """
    lines: dict[str, str] = {}
    for folder in sys.path:
        for path in sorted(Path(folder).glob("*.dist-info")):
            name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
            is_local = (path / "direct_url.json").exists()
            line = f"# {name}=={version} (installed from a local file)" if is_local else f"{name}=={version}"
            lines.setdefault(name.lower(), line)
    return [lines[name] for name in sorted(lines)]


def read_source(directory: Path) -> dict[str, Any]:
    """Return the records of a run's source by file name, without those that are missing or damaged."""
    folder = directory / FOLDER
    documents = {name: read_json(folder / name) for name in (COMMIT, COMMAND)}
    return {name: document for name, document in documents.items() if document is not None}
