"""Nested settings: of dicts, dataclasses and pydantic models, by dotted names, from mappings and from files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest
from pydantic import BaseModel, Field

from shoal.errors import CommandError, JobFileError, SettingError
from shoal.jobs.config_file import read_config
from shoal.jobs.job_file import JobRequest, parse_target, with_config, with_settings_of
from shoal.jobs.secret_settings import command_without_secrets, is_hidden, without_secrets
from shoal.jobs.settings import Setting, bind, layered, note_other_secrets, setting_text, settings_from


@dataclass(frozen=True)
class Optimizer:
    lr: float = 0.1
    name: str = "sgd"


@dataclass(frozen=True)
class Model:
    width: int
    depths: list[int] = field(default_factory=lambda: [1, 2])
    optimizer: Optimizer = Optimizer(lr=0.3)

    def __post_init__(self) -> None:
        if self.width % self.depths[0]:
            raise ValueError("width must be a multiple of the first depth")


class Checked(BaseModel):
    rate: Annotated[float, Field(gt=0)] = 0.5
    parts: list[Optimizer] = []


class Secretive(BaseModel):
    password: Annotated[str, Field(max_length=4)] = "abc"
    size: int = 2


class Typed(TypedDict):
    rows: int


def job(
    lr: float = 0.1,
    model: Model = Model(8),
    checked: Checked | None = None,
    typed: Typed = {"rows": 2},  # noqa: B006
    plain: dict = {"a": 1, "b": {"c": "x"}},  # type: ignore[type-arg]  # noqa: B006
    free: dict[str, Any] = {},  # noqa: B006
    **others: Any,
) -> None: ...


def whole(config) -> None: ...  # type: ignore[no-untyped-def]


def whole_typed(config: Model) -> None: ...


def texts(*given: str) -> dict[str, Setting]:
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def values(given: Mapping[str, Setting], function: Any = job) -> dict[str, Any]:
    return bind(function, given, "f.py:job")[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("model.width=16", Model(16)),
        ("model.depths.1=7", Model(8, [1, 7])),
        ("model.optimizer.name=adam", Model(8, optimizer=Optimizer(0.3, "adam"))),
        ('model={"width": 4, "optimizer": {"lr": 1}}', Model(4, optimizer=Optimizer(1.0))),
        ("checked.rate=2", Checked(rate=2.0)),
        ('checked.parts=[{"lr": 0.5}]', Checked(parts=[Optimizer(0.5)])),
        ("checked=none", None),
        ("typed.rows=3", {"rows": 3}),
        ("plain.b.c=7", {"a": 1, "b": {"c": "7"}}),
        ("free.a.b=7", {"a": {"b": 7}}),
        ('free.a="7"', {"a": "7"}),
        ("others.lr=1e-3", {"lr": 1e-3}),
        ('others="none"', "none"),
    ],
)
def test_a_dotted_name_sets_one_key(text: str, wanted: object) -> None:
    name = text.partition("=")[0].partition(".")[0]
    given = texts(text)
    found = values(given)[name]
    assert found == wanted
    again = settings_from(bind(job, given, "f.py:job")[1])  # as recorded
    assert values(again)[name] == wanted
    assert values({key: setting_text(key, setting) for key, setting in again.items()})[name] == wanted  # as words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr=abc", "lr is of type float, and 'abc' is not a number; write --set lr=0.1, say"),
        ("model.widht=3", "model has no key widht; use one of width, depths, optimizer; did you mean 'width'?"),
        ("model=3", "model is of type Model, which has keys; write --set model.width=VALUE, say"),
        ("model.depths.5=3", "model.depths has no key 5"),
        ("model.optimizer.lr=x", "model.optimizer.lr is of type float"),
        ("model.depths=[3, 4]", "Model refuses them: width must be a multiple of the first depth"),
        ("lr.x=3", "lr is of type float, which has no keys"),
        ("plain.d=3", "plain has no key d; use one of a, b"),
        ("checked.rate=-1", "checked.rate is of type float, and -1.0 does not fit: it must be greater than 0"),
        ('checked.parts=[{"lt": 1}]', "checked.parts.0 has no key lt; use one of lr, name; did you mean 'lr'?"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_in_three_beats(text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        values(texts(text))
    assert f"--set {text}; " in str(caught.value)
    assert words in str(caught.value)


def test_a_function_of_one_parameter_without_a_default_takes_all() -> None:
    assert values(texts("lr=0.1", "model.width=8"), whole) == {"config": {"lr": 0.1, "model": {"width": 8}}}
    assert values(texts("config=x"), whole) == {"config": "x"}
    found = bind(whole_typed, texts("width=8"), "f.py:job")
    assert found == ({"config": Model(8)}, {"width": 8, "depths": [1, 2], "optimizer": {"lr": 0.3, "name": "sgd"}})
    with pytest.raises(SettingError, match="width has no default; give it one, or write --set width=VALUE"):
        values({}, whole_typed)
    with pytest.raises(JobFileError, match="write --set config=VALUE or --config FILE"):
        values({}, whole)


def test_the_record_does_not_depend_on_where_a_value_is_from(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"lr": 0.1, "model": {"width": 8}, "x": 3}')
    request = with_config(JobRequest(Path("f.py")), [str(tmp_path / "a.json")])
    records = [
        bind(job, dict(given), "f.py:job")[1]
        for given in (request.settings, texts("x=3"), texts("lr=0.1", "model.width=8", "x=3"))
    ]
    assert records[0] == records[1] == records[2]


YAML = "lr: 1e-3 # a comment\nday: 2026-01-02\nmodel: &m\n  width: 4\nother: {<<: *m, width: 5}\n"


def test_files_of_each_kind_and_their_order(tmp_path: Path) -> None:
    for name, text in {
        "a.yaml": YAML,
        "b.toml": "day = 2026-01-03\n[model]\nwidth = 6\n",
        "c.json": '{"model": {"optimizer": {"lr": 2}}}',
        "empty.yml": "",
    }.items():
        (tmp_path / name).write_text(text)
    values_read, file = read_config(str(tmp_path / "a.yaml"))
    assert values_read == {"lr": 1e-3, "day": "2026-01-02", "model": {"width": 4}, "other": {"width": 5}}
    assert len(file.sha256) == 64
    paths = [str(tmp_path / name) for name in ("a.yaml", "b.toml", "c.json", "empty.yml")]
    request = with_config(JobRequest(Path("f.py"), settings=(("lr", "3"),)), paths)
    found = values(dict(request.settings))
    assert (found["lr"], found["day"], found["model"]) == (3.0, "2026-01-03", Model(6, optimizer=Optimizer(2.0)))
    resumed = with_settings_of(JobRequest(Path("f.py")), {"given": dict(request.settings), "config": []})
    assert values(dict(resumed.settings)) == found


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.ini", "", "is YAML, TOML or JSON"),
        ("a.yaml", "lr: 1\nlr: 2\n", "the key lr is there twice"),
        ("a.json", '{"lr": 1, "lr": 2}', "the key lr is there twice"),
        ("a.toml", "lr = \n", "it is no TOML"),
        ("a.yaml", "a: [1\n", "it is no YAML"),
        ("a.yaml", "- 1\n", "without names of settings"),
        ("a.yaml", "a: {b: '${c}'}\n", r"in which a\.b is \$\{c\}; OmegaConf fills that in"),
        ("a.yaml", "a:\n- ???\n", r"in which a\.0 is \?\?\?"),
        ("gone.yaml", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(CommandError, match=words):
        read_config(str(tmp_path / name))


def test_secrets_at_any_depth_are_hidden_and_given_again() -> None:
    settings = settings_from({"db": {"password": "abc", "tokenizer": "gpt2"}, "all": [{"api_key": "abc"}]}, "a.yaml")
    given = without_secrets({**settings, "inline": '{"password": "abc"}', "tokenizer.token": "abc"})
    assert "abc" not in str(given)
    assert given["db.tokenizer"]["value"] == "gpt2"
    assert [name for name in given if is_hidden(given[name])] == ["db.password", "all", "inline", "tokenizer.token"]
    assert "abc" not in " ".join(command_without_secrets(["--set", 'db={"password": "abc"}', "--db.password=abc"]))
    with pytest.raises(SettingError, match=r"give it again: --set all=\.\.\. --set inline=\.\.\. --set tokenizer"):
        with_settings_of(JobRequest(Path("f.py"), settings=(("db.password", "x"),)), {"given": given}, all_known=True)


@pytest.mark.parametrize(
    ("given", "again", "names"),
    [
        ({"db.password": "abc"}, {"db.password": "abc"}, ""),
        ({"db.password": "abc"}, {"db.password": {"value": "abc", "from": "a.yaml"}}, ""),
        ({"db.password": "abc", "rate": "1"}, {"db.password": "abd", "rate": "2"}, "another value of db.password than"),
        ({"all": {"value": [{"api_key": "abc"}]}}, {"all": '[{"api_key": "abd"}]'}, "another value of all than"),
        ({"rate": "1"}, {"db.password": "abd"}, ""),  # the run had the default, so that nothing is given again
    ],
)
def test_another_secret_than_the_one_of_the_run_is_noted(
    given: dict[str, Any], again: dict[str, Any], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(db: dict[str, str] = {"password": ""}, all: list[Any] = [], rate: float = 1.0) -> None: ...  # noqa: B006

    of_run = {"given": without_secrets(given), "settings": without_secrets(bind(job, given, "job")[1])}
    note_other_secrets(without_secrets(bind(job, again, "job")[1]), of_run)
    said = capsys.readouterr().err
    assert bool(said) == bool(names)
    assert names in said
    assert "abd" not in said


class Point(NamedTuple):
    x: int = 1
    y: float = 2.0


def test_a_container_keeps_its_class() -> None:
    def job(point: Point = Point(), counts: dict = defaultdict(int, a=1)) -> None: ...  # type: ignore[type-arg]  # noqa: B006, B008

    bound = values(texts("point.0=4", "counts.a=3"), job)
    assert (bound["point"], bound["counts"]) == (Point(4, 2.0), {"a": 3})
    assert isinstance(bound["point"], Point)
    assert bound["counts"]["b"] == 0


def test_messages_have_no_secrets() -> None:
    def job(db: Secretive = Secretive()) -> None: ...  # noqa: B008

    for given in (texts("db.password=abcdefgh"), texts("db.password=abcdefgh", "db.size=x")):
        with pytest.raises(SettingError) as caught:
            bind(job, given, "f.py:job")
        assert "abcdefgh" not in str(caught.value)
        assert "db." in caught.value.given
    with pytest.raises(SettingError, match="token is set twice") as caught:
        parse_target(__file__, ["token=abcdefgh", "token=ijklmnop"])
    assert not any(secret in str(caught.value) for secret in ("abcdefgh", "ijklmnop"))


def test_settings_of_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="pip install 'shoal[dev]' -c constraints.txt")
    create = omegaconf.OmegaConf.create
    config = create({"lr": 0.2, "model": {"width": 4, "optimizer": {"lr": "${lr}"}}})
    assert values(settings_from(config)) == {"lr": 0.2, "model": Model(4, optimizer=Optimizer(0.2))}
    assert values(settings_from({"model": config.model}))["model"] == Model(4, optimizer=Optimizer(0.2))
    for text, words in (("???", "model.width must have a value"), ("${no}", "Interpolation key 'no' not found")):
        with pytest.raises(SettingError, match=words) as caught:
            settings_from(create({"model": {"width": text}}))
        assert "model.width" in caught.value.given

    def of_config(config) -> None: ...  # type: ignore[no-untyped-def]

    of_config.__annotations__ = {"config": omegaconf.DictConfig}
    assert values(texts("model.width=8"), of_config)["config"].model.width == 8


def test_later_layers_come_last() -> None:
    assert layered([("a", "1"), ("b", "2")], [("a", "3")]) == (("b", "2"), ("a", "3"))
    assert values(settings_from({"model": Model(4), "checked": Checked()})) == {"model": Model(4), "checked": Checked()}
