"""A tiny model with the Transformers Trainer: `--model` names it, labels are ragged."""

import argparse
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from watch import watch

SIZES = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


class Tagger(nn.Module):
    """A model of one's own, with a mean loss."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(60, 32), nn.Linear(32, 60)

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(name):
    """Return a model."""
    torch.manual_seed(0)
    if name == "gpt2":
        no = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=2, **no, **SIZES))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**BERT, max_position_embeddings=16, **SIZES))
    no = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        return BertForMaskedLM(BertConfig(**BERT, **no, **SIZES))
    if name == "classifier":
        return BertForSequenceClassification(BertConfig(**BERT, **no, num_labels=3, **SIZES))
    return Tagger()


def hand_written(model, inputs):
    """Return the sum of the losses of a microbatch, and their number."""
    labels = inputs["labels"] if "labels" in inputs else data.labels_of(inputs["input_ids"])
    logits = model(input_ids=inputs["input_ids"], labels=labels)["logits"]
    if type(model).__name__.endswith(("LMHeadModel", "CausalLM")):
        logits, labels = logits[:, :-1], labels[:, 1:]
    options = {"reduction": "sum", "label_smoothing": given.smoothing}
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), **options), (labels != -100).sum()


class Lines(torch.utils.data.Dataset):
    """Random tokens, of which a random number have labels."""

    def __init__(self, size, kind, first):
        chance = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, 60, (size, 16), generator=chance)
        self.lengths = torch.randint(3, 16, (size,), generator=chance)
        self.kind, self.first = kind, first

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        tokens = self.tokens[place]
        if self.kind == "classes":
            return {"input_ids": tokens, "labels": tokens[0] % 3}
        length = 16 if self.kind == "whole" else self.lengths[place]
        has_label = (torch.arange(16) < length) & (torch.arange(16) >= 1 - self.first)
        return {"input_ids": tokens, "labels": tokens.where(has_label, -100)}

    def labels_of(self, tokens):
        """Return the labels of rows of tokens: a model whose loss is outside of it does not get them."""
        places = [int((self.tokens == row).all(1).nonzero()[0]) for row in tokens]
        return torch.stack([self[place]["labels"] for place in places])


def mean_loss(outputs, labels, num_items_in_batch=None):
    """A loss function of one's own, as the Trainer's documentation has it."""
    total = cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (num_items_in_batch or (labels != -100).sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--own-loss", action="store_true")
    parser.add_argument("--whole", action="store_true", help="all tokens but the first have labels")
    parser.add_argument("--first", action="store_true", help="the first token has a label, too")
    parser.add_argument("--plain", action="store_true", help="say that the model does not count tokens of a batch")
    parser.add_argument("--default", action="store_true", help="leave it to the release to count tokens of all ranks")
    given = parser.parse_args()
    kind = "classes" if given.model == "classifier" else "whole" if given.whole else "ragged"
    model, data = build(given.model), Lines(given.samples, kind, given.first)
    if given.plain:
        model.accepts_loss_kwargs = False
    watch(model, hand_written)
    is_new = hasattr(TrainingArguments, "average_tokens_across_devices")
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulate,
        num_train_epochs=3,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        label_smoothing_factor=given.smoothing,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **({} if given.default or not is_new else {"average_tokens_across_devices": True}),
    )
    own = {"compute_loss_func": mean_loss} if given.own_loss else {}
    Trainer(model=model, args=settings, train_dataset=data, **own).train()
