"""A certificate speaks of one job, plan and set of versions, or of nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CertificateError
from shoal.runs.certificate import SCHEMA, Certificate

CODE = {"the job file": {"job": "1"}, "model.py": {"Block": "2"}}
JOB = {"function": "job", "settings": {"lr": 0.1}, "seed": 0, "code": CODE}
PLAN = {"layout": {"data": 2}, "data": {"workers": 0}, "prediction": {}}
VERSIONS = {"torch": "2.13.0"}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "certificate.json"
    document = {"schema": SCHEMA, "verdict": "verified", "job": JOB, "plan": PLAN, "versions": VERSIONS}
    path.write_text(json.dumps({**document, **changes}))
    return path


def test_it_speaks_of_its_own_run(tmp_path: Path) -> None:
    certificate = Certificate.read(written(tmp_path))
    certificate.check(JOB, {**PLAN, "data": {"workers": 4}, "prediction": {"step_seconds": 1.0}}, VERSIONS)
    assert len(certificate.sha256) == 64


@pytest.mark.parametrize(
    ("job", "plan", "versions", "named"),
    [
        ({**JOB, "seed": 1}, PLAN, VERSIONS, "job.seed"),
        ({**JOB, "settings": {"lr": 0.2}}, PLAN, VERSIONS, "job.settings"),
        ({**JOB, "code": {**CODE, "model.py": {"Block": "3"}}}, PLAN, VERSIONS, "other code in model.py: Block"),
        ({**JOB, "code": {**CODE, "model.py": {}}}, PLAN, VERSIONS, "other code in model.py: Block"),
        ({**JOB, "code": {**CODE, "more.py": {}}}, PLAN, VERSIONS, "other code in more.py (new)"),
        (JOB, {**PLAN, "layout": {"data": 3}}, VERSIONS, "plan.layout"),
        (JOB, PLAN, {"torch": "2.14.0"}, "versions.torch"),
    ],
)
def test_it_does_not_speak_of_another(tmp_path: Path, job: Any, plan: Any, versions: Any, named: str) -> None:
    with pytest.raises(CertificateError, match="it speaks of another run") as caught:
        Certificate.read(written(tmp_path)).check(job, plan, versions)
    assert named in caught.value.conflict


def test_a_divergence_is_no_certificate(tmp_path: Path) -> None:
    first = {"phase": "reduction", "name": "0.weight"}
    path = written(tmp_path, verdict="diverged", first_divergence=first)
    with pytest.raises(CertificateError, match=r"diverged: reduction, 0\.weight"):
        Certificate.read(path).check(JOB, PLAN, VERSIONS)


@pytest.mark.parametrize("content", ["", "[]", "{}", "no JSON", None])
def test_what_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "certificate.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CertificateError, match="no certificate that can be read"):
        Certificate.read(path)


def test_another_schema(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="schema"):
        Certificate.read(written(tmp_path, schema=SCHEMA + 1))


def test_a_certificate_of_a_script_covers_no_job(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="of a training script"):
        Certificate.read(written(tmp_path, kind="script"))


def test_it_may_be_behind_a_link_and_of_settings_that_are_not_finite(tmp_path: Path) -> None:
    job = {**JOB, "settings": {"clip": float("inf"), "separator": "\1", "seed": 1 << 100}}
    link = tmp_path / "link.json"
    link.symlink_to(written(tmp_path, job=job))
    Certificate.read(link).check(job, PLAN, VERSIONS)
