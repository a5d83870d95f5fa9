"""Plan files in TOML: read with exact keys, written whole."""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomli_w

from shoal.errors import PlanError
from shoal.plans.plan import SCHEMA, Plan


def read(path: Path) -> Plan:
    """The plan in a TOML file; keys left out take their defaults.

    Raises: PlanError where the file is missing, is not TOML, or has mistakes (all of them at once).
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            given=f"--plan {path}",
            conflict=f"the file cannot be read: {error.strerror}",
            remedy="give the path of a plan, or leave --plan out and say --devices N",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(
            given=f"--plan {path}", conflict=f"it is not TOML: {error}", remedy="mend the file at that place"
        ) from None
    document.setdefault("schema", SCHEMA)
    return Plan.from_mapping(document, source=str(path))


def write(plan: Plan) -> str:
    """The whole plan as TOML text; `read` gives the same plan back."""
    return tomli_w.dumps(plan.to_mapping())
