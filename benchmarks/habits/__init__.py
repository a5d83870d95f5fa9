"""Small programs of what people write, each with a plain torch loop that computes what is right.

`programs()` gives them all; it imports torch and nothing of shoal. `python -m benchmarks.habits` makes the table.
"""

from benchmarks.habits.program import Program

MODULES = (
    "state",
    "in_place",
    "derivatives",
    "buffers",
    "hooks",
    "optimizers",
    "datasets",
    "batches",
    "ranks",
    "layers",
    "suspicious",
)


def programs() -> dict[str, Program]:
    """All programs by name, in the order of their modules."""
    import importlib

    found = [
        value.program
        for name in MODULES
        for value in vars(importlib.import_module(f"benchmarks.habits.{name}")).values()
        if isinstance(getattr(value, "program", None), Program)
    ]
    names = [program.name for program in found]
    assert len(set(names)) == len(names), f"a name twice: {sorted(n for n in names if names.count(n) > 1)}"
    return {program.name: program for program in found}
