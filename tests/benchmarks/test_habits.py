"""The habits: enough of them, references without shoal, and what the runner says of a few."""

import ast
import inspect
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from benchmarks.habits import MODULES, plain, programs
from benchmarks.habits.fingerprint import fingerprint
from benchmarks.habits.runs import REFUSED, SAME, is_right, run_program, verdict
from torch import nn

EVERY = programs()


def test_there_are_enough() -> None:
    assert len(EVERY) >= 100
    assert sum(program.expected == "trains" for program in EVERY.values()) >= 75
    assert sum(program.kind == "suspicious" for program in EVERY.values()) >= 10
    assert all(program.says for program in EVERY.values())


def test_what_is_not_expected_to_train_says_why() -> None:
    assert [p.name for p in EVERY.values() if p.expected != "trains" and not p.why] == []


def imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_references_import_nothing_of_shoal(name: str) -> None:
    module = sys.modules[f"benchmarks.habits.{name}"]
    for source in (inspect.getsource(module), inspect.getsource(plain)):
        assert [word for word in imports(source) if word.split(".")[0] == "shoal"] == []


def test_references_run_where_there_is_no_shoal() -> None:
    text = """
import sys, torch
sys.modules["shoal"] = None
torch.set_num_threads(1)
from benchmarks.habits import programs
kinds = {program.kind: program for program in programs().values() if program.reference is not None}
for program in kinds.values():
    assert len(program.plain().losses) == program.num_steps, program.name
"""
    command = [sys.executable, "-W", "ignore", "-c", text]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.ranks
def test_a_program_that_changes_its_batch() -> None:
    found = run_program(EVERY["scaled"], lambda cell: cell in ("1", "2", "data 2"))
    assert found["verdict"] == SAME, found
    assert found["cells"]["1"]["sha"] == found["cells"]["2"]["sha"]


def cells(**statuses: str) -> dict[str, dict[str, object]]:
    codes = {"refused": 2, "failed": 1, "diverged": 1}
    said = "m.state keeps a tensor"
    return {name: {"status": of, "code": codes.get(of, 0), "said": said} for name, of in statuses.items()}


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("scaled", {"one": "same", "verify": "verified"}, SAME),
        ("scaled", {"one": "same", "tensor": "refused"}, SAME + "; tensor refused"),
        ("scaled", {"one": "WRONG", "two": "refused"}, "WRONG one; refused two"),
        ("scaled", {"one": "refused", "two": "refused"}, "refused one, two, although it is right"),
        ("carried", {"one": "refused", "two": "refused"}, REFUSED),
        ("carried", {"one": "refused", "two": "WRONG"}, "WRONG two; refused one"),
        ("carried_in_dict", {"one": "refused"}, "refused without naming memory"),
        ("embedding_max_norm", {"one": "same"}, SAME),
        ("tensors_divided_by_rank", {"1": "same", "2": "refused"}, "refused without naming rank"),
        ("tensors_divided_by_rank", {"1": "WRONG", "2": "refused"}, "WRONG 1; refused 2"),
        ("carried", {"1": "same", "2": "refused"}, "refused 2, and not everywhere"),
        ("carried", {"1": "refused", "2": "refused", "tensor": "refused"}, REFUSED),
        ("stream", {"one": "same", "verify": "refused"}, SAME + "; verify refused"),
    ],
)
def test_verdicts(name: str, found: dict[str, str], expected: str) -> None:
    said = verdict(EVERY[name], cells(**found))
    assert said == expected
    right = said.startswith(SAME) or said == REFUSED
    assert is_right(EVERY[name], said) is right


def test_a_fingerprint_sees_what_a_look_may_change() -> None:
    def changed(**fields: object) -> str:
        model = nn.Sequential(nn.Linear(2, 2))
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        vars(model[0]).update({"calls": 0, "kept": [torch.zeros(2)], **fields})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        return fingerprint(model, optimizer, {"x": torch.ones(2)}, generator, SimpleNamespace(a=1))

    assert changed() == changed()
    ways = [{"calls": 1}, {"kept": [torch.ones(2)]}, {"kept": []}, {"state": None}, {"training": False}]
    assert len({changed(), *(changed(**way) for way in ways)}) == 1 + len(ways)
    before = fingerprint()
    torch.rand(1)
    assert fingerprint() != before
