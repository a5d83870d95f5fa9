"""Models of Hugging Face Transformers at tiny size: built from their configuration classes, with random weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from benchmarks.corpus.row import SAMPLES, Batch, Row, ids, make_job, numbers

VOCABULARY = 64
POSITIONS = 12
CLASSES = 4

# By the name of a configuration's field; each is set where a configuration has it and a row does not say otherwise.
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "dim", "embedding_size", "d_embed", "emb_dim")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers", "num_blocks")
_DEPTHS += ("num_decoder_layers", "num_encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads")
_HEADS += ("num_key_value_heads", "num_encoder_attention_heads", "num_decoder_attention_heads")
_INNERS = ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner")
_INNERS += ("ffn_hidden_size", "inner_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
TINY: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS, 16),
    **dict.fromkeys(_DEPTHS, 2),
    **dict.fromkeys(_HEADS, 2),
    **dict.fromkeys(_INNERS, 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 32),
    **dict.fromkeys(("vocab_size", "max_source_positions", "max_target_positions"), VOCABULARY),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **{"head_dim": 8, "d_kv": 8, "pad_token_id": 0, "num_channels": 3, "image_size": 32, "patch_size": 8},
    **{"projection_dim": 16, "state_size": 4, "num_mel_bins": 8, "type_vocab_size": 2, "num_labels": CLASSES},
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "top_k_experts"), 2),
}


def configuration(config_class: Any, overrides: dict[str, Any]) -> Any:
    """A configuration of which every field that TINY knows is tiny; configurations within it, too."""
    from transformers import CONFIG_MAPPING

    known = inspect.signature(config_class).parameters
    nested = {n: c for n, c in (getattr(config_class, "sub_configs", None) or {}).items() if inspect.isclass(c)}
    single = {name for name, field in known.items() if not isinstance(field.default, tuple | list)}
    values = {name: value for name, value in TINY.items() if name in single or name == "num_labels"}
    for name, inner in nested.items():
        own = dict(overrides.get(name, {}))
        if "model_type" in own:  # a model joined of any others
            inner = CONFIG_MAPPING[own.pop("model_type")]
        if name in known and hasattr(inner, "sub_configs"):
            values[name] = configuration(inner, own).to_dict()
    return config_class(**(values | {k: v for k, v in overrides.items() if k not in nested}))


def class_named(name: str) -> Any:
    """A model class of Transformers, and so its module is imported."""
    import transformers

    return getattr(transformers, name)


def build(name: str, overrides: dict[str, Any]) -> nn.Module:
    """The model with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a tiny configuration makes Transformers warn of
        model_class = class_named(name)
        return model_class(configuration(model_class.config_class, overrides))


# ------------------------------------------------------------------------------------------------------------ losses


def _without_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def token_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of logits against `targets`, over all that are not -100; other entries are the model's."""
    given = {name: value for name, value in batch.items() if name != "targets"}
    logits = model(**given, **_without_cache(model)).logits
    return shoal.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100)


def class_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of one label a sample."""
    given = {name: value for name, value in batch.items() if name != "targets"}
    return shoal.cross_entropy(model(**given).logits, batch["targets"])


def contrastive_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Each image against the texts of the batch: it compares samples with each other."""
    logits = model(**batch).logits_per_image
    targets = torch.arange(len(logits), device=logits.device)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), len(logits)


def own_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The model's own mean over samples of equal size."""
    count = len(next(iter(batch.values())))
    return model(**batch).loss * count, count


# -------------------------------------------------------------------------------------------------------------- data


def causal() -> Batch:
    """Token ids and the next ones."""
    tokens = ids(SAMPLES, POSITIONS + 1)
    return {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}


def masked() -> Batch:
    """Token ids of ragged lengths, a mask of what is there, and targets at about a third of the places."""
    tokens, chosen = ids(SAMPLES, POSITIONS), ids(SAMPLES, POSITIONS, most=3, least=0, seed=1) == 0
    there = torch.arange(POSITIONS) < (6 + torch.arange(SAMPLES) % (POSITIONS - 5))[:, None]
    chosen[:, 0] = True
    hidden = torch.where(chosen, 3, tokens) * there
    return {"input_ids": hidden, "attention_mask": there.long(), "targets": tokens.where(chosen & there, -100)}


def translated() -> Batch:
    """Source ids, the decoder's ids and its targets."""
    target = ids(SAMPLES, 7, seed=1)
    found = masked()
    source = {"input_ids": ids(SAMPLES, POSITIONS) * found["attention_mask"], "attention_mask": found["attention_mask"]}
    return {**source, "decoder_input_ids": target[:, :-1], "targets": target[:, 1:]}


def _labels() -> Tensor:
    return ids(SAMPLES, most=CLASSES, least=0, seed=2)


def images() -> Batch:
    """Images [3, 32, 32] and labels."""
    return {"pixel_values": numbers(SAMPLES, 3, 32, 32), "targets": _labels()}


def larger_images() -> Batch:
    """Images [3, 64, 64] and labels."""
    return {"pixel_values": numbers(SAMPLES, 3, 64, 64), "targets": _labels()}


def sound() -> Batch:
    """Wave forms [1600] and labels."""
    return {"input_values": numbers(SAMPLES, 1600), "targets": _labels()}


def spectra(frames: int, bins: int, name: str) -> Batch:
    """Spectrograms [frames, bins] and labels."""
    return {name: numbers(SAMPLES, frames, bins), "targets": _labels()}


def spoken(*shape: int, name: str = "input_features") -> Batch:
    """Spectrograms, the decoder's ids and its targets."""
    target = ids(SAMPLES, 7, seed=1)
    return {name: numbers(SAMPLES, *shape), "decoder_input_ids": target[:, :-1], "targets": target[:, 1:]}


def pairs() -> Batch:
    """Images and texts."""
    tokens = ids(SAMPLES, POSITIONS)
    tokens[:, -1] = 2  # where a text ends
    return {"pixel_values": images()["pixel_values"], "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def captioned(image_token: int = 63, patches: int = 16) -> Batch:
    """Images, and texts that begin with a place for each patch; the next token is wanted after them."""
    text = ids(SAMPLES, POSITIONS + 1, most=image_token)
    places = torch.full((SAMPLES, patches), image_token)
    tokens = torch.cat([places, text[:, :-1]], 1)
    targets = torch.cat([places.new_full(places.shape, -100), text[:, 1:]], 1)
    return {"pixel_values": images()["pixel_values"], "input_ids": tokens, "targets": targets}


def series(length: int, future: int, channels: int) -> Batch:
    """Time series and what follows them."""
    values = numbers(SAMPLES, length + future, channels).cumsum(1) / 4
    return {"past_values": values[:, :length], "future_values": values[:, length:]}


# -------------------------------------------------------------------------------------------------------------- rows

_LOSSES: dict[Callable[..., Batch], Any] = {causal: token_loss, masked: token_loss, translated: token_loss}


def row(family: str, name: str, built: tuple[str, dict[str, Any]], data: Callable[[], Batch], **others: Any) -> Row:
    """A row of Transformers. `others`: `loss`, `fuse` and what else a Job has."""
    loss = others.pop("loss", None) or _LOSSES.get(data, class_loss)
    model = partial(build, *built)
    told = f"{data.func.__name__}{data.keywords}" if isinstance(data, partial) else data.__name__
    written = f"{built} {told} {loss.__name__} {others}"
    job, prepare = partial(make_job, model, loss, data, **others), partial(class_named, built[0])
    return Row(name, family, job, prepare, written)
