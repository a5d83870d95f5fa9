"""Loss of a Transformers model by its task: a sum over labels and the number of labels that count."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.losses import cross_entropy, mse

IGNORED = -100
_LABELS = ("labels", "label", "label_ids")
_TOKENS = ("ForMaskedLM", "ForTokenClassification")
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")


@dataclass(frozen=True)
class ModelLook:
    """Properties of a Transformers model: task, arguments of forward, parameters with weight decay, kind of labels."""

    task: str | None
    columns: frozenset[str]
    decayed: frozenset[str]
    problem: str | None
    num_labels: int | None


class TransformersModel:
    """A job's `model` that records the Transformers class and task of the built module, to choose the loss."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self._look: ModelLook | None = None

    def __call__(self) -> Any:
        """Build the module. Raises: what the function raises."""
        model = self.make()
        if not isinstance(model, nn.Module):
            return model
        of_peft: Any = getattr(model, "get_base_model", None)
        base: Any = of_peft() if of_peft is not None else model
        config, name = getattr(base, "config", None), type(base).__name__
        task = getattr(base, "loss_type", None)
        if not task:  # the class's name does not contain it, such as GPT2LMHeadModel
            known = importlib.import_module("transformers.models.auto.modeling_auto")
            is_masked = name in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
            is_causal = name in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            task = "ForCausalLM" if is_causal else "ForMaskedLM" if is_masked else None
        trainer = importlib.import_module("transformers").Trainer
        self._look = ModelLook(
            task,
            frozenset((*inspect.signature(base.forward).parameters, *_LABELS)),
            frozenset(trainer.get_decay_parameter_names(None, model)),
            getattr(config, "problem_type", None),
            getattr(config, "num_labels", None),
        )
        return model

    @property
    def look(self) -> ModelLook:
        """Properties of the model that was built last."""
        assert self._look is not None, "the engine builds the model before its optimizer and its losses"
        return self._look

    @property
    def columns(self) -> frozenset[str] | None:
        """The names that forward accepts, and the labels; None before a model was built."""
        return self._look.columns if self._look is not None else None

    def __reduce__(self) -> Any:
        return TransformersModel, (self.make,), {"_look": self._look}


@dataclass(frozen=True)
class LabelsLoss:
    """Loss (model, batch) -> (total, weight) of a batch with `labels`. A label of -100 does not count.

    A model of the next token predicts the following label. `smoothing`: label smoothing of cross entropies.
    """

    source: TransformersModel
    smoothing: float = 0.0

    def __call__(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum and the weight. Raises: JobError for a task that needs a custom loss."""
        look = self.source.look
        labels = next((batch[name] for name in _LABELS if name in batch), None)
        if labels is None:
            raise _no_loss("a batch without labels", f"its names are {', '.join(map(str, batch))}")
        inputs = {name: value for name, value in batch.items() if name not in _LABELS}
        if "use_cache" in look.columns:
            inputs.setdefault("use_cache", False)
        logits = model(**inputs).logits
        if look.task == "ForCausalLM":  # each token predicts the next label; the last has none
            labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            return self._cross_entropy(logits.flatten(0, 1), labels.flatten())
        if look.task in _TOKENS:
            return self._cross_entropy(logits.flatten(0, 1), labels.flatten())
        if look.task in _CLASSES:
            if look.problem == "regression" or (look.problem is None and look.num_labels == 1):
                return mse(logits.float(), labels.view_as(logits).float())
            if look.problem == "single_label_classification" or not labels.is_floating_point():
                return self._cross_entropy(logits, labels.flatten())
            total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            return total, torch.tensor(labels.numel(), device=logits.device)
        raise _no_loss(f"a model for {look.task}", "what its loss counts is not known")

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.smoothing:
            return cross_entropy(logits, labels)
        total = F.cross_entropy(
            logits.float(), labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self.smoothing
        )
        return total, (labels != IGNORED).sum()


def _no_loss(given: str, conflict: str) -> JobError:
    return JobError(
        given=given,
        conflict=f"{conflict}, and a loss here is a sum and how many it sums over",
        remedy="give loss=..., a function (model, batch) -> (total, weight)",
    )
