"""Certificates of `shoal verify`: the verdict on a job under a plan, and the check whether it covers a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bounded_files import json_value, read_bytes
from shoal.errors import CertificateError
from shoal.jobs.differences import ABSENT, changed, differences

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
            content = read_bytes(path.resolve())
            document = json_value(content, exactly=True)
            schema = document["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CertificateError(
                given=f"--require-certificate {path}",
                conflict=f"there is no certificate that can be read: {error}",
                remedy="write one with: shoal verify JOBFILE ... --out DIR, and give DIR/certificate.json",
            ) from None
        if document.get("kind") == "script":
            raise CertificateError(
                given=f"--require-certificate {path}",
                conflict="it is of a training script that was verified as it is, not of a job",
                remedy="verify the job: shoal verify JOBFILE ... --out DIR",
            )
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
        mine = json.loads(json.dumps({"job": facts, "plan": _relevant(plan), "versions": dict(versions)}))
        theirs = {"job": self.document["job"], "versions": self.document["versions"]}
        theirs["plan"] = _relevant(self.document["plan"])
        differing += [
            f"{one.name} = {one.theirs!r}, this run has {one.mine!r}"
            for one in differences(mine, theirs)
            # Older versions write fewer values, and newer ones more.
            if one.mine is not ABSENT and not (one.mine is None and one.theirs is ABSENT)
        ]
        if differing:
            raise CertificateError(
                given=f"--require-certificate {self.path}",
                conflict="it speaks of another run: " + "; ".join(differing[:4]),
                remedy="verify this job with this plan and these versions",
            )


def _relevant(plan: Mapping[str, Any]) -> dict[str, Any]:
    relevant = {name: section for name, section in plan.items() if name not in _IRRELEVANT}
    if isinstance(relevant.get("layout"), Mapping):  # which rank computes which grains is no part of the maths
        relevant["layout"] = {key: value for key, value in relevant["layout"].items() if key != "shares"}
    return relevant
