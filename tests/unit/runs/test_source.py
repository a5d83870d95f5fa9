import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.runs.source import commit_of, read_source, write_source

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="a commit is made by git, which is not installed")


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a job, a folder and one commit."""
    folder = tmp_path / "project"
    (folder / "jobs").mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    (folder / "jobs" / "job.py").write_text("lr = 0.1\n")
    for name in (".env.local", "server.pem", "api_key.txt", "secrets.toml", "ordinary.py"):
        (folder / name).write_text("before\n")
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


@needs_git
def test_patch_gives_the_changed_files_back(checkout: Path, tmp_path: Path) -> None:
    (checkout / "jobs" / "job.py").write_text("lr = 0.2\n")
    (checkout / "a name with ümlaut.py").write_text("new = 1\n")
    git(checkout, "add", "-A")
    (checkout / "ordinary.py").unlink()
    (checkout / "not_tracked.py").write_text("x = 1\n")
    about, patch = commit_of(checkout / "jobs")
    assert about["commit"] == git(checkout, "rev-parse", "HEAD").strip()
    assert about["branch"] == "main"
    assert about["dirty"]
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(checkout), str(clone))
    (tmp_path / "p").write_text(patch)
    git(clone, "apply", str(tmp_path / "p"))
    assert (clone / "jobs" / "job.py").read_text() == "lr = 0.2\n"
    assert (clone / "a name with ümlaut.py").read_text() == "new = 1\n"
    assert not (clone / "ordinary.py").exists()
    assert "not_tracked" not in patch


@needs_git
def test_secrets_and_what_is_no_text_are_left_out_and_named(checkout: Path) -> None:
    for name in (".env.local", "server.pem", "api_key.txt", "secrets.toml"):
        (checkout / name).write_text("after\n")
    (checkout / "weights.bin").write_bytes(bytes(256))
    (checkout / "ordinary.py").write_text("token = 'hf_" + "a" * 34 + "'\n")
    (checkout / "jobs" / "job.py").write_text("# " + "x" * 1_000_001 + "\n")
    about, patch = commit_of(checkout)
    assert patch == ""
    assert about["left_out"] == {
        ".env.local": "its name suggests a secret",
        "api_key.txt": "its name suggests a secret",
        "secrets.toml": "its name suggests a secret",
        "server.pem": "its name suggests a secret",
        "weights.bin": "it is no text",
        "ordinary.py": "its text looks like a secret",
        "jobs/job.py": "the patch has at most 1 MB",
    }


@needs_git
@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://me:password@example.org/a/b.git?token=1", "https://example.org/a/b.git"),
        ("ssh://git:password@example.org:22/a/b.git", "ssh://git@example.org:22/a/b.git"),
        ("git@example.org:a/b.git", "git@example.org:a/b.git"),
    ],
)
def test_remote_has_no_credentials(checkout: Path, remote: str, shown: str) -> None:
    git(checkout, "remote", "add", "origin", remote)
    assert commit_of(checkout)[0]["remote"] == shown


@needs_git
def test_without_a_checkout_or_a_commit_the_reason_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    about, patch = commit_of(tmp_path)
    assert about["commit"] is None
    assert "not a git repository" in about["reason"]
    assert patch == ""
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path)[0]["commit"] is None
    monkeypatch.setenv("PATH", "")
    assert "git" in commit_of(tmp_path)[0]["reason"]


def test_source_is_written_once(tmp_path: Path) -> None:
    command = shlex.join(["shoal", "run", "job.py", "--set", "lr=1"])
    (tmp_path / "lock.json").write_text(json.dumps({"command": command}))
    write_source(tmp_path, tmp_path)
    (tmp_path / "lock.json").write_text(json.dumps({"command": "shoal run other.py"}))
    write_source(tmp_path, tmp_path)
    assert read_source(tmp_path)["command.json"]["arguments"] == ["shoal", "run", "job.py", "--set", "lr=1"]
    packages = (tmp_path / "source" / "packages.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in packages)
    assert all(line.startswith("#") or "==" in line for line in packages)
    assert json.loads((tmp_path / "source" / "commit.json").read_text()).keys() >= {"commit"}
