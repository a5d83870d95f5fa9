"""A Llama with random frozen weights, and LoRA adapters that are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shoal

VOCABULARY = 32


def base(tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=16,
            pad_token_id=None,
            tie_word_embeddings=tied,
        )
    )


def model(head: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(6)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        modules_to_save=["lm_head"] if head else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base(), config)


def data() -> Tensor:
    return torch.randint(1, VOCABULARY, (64, 13), generator=torch.Generator().manual_seed(3))


def next_token(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return shoal.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def job(steps: int = 4, head: bool = False) -> shoal.Job:
    """AdamW of the adapters alone."""
    return shoal.Job(
        model=lambda: model(head),
        loss=next_token,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train_data=data,
        global_batch=16,
        grains=8,
        length=shoal.Steps(steps),
    )
