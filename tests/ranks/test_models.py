"""Models that others wrote, as the examples train them, verified on two ranks: Hugging Face's and Keras'."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.launching import EXAMPLES
from tests.usual import parametrize

import shoal
from shoal.runs.job_file import load, parse_target

pytestmark = pytest.mark.ranks

TINY_TEXT = ("layers=1", "width=16", "heads=2", "block=16", "batch=16")
EAGER = "attention=eager"
TINY_VIT = ("layers=1", "width=16", "heads=2", "batch=16", "dropout=0.1")
TINY_IMAGES = ("filters=2", "batch=16", "train_samples=64", "eval_samples=16")
HUGGING_FACE = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'shoal[hf]'"
)
KERAS = pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed: pip install 'shoal[keras]'")


@pytest.fixture(autouse=True)
def keras_on_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))


@parametrize(
    ("target", "settings", "exact"),
    [
        pytest.param("hugging_face.py:llama", TINY_TEXT, False, marks=HUGGING_FACE, id="llama"),
        pytest.param("hugging_face.py:gpt2", TINY_TEXT, False, marks=HUGGING_FACE, id="gpt2"),
        pytest.param("hugging_face.py:gpt2", (*TINY_TEXT, EAGER), True, marks=HUGGING_FACE, id="gpt2-eager-exact"),
        pytest.param("hugging_face.py:bert", TINY_TEXT, True, marks=HUGGING_FACE, id="bert-exact"),
        pytest.param("hugging_face.py:bert", (*TINY_TEXT, EAGER), False, marks=HUGGING_FACE, id="bert-eager"),
        pytest.param("hugging_face.py:vit", TINY_VIT, False, marks=HUGGING_FACE, id="vit"),
        pytest.param("keras_cnn.py", TINY_IMAGES, True, marks=KERAS, id="keras-exact"),
        pytest.param("keras_cnn.py", (*TINY_IMAGES, "normalize=true"), False, marks=KERAS, id="keras-batch-norm"),
    ],
    usual=["llama", "keras-batch-norm"],
)
def test_verified_on_two_ranks(target: str, settings: tuple[str, ...], exact: bool) -> None:
    """Also with dropout, fused; by bits in exact mode."""
    loaded = load(parse_target(str(EXAMPLES / target), list(settings)))
    plan = shoal.Plan.model_validate({"layout": {"data": 2}, "execution": {"exact": exact}})
    verdict = shoal.verify(loaded.job, plan, steps=1)
    assert verdict.verified, verdict.render()
    assert not any("grain by grain" in note or "float64" in note for note in verdict.notes), verdict.notes


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed: pip install 'shoal[keras]'")
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"layout": {"shard": 2}, "shard": {"level": "gradients"}}, id="gradients"),
        pytest.param({"layout": {"shard": 2}, "shard": {"level": "parameters"}}, id="parameters"),
        pytest.param({"layout": {"tensor": 2}}, id="tensor"),
        pytest.param({"layout": {"tensor": 3}}, id="tensor-uneven"),
        pytest.param({"layout": {"pipeline": 2}, "batch": {"grains_per_microbatch": 1}}, id="pipeline"),
        pytest.param({"layout": {"shard": 2, "tensor": 2}}, id="shard-tensor"),
    ],
)
def test_keras_is_divided(sections: dict[str, Any]) -> None:
    """A Keras model with statistics and dropout, unchanged."""
    settings = ["filters=3", "batch=16", "train_samples=64", "eval_samples=16", "normalize=true"]
    loaded = load(parse_target(str(EXAMPLES / "keras_cnn.py"), settings))
    verdict = shoal.verify(loaded.job, shoal.Plan().with_sections(**sections), steps=1)
    assert verdict.verified, verdict.render()
