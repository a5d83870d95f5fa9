"""Certificates of `shoal verify`: the verdict on a job under a plan, and the check whether it covers a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CertificateError
from shoal.jobs.job_sources import changed

SCHEMA = 2  # since 2, certificates name the code of the job's modules
# Sections of a plan that do not affect the computation.
_IRRELEVANT = ("data", "prediction")


@dataclass(frozen=True)
class Certificate:
    """A certificate's document and the SHA-256 of its file."""

    path: Path
    document: Mapping[str, Any]
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """Read a certificate file. Raises: CertificateError if it is missing or unreadable."""
        try:
            content = path.read_bytes()
            document = json.loads(content)
            schema = document["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CertificateError(
                given=f"--require-certificate {path}",
                conflict=f"there is no certificate that can be read: {error}",
                remedy="write one with: shoal verify JOBFILE ... --out DIR, and give DIR/certificate.json",
            ) from None
        if schema != SCHEMA:
            raise CertificateError(
                given=f"{path} of schema {schema}",
                conflict=f"this version reads schema {SCHEMA}",
                remedy="run shoal verify again, with this version",
            )
        return cls(path, document, hashlib.sha256(content).hexdigest())

    def check(self, job: Mapping[str, Any], plan: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Check that the verdict is "verified" for this job, plan and versions. Raises: CertificateError."""
        if self.document["verdict"] != "verified":
            first = self.document.get("first_divergence") or {}
            raise CertificateError(
                given=f"--require-certificate {self.path}",
                conflict=f"its verdict is {self.document['verdict']}: {first.get('phase')}, {first.get('name')}",
                remedy="mend what it names, and verify again",
            )
        facts, code = {**job}, self.document["job"].get("code", {})
        differing = [f"other code in {file}" for file in changed(code, facts.pop("code", {}))]
        mine = {"job": facts, "plan": _relevant(plan), "versions": dict(versions)}
        theirs = {**self.document, "plan": _relevant(self.document["plan"])}
        differing += [
            f"{part}.{key} = {held!r}, this run has {value!r}"
            for part, values in json.loads(json.dumps(mine)).items()
            for key, value, held in _pairs(values, theirs[part])
            if held != value
        ]
        if differing:
            raise CertificateError(
                given=f"--require-certificate {self.path}",
                conflict="it speaks of another run: " + "; ".join(differing[:4]),
                remedy="verify this job with this plan and these versions",
            )


def _pairs(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, mine, theirs) for every value. Keys in nested sections have dots."""
    for key, value in mine.items():
        held = theirs.get(key)
        if isinstance(value, Mapping) and isinstance(held, Mapping):
            yield from ((f"{key}.{name}", a, b) for name, a, b in _pairs(value, held))
        else:
            yield key, value, held


def _relevant(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in plan.items() if name not in _IRRELEVANT}
