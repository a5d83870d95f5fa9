"""Models that others wrote, as the examples train them, verified on two ranks: Hugging Face's and Keras'."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching import EXAMPLES
from tests.usual import parametrize
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.jobs.job_file import load, parse_target

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
    usual=["llama"],  # Keras: tests/docs/test_model_files.py
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


def _next_token(model: nn.Module, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens,) = batch
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return shoal.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _decoder(family: str, **settings: Any) -> shoal.Job:
    def build() -> nn.Module:
        import transformers

        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = getattr(transformers, f"{family}Config")(**{**sizes, **heads, **dict.fromkeys(names), **settings})
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
        return model

    tokens = torch.randint(96, (32, 17), generator=torch.Generator().manual_seed(0))
    return shoal.Job(
        model=build,
        loss=_next_token,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train_data=lambda: TensorDataset(tokens),
        global_batch=16,
        length=shoal.Steps(1),
    )


EXPERTS = {"num_local_experts": 4}


@HUGGING_FACE
@parametrize(
    ("family", "settings", "axis"),
    [
        pytest.param("Mixtral", EXPERTS, "pipeline", id="experts-pipeline"),
        pytest.param("Mixtral", EXPERTS, "tensor", id="experts-tensor"),
        pytest.param("Mixtral", EXPERTS, "shard", id="experts-shard"),
        pytest.param("Gemma2", {"head_dim": 8}, "tensor", id="gemma2-tensor"),  # returns the weights of its attention
        pytest.param("Qwen3", {"head_dim": 8}, "tensor", id="qwen3-tensor"),  # norms of each head
        pytest.param("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "tensor", id="falcon-tensor"),
        pytest.param("Phi3", {}, "tensor", id="phi3-tensor"),  # heads counted by its config
        pytest.param("Llama", {}, "context", id="llama-context"),
    ],
    usual=["experts-pipeline", "gemma2-tensor"],
)
def test_decoders_are_divided(family: str, settings: dict[str, Any], axis: str) -> None:
    """Masks and positions look at integers, experts multiply by groups: neither needs a model's values."""
    verdict = shoal.verify(_decoder(family, **settings), shoal.Plan().with_sections(layout={axis: 2}), steps=1)
    assert verdict.verified, verdict.render()
