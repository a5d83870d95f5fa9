"""A Llama with random weights that bitsandbytes quantizes, and adapters of peft that are trained."""

from __future__ import annotations

from typing import Any

import lora
import torch
from torch import nn

import shoal


def quantized(model: nn.Module, bits: int, nested: bool = False, compute: torch.dtype | None = None) -> nn.Module:
    """Replace each linear layer but the head, as Transformers does with a BitsAndBytesConfig."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name == "lm_head":
            continue
        shape, bias = (module.in_features, module.out_features), module.bias is not None
        if bits == 4:
            layer: Any = bnb.nn.Linear4bit(*shape, bias, compute, compress_statistics=nested, quant_type="nf4")
        else:
            layer = bnb.nn.Linear8bitLt(*shape, bias, has_fp16_weights=False)
        layer.load_state_dict(module.state_dict())
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, layer.requires_grad_(False).to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model


def base(bits: int = 4, nested: bool = False, compute: str | None = None, hidden: int = 128) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=lora.VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return quantized(LlamaForCausalLM(config), bits, nested, getattr(torch, compute) if compute else None)


def model(
    bits: int = 4,
    nested: bool = False,
    compute: str | None = None,
    kind: str = "lora",
    hidden: int = 128,
    targets: str = "",
) -> Any:
    from peft import IA3Config, LoraConfig, get_peft_model

    torch.manual_seed(6)
    chosen = targets.split(",") if targets else ["q_proj", "v_proj", "down_proj"]
    config: Any = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=chosen,
        init_lora_weights=False,
        use_dora=kind == "dora",
        task_type="CAUSAL_LM",
    )
    if kind == "ia3":
        config = IA3Config(target_modules=chosen, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base(bits, nested, compute, hidden), config)


def job(
    steps: int = 4,
    bits: int = 4,
    nested: bool = False,
    compute: str = "",
    kind: str = "lora",
    hidden: int = 128,
    targets: str = "",
) -> shoal.Job:
    """AdamW of the adapters alone."""
    return shoal.Job(
        model=lambda: model(bits, nested, compute or None, kind, hidden, targets),
        loss=lora.next_token,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train_data=lora.data,
        global_batch=16,
        grains=8,
        length=shoal.Steps(steps),
    )
