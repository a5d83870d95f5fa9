"""The countable house rules, as tests. Each rule is a function on source text and is itself tried on a violation."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from tests.unit import words
from tests.unit.words import nodes, sources

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"

MAX_MODULE_LINES = 800
MAX_POSITIONAL_PARAMETERS = 5
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "core", "components", "misc"}
MODULES_THAT_RUN_WHAT_THEY_READ = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "jsonpickle",
}
CALLS_THAT_RUN_TEXT = {"eval", "exec", "builtins.eval", "builtins.exec"}
CALLS_THAT_START_A_SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
YAML_LOADERS = {
    f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")
}

Rule = Callable[[str], list[str]]


# ------------------------------------------------------------------------------------------------- rules on one module


def long_module(source: str) -> list[str]:
    num_lines = len(source.splitlines())
    return [f"{num_lines} lines, at most {MAX_MODULE_LINES}"] if num_lines > MAX_MODULE_LINES else []


def _functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def many_positional_parameters(source: str) -> list[str]:
    found = []
    for node in _functions(source):
        names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
        if names and names[0] in ("self", "cls"):
            names = names[1:]
        if len(names) > MAX_POSITIONAL_PARAMETERS:
            limit = f"at most {MAX_POSITIONAL_PARAMETERS}"
            found.append(f"line {node.lineno}: {node.name} has {len(names)} positional parameters, {limit}")
    return found


def global_statements(source: str) -> list[str]:
    return [f"line {node.lineno}: global" for node in nodes(source) if isinstance(node, ast.Global)]


def bare_excepts(source: str) -> list[str]:
    handlers = (node for node in nodes(source) if isinstance(node, ast.ExceptHandler))
    return [f"line {node.lineno}: bare except" for node in handlers if node.type is None]


def _imports(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, name in this module, dotted name of what it is) of each import."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield node.lineno, alias.asname or top, alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value)
        return f"{value}.{node.attr}" if value else None
    return None


def _calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name of the function as its home module spells it, call); calls of anything unnamed have the name ''."""
    homes = {name: home for _, name, home in _imports(source)}
    for node in nodes(source):
        if isinstance(node, ast.Call):
            first, dot, rest = (_dotted(node.func) or "").partition(".")
            yield homes.get(first, first) + dot + rest, node


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


# A job object on its way from a program to the ranks that it starts, docs/from-python.md.
PICKLES_FOR_ITS_OWN_PROCESSES = {
    "src/shoal/jobs/handed_job.py: imports cloudpickle",
}


# Classes with more than twelve methods, special ones not counted, and why each stays whole.
MAX_METHODS = 12
LARGE_CLASSES = {
    "src/shoal/distributed/collectives/shared_memory/process_group.py: class SharedGroup": "an interface of torch",
    "src/shoal/training/observer.py: class Observer": "an interface: one hook for each event of a step",
}


def large_classes(source: str) -> list[str]:
    found = []
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            methods = [one for one in methods if not one.name.startswith("__")]
            if len(methods) > MAX_METHODS:
                found.append(f"class {node.name}")
    return found


def unsafe_imports(source: str) -> list[str]:
    return [
        f"line {line}: imports {home}"
        for line, _, home in _imports(source)
        if home.partition(".")[0] in MODULES_THAT_RUN_WHAT_THEY_READ
    ]


def unsafe_loads(source: str) -> list[str]:
    found = []
    for name, call in _calls(source):
        if name == "torch.load" and not _is_constant(_keyword(call, "weights_only"), True):
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
        elif name in YAML_LOADERS:
            found.append(f"line {call.lineno}: {name}, use yaml.safe_load")
    return found


def text_run_as_code(source: str) -> list[str]:
    return [f"line {call.lineno}: {name}()" for name, call in _calls(source) if name in CALLS_THAT_RUN_TEXT]


def shells(source: str) -> list[str]:
    found = []
    for name, call in _calls(source):
        shell = _keyword(call, "shell")
        if name in CALLS_THAT_START_A_SHELL or (shell is not None and not _is_constant(shell, False)):
            found.append(f"line {call.lineno}: {name} starts a shell")
    return found


RULES: list[Rule] = [
    long_module,
    many_positional_parameters,
    global_statements,
    bare_excepts,
    unsafe_imports,
    unsafe_loads,
    text_run_as_code,
    shells,
    large_classes,
    *words.RULES,
]

