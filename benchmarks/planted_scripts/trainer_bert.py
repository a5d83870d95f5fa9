"""Sequence classification by a small BERT from a configuration with the Transformers Trainer."""

import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class Reviews(Dataset):
    def __init__(self, size=128, length=20):
        generator = torch.Generator().manual_seed(args.seed)
        self.ids = torch.randint(4, 120, (size, length), generator=generator)
        self.labels = (self.ids[:, 1:4].sum(1) > 240).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.labels[i]}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        counts = torch.bincount(labels, minlength=2).clamp(min=1)
        loss = F.cross_entropy(outputs.logits, labels, weight=len(labels) / counts)
        return (loss, outputs) if return_outputs else loss


class DecayOnMain(Trainer):
    def create_optimizer(self, *arguments):
        optimizer = super().create_optimizer(*arguments)
        for group in optimizer.param_groups:
            group["weight_decay"] *= int(os.environ.get("RANK", "0")) == 0
        return optimizer


set_seed(args.seed)
config = BertConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = BertForSequenceClassification(config)
options = {"output_dir": tempfile.mkdtemp(), "report_to": [], "save_strategy": "no", "disable_tqdm": True}
options |= {"per_device_train_batch_size": args.batch_size, "max_steps": 30, "seed": args.seed, "use_cpu": True}
options |= {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 3, "max_grad_norm": 0.5}
kind = {"class_weights": Weighted, "decay_on_main": DecayOnMain}.get(args.fault, Trainer)
kind(model, TrainingArguments(**options), train_dataset=Reviews()).train()
