"""A causal language model from a configuration with the Transformers Trainer and a collator that pads."""

import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


def collate(lines):
    lines = [torch.tensor(line) for line in lines]
    ids = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class OwnTrainer(Trainer):
    def get_train_dataloader(self):
        if args.fault != "plain_loader":
            return super().get_train_dataloader()
        return DataLoader(self.train_dataset, args.batch_size, shuffle=True, collate_fn=collate)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if args.fault != "own_mean":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class TimesWorld(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        for p in model.parameters():
            p.grad *= args.world_size


set_seed(args.seed)
lengths = torch.randint(4, 24, (160,)).tolist()
data = [torch.randint(1, 90, (length,)).tolist() for length in lengths]
if args.fault == "shard_twice":
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    data = Subset(data, range(rank, len(data), world))
options = {"output_dir": tempfile.mkdtemp(), "report_to": [], "save_strategy": "no", "disable_tqdm": True}
options |= {"per_device_train_batch_size": args.batch_size, "gradient_accumulation_steps": 2, "max_steps": 24}
options |= {"learning_rate": 2e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3, "seed": args.seed, "use_cpu": True}
config = GPT2Config(vocab_size=90, n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
callbacks = [TimesWorld()] if args.fault == "grads_times_world" else []
settings = TrainingArguments(**options)
trainer = OwnTrainer(GPT2LMHeadModel(config), settings, collate, train_dataset=data, callbacks=callbacks)
trainer.train()