VIOLATIONS = [
    (long_module, "x = 1\n" * (MAX_MODULE_LINES + 1)),
    (many_positional_parameters, "def f(a, b, c, d, e, f): ..."),
    (many_positional_parameters, "class A:\n    def f(self, a, b, c, /, d, e, f): ..."),
    (global_statements, "def f():\n    global x\n    x = 1"),
    (bare_excepts, "try:\n    f()\nexcept:\n    pass"),
    (unsafe_imports, "import pickle"),
    (unsafe_imports, "def f():\n    from pickle import loads"),
    (unsafe_imports, "import dill as json"),
    (unsafe_loads, "import torch\ntorch.load(path)"),
    (unsafe_loads, "import torch as t\nt.load(path, weights_only=False)"),
    (unsafe_loads, "from torch import load as read\nread(path)"),
    (unsafe_loads, "import torch\ntorch.load(path, weights_only=flag)"),
    (unsafe_loads, "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)"),
    (unsafe_loads, "from yaml import unsafe_load\nunsafe_load(text)"),
    (text_run_as_code, "eval(text)"),
    (text_run_as_code, "exec(compile(text, 'name', 'exec'))"),
    (text_run_as_code, "import builtins as b\nb.exec(text)"),
    (shells, "import subprocess\nsubprocess.run('ls', shell=True)"),
    (shells, "from subprocess import Popen\nPopen('ls', shell=flag)"),
    (shells, "import os\nos.system('ls')"),
    (large_classes, "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(MAX_METHODS + 1))),
    *words.VIOLATIONS,
]

INNOCENT = [
    (long_module, "x = 1\n" * MAX_MODULE_LINES),
    (many_positional_parameters, "class A:\n    def f(self, a, b, c, d, e, *, f, g): ..."),
    (global_statements, "def f():\n    x = 1\n    def g():\n        nonlocal x"),
    (bare_excepts, "try:\n    f()\nexcept Exception:\n    pass"),
    (unsafe_imports, "import json, safetensors\nfrom copyreg import pickle"),
    (unsafe_loads, "import torch, json\ntorch.load(path, weights_only=True)\njson.load(file)\nmodel.load(path)"),
    (text_run_as_code, "model.eval()\nself.exec(action)\n'eval(x)'"),
    (shells, "import subprocess\nsubprocess.run(['ls'], shell=False)"),
    (large_classes, "class A:\n    def __init__(self): ...\n" + "    def m(self): ...\n" * MAX_METHODS),
    *words.INNOCENT,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: Rule) -> None:
    modules = sources(PACKAGE)
    assert modules
    found = [f"{path.relative_to(ROOT)}: {text}" for path, source in modules.items() for text in rule(source)]
    allowed: dict[object, set[str]] = {unsafe_imports: PICKLES_FOR_ITS_OWN_PROCESSES, large_classes: set(LARGE_CLASSES)}
    assert {re.sub(r"line \d+: ", "", text) for text in found} == allowed.get(rule, set())


@pytest.mark.parametrize(("rule", "source"), VIOLATIONS)
def test_rule_finds_violation(rule: Rule, source: str) -> None:
    assert len(rule(source)) == 1


@pytest.mark.parametrize(("rule", "source"), INNOCENT)
def test_rule_passes_innocent(rule: Rule, source: str) -> None:
    assert rule(source) == []


def test_every_rule_is_tried() -> None:
    assert {rule for rule, _ in VIOLATIONS} == {rule for rule, _ in INNOCENT} == set(RULES)


# -------------------------------------------------------------------------------------------------------------- names


def empty_names(path: str) -> list[str]:
    parts = PurePosixPath(path).with_suffix("").parts
    return [f"{path}: {part!r} says nothing" for part in parts if part.lstrip("_") in NAMES_THAT_SAY_NOTHING]


def test_module_names_say_something() -> None:
    assert [text for path in sources(PACKAGE) for text in empty_names(path.relative_to(PACKAGE).as_posix())] == []


@pytest.mark.parametrize("path", ["utils.py", "data/helpers.py", "core/mesh.py", "data/_common.py"])
def test_empty_name_is_found(path: str) -> None:
    assert len(empty_names(path)) == 1
    assert empty_names("data/order.py") == empty_names("scores.py") == []


def of_no_module(test: str, modules: set[str]) -> bool:
    """Whether FOLDER/test_MODULE.py, or test_MODULE_subject.py, has no FOLDER/MODULE.py to be about."""
    path = PurePosixPath(test)
    words = path.stem.split("_")[1:]
    return modules.isdisjoint(f"{path.parent}/{'_'.join(words[: end + 1])}.py" for end in range(len(words)))


def test_unit_tests_have_their_modules_names() -> None:
    modules = {path.relative_to(PACKAGE).as_posix() for path in sources(PACKAGE)}
    tests = (path.relative_to(ROOT / "tests/unit").as_posix() for path in (ROOT / "tests/unit").rglob("*/test_*.py"))
    assert sorted(test for test in tests if of_no_module(test, modules)) == []
    assert of_no_module("data/test_orders.py", modules)
    assert not of_no_module("data/test_order_seeds.py", modules)


# ------------------------------------------------------------------------------------------------- text of all files

# Home directories and work trees of one machine; not the tail of a longer path, of a URL or of a variable.
MACHINE_PATH = re.compile(r"(?:(?<=file://)|(?<![\w.~$*}>)/-]))/(?:home|root|work|Users)/|\b[A-Za-z]:\\Users\\")
INDEX_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com|anaconda\.org|npmjs\.(?:org|com)"
    r"|(?:deb|security|ftp)(?:\.\w\w)?\.debian\.org|(?:archive|security)\.ubuntu\.com)\b"
)


