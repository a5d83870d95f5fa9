"""A training loop of one's own with shoal.Session; rank 0 prints the hash of the weights as JSON."""

from __future__ import annotations

import json

import tiny
import torch
from torch.utils.data import TensorDataset

import shoal


def warm_up() -> None:
    """Another training before it, as of a fold: its ranks find each other anew."""
    with shoal.Session(global_batch=16) as session:
        model = torch.nn.Linear(4, 2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))  # the same on every rank
        for step in session.steps((rows, torch.zeros(16, dtype=torch.int64))):
            for inputs, labels in step:
                step.backward(*shoal.cross_entropy(model(inputs), labels))


def main() -> None:
    warm_up()
    torch.manual_seed(0)
    with shoal.Session(exact=True, global_batch=16) as session:
        model = tiny.conv_model()
        model, _ = session.prepare(model, tiny.sgd(model.parameters(), lr=0.02))
        losses = []
        for step in session.steps(TensorDataset(*tiny.images(100)), epochs=2):
            for inputs, labels, _ in step:
                step.backward(*shoal.cross_entropy(model(inputs), labels))
            losses.append(step.loss)
        metrics, count = session.evaluate(TensorDataset(*tiny.images(33, 2)), {"accuracy": shoal.accuracy})
        if session.rank == 0:
            told = {
                "hash": shoal.weights_sha256(model.state_dict()),
                "losses": losses,
                "metrics": metrics,
                "count": count,
            }
            print("told: " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
