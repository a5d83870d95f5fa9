"""Jobs that train Transformers' own models, as they stand: `llama`, `gpt2`, `bert` (masked) and `vit` (images).

Each is built from a configuration with random weights; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from datasets import IGNORED, digits, pad, topics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BYTES = 256
MASK = BYTES  # the token that stands where a byte is hidden
VOCABULARY = 264  # bytes, the mask, and as many unused as make it a multiple of 8
HIDDEN_SHARE = 0.15


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW as language models use it."""
    return torch.optim.AdamW(list(parameters), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


# ------------------------------------------------------------------------------------------------- the next byte


def next_byte(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the valid tokens, and their number. Batch: inputs and targets, int64 [B, T].

    Padding is on the right, where a causal model never looks from a valid token: no attention mask is needed.
    """
    inputs, targets = batch
    logits = model(input_ids=inputs, use_cache=False).logits
    return shoal.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _llama(layers: int, width: int, heads: int, kv_heads: int, block: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=block,
            pad_token_id=None,
        )
    )


def llama(
    lr: float = 1e-3,
    steps: int = 200,
    batch: int = 16,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    block: int = 64,
    seed: int = 0,
) -> shoal.Job:
    """A Llama (rotary positions, grouped queries, SwiGLU, RMSNorm) on the bytes of Python's help topics."""
    return _language_model(partial(_llama, layers, width, heads, kv_heads, block), lr, steps, batch, block, seed)


def _gpt2(layers: int, width: int, heads: int, block: int, dropout: float, attention: str) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=block,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            attn_implementation=attention,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def gpt2(
    lr: float = 1e-3,
    steps: int = 200,
    batch: int = 16,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    block: int = 64,
    dropout: float = 0.1,
    attention: str = "sdpa",
    seed: int = 0,
) -> shoal.Job:
    """GPT-2 with tied embeddings and dropout everywhere; `attention` is "sdpa" or "eager"."""
    return _language_model(
        partial(_gpt2, layers, width, heads, block, dropout, attention), lr, steps, batch, block, seed
    )


def _language_model(model: Any, lr: float, steps: int, batch: int, block: int, seed: int) -> shoal.Job:
    return shoal.Job(
        model=model,
        loss=next_byte,
        optimizer=partial(adamw, lr=lr),
        train_data=partial(topics, "train", block),
        eval_data=partial(topics, "test", block),
        global_batch=batch,
        length=shoal.Steps(steps),
        schedule=shoal.warmup_cosine(warmup=0.1),
        clip_norm=1.0,
        seed=seed,
        collate=partial(pad, block=block),
    )


# ----------------------------------------------------------------------------------------------- the hidden bytes


class Hidden(Dataset[tuple[Tensor, Tensor]]):
    """Windows of bytes of which some are hidden: samples (inputs, targets), int64 [T] each; targets only where hidden.

    Drawn from torch's global generator, which shoal seeds for each grain: other bytes every epoch, and the same on any
    number of devices.
    """

    def __init__(self, windows: Dataset[Tensor]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index].long()
        hidden = torch.rand(len(window)) < HIDDEN_SHARE
        hidden[int(torch.randint(len(window), ()))] = True  # at least one
        return torch.where(hidden, MASK, window), torch.where(hidden, window, IGNORED)


def hidden_topics(split: str, block: int) -> Hidden:
    """The help topics of Python with some bytes hidden."""
    return Hidden(topics(split, block - 1))


def pad_hidden(samples: Sequence[tuple[Tensor, Tensor]], block: int) -> dict[str, Tensor]:
    """Ragged samples as int64 inputs and targets and a bool mask of what is there, [B, block] each."""
    lengths = torch.tensor([len(inputs) for inputs, _ in samples])
    there = torch.arange(block) < lengths[:, None]
    inputs = torch.zeros(len(samples), block, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    inputs[there], targets[there] = torch.cat([i for i, _ in samples]), torch.cat([t for _, t in samples])
    return {"inputs": inputs, "targets": targets, "there": there}


def hidden_byte(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the hidden bytes, and their number."""
    logits = model(input_ids=batch["inputs"], attention_mask=batch["there"]).logits
    return shoal.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)


def _bert(layers: int, width: int, heads: int, block: int, dropout: float, attention: str) -> PreTrainedModel:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=block,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            attn_implementation=attention,
            pad_token_id=None,
        )
    )


def bert(
    lr: float = 1e-3,
    steps: int = 200,
    batch: int = 16,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    block: int = 64,
    dropout: float = 0.1,
    attention: str = "sdpa",
    seed: int = 0,
) -> shoal.Job:
    """BERT that finds hidden bytes, with an attention mask and dropout; `attention` is "sdpa" or "eager"."""
    return shoal.Job(
        model=partial(_bert, layers, width, heads, block, dropout, attention),
        loss=hidden_byte,
        optimizer=partial(adamw, lr=lr),
        train_data=partial(hidden_topics, "train", block),
        eval_data=partial(hidden_topics, "test", block),
        global_batch=batch,
        length=shoal.Steps(steps),
        schedule=shoal.warmup_cosine(warmup=0.1),
        clip_norm=1.0,
        seed=seed,
        collate=partial(pad_hidden, block=block),
    )


# -------------------------------------------------------------------------------------------------------- images


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the batch, and its number of samples."""
    images, labels = batch
    return shoal.cross_entropy(model(pixel_values=images).logits, labels)


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """How many images are classified correctly, and how many there are."""
    images, labels = batch
    return (model(pixel_values=images).logits.argmax(1) == labels).sum(), len(labels)


def _images(split: str, dataset: str) -> TensorDataset:
    if dataset == "digits":
        return digits(split)
    from fashion_mnist import images

    return images(split)


def _vit(side: int, patch: int, layers: int, width: int, heads: int, dropout: float) -> PreTrainedModel:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=side,
            patch_size=patch,
            num_channels=1,
            num_labels=10,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def vit(
    lr: float = 1e-3,
    epochs: int = 10,
    batch: int = 64,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    dropout: float = 0.0,
    dataset: str = "digits",
    seed: int = 0,
) -> shoal.Job:
    """A vision transformer; `dataset` is "digits" (patches of 2 pixels) or "fashion_mnist" (of 4)."""
    side, patch = (8, 2) if dataset == "digits" else (28, 4)
    return shoal.Job(
        model=partial(_vit, side, patch, layers, width, heads, dropout),
        loss=classify,
        optimizer=partial(adamw, lr=lr),
        train_data=partial(_images, "train", dataset),
        eval_data=partial(_images, "test", dataset),
        metrics={"accuracy": accuracy},
        global_batch=batch,
        length=shoal.Epochs(epochs),
        schedule=shoal.warmup_cosine(warmup=0.1),
        clip_norm=1.0,
        seed=seed,
    )