def machine_paths(text: str) -> list[str]:
    return [f"a path of one machine: {match[0]}" for match in MACHINE_PATH.finditer(text)]


def index_hosts(text: str) -> list[str]:
    return [f"a package index: {match[0]}" for match in INDEX_HOST.finditer(text)]


def _files() -> list[Path]:
    """Files under version control; where there is no version control, those of the project's own directories."""
    try:
        run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        names = [os.fsdecode(name) for name in run.stdout.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
    if names:
        return [path for name in names if (path := ROOT / name).is_file()]
    own = ("src", "tests", "examples", "benchmarks", "docs", "scripts", ".ci", "changelog.d")
    inside = (path for name in own for path in (ROOT / name).rglob("*") if "__pycache__" not in path.parts)
    return sorted(path for path in (*ROOT.iterdir(), *inside) if path.is_file())


def _text(path: Path) -> str:
    """The file's text; nothing for a file that is no text."""
    content = path.read_bytes()
    try:
        return "" if b"\0" in content else content.decode("utf-8")
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("rule", [machine_paths, index_hosts], ids=lambda rule: rule.__name__)
def test_files_name_no_place(rule: Rule) -> None:
    files = _files()
    assert Path(__file__).resolve() in files
    assert [f"{path.relative_to(ROOT)}: {text}" for path in files for text in rule(_text(path))] == []


@pytest.mark.parametrize("place", ["home", "root", "work", "Users"])
@pytest.mark.parametrize("text", ["/{}/a/data", "see '/{}/a'", "data=/{}/a", "file:///{}/a", "PATH=/bin:/{}/a"])
def test_machine_path_is_found(place: str, text: str) -> None:
    assert len(machine_paths(text.format(place))) == 1
    for innocent in ("https://example.org/{}/a", "$HOME/{}/a", "~/{}/a", "a/{}/b", "the {}/directory", "/{}less/a"):
        assert machine_paths(innocent.format(place)) == []


@pytest.mark.parametrize("host", ["pypi org", "files pythonhosted org", "download pytorch org", "deb debian org"])
def test_index_host_is_found(host: str) -> None:
    assert len(index_hosts(f"https://{host.replace(' ', '.')}/simple")) == 1
    assert index_hosts("https://pytorch.org https://debian.org on PyPI") == []


# --------------------------------------------------------------------------------------------------- import contracts


def _lint_imports(directory: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the contracts of directory/pyproject.toml and the package in `source`."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )


def _contracts() -> dict[str, dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    return {contract["id"]: contract for contract in settings["contracts"]}


def _values() -> list[str]:
    names: list[str] = _contracts()["values"]["source_modules"]
    return names


def test_import_contracts() -> None:
    run = _lint_imports(ROOT, ROOT / "src")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("", "", 0),
        ("jobs.job", "import numpy", 1),
        ("launch", "from torch import nn", 1),
        ("errors", "from shoal.jobs.job import Job", 1),
        ("training", "def f():\n    import shoal.cli", 1),
        ("data", "import shoal.parallel", 1),
        ("plans", "from shoal import distributed", 2),  # points up, and reaches torch through it
        ("training/update", "import shoal.training.loop", 1),
        ("training/nowhere", "", 1),  # no layer names it
        ("nowhere", "", 1),
    ],
)
def test_broken_contract_is_found(tmp_path: Path, module: str, source: str, broken: int) -> None:
    package = tmp_path / "shoal"
    package.mkdir()
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    rooms = [room for layer in _contracts()["layers"]["layers"] for room in re.findall(r"\w+", layer)]
    rooms += [f"training.{room}" for layer in _contracts()["training"]["layers"] for room in re.findall(r"\w+", layer)]
    for name in ("", *rooms, *(name.removeprefix("shoal.") for name in _values())):
        folder = package.joinpath(*name.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    for parent in ("planner", "planner/profile"):
        (package / parent / "__init__.py").touch()
    (package / "distributed" / "__init__.py").write_text("import torch")
    if module:
        folder = package.joinpath(*module.split("."))
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(source)
    run = _lint_imports(tmp_path, tmp_path)
    assert f"{3 - broken} kept, {broken} broken" in run.stdout, run.stdout + run.stderr
