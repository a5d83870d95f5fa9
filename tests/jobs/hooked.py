"""Jobs with callbacks: of the ready-made ones, and of every wrong kind."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import layouts
import tiny
import torch

import shoal


class Busy(shoal.Callback):
    """Draws, computes and changes modes and buffers: none of it may be seen in the training."""

    def on_step(self, run: Any, record: Any) -> None:
        torch.manual_seed(run.rank)
        torch.rand(3)
        model = run.model
        model.train()
        if not run.divided:
            with torch.enable_grad():
                images = torch.randn(4, 1, 6, 6) if isinstance(model[0], torch.nn.Conv2d) else torch.randn(4, 6)
                model(images).sum().backward()
        model.eval()


class Told(shoal.Callback):
    """Writes what it is told to a file of its rank, and asks for things at certain steps."""

    def __init__(self, asks: str = "", rank: int | None = None) -> None:
        self.asks = {int(step): what for what, _, step in (one.partition("@") for one in asks.split(",") if one)}
        self.rank, self.seen = rank, 0
        self.mean = torch.zeros(2)

    def _say(self, run: Any, *what: Any) -> None:
        with Path(run.out, f"told-{run.rank}.txt").open("a") as file:
            print(*what, file=file)

    def on_start(self, run: Any) -> None:
        self._say(run, "start", run.step, self.seen, self.mean.tolist())

    def on_step(self, run: Any, record: Any) -> None:
        self.seen += 1
        self.mean += record.loss
        what = self.asks.get(record.step, "")
        if what and self.rank in (None, run.rank):
            if what == "end":
                run.request_end("as asked")
            else:
                getattr(run, f"request_{what}")()

    def on_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        self._say(run, "evaluation", run.step, *sorted(metrics))

    def on_checkpoint(self, run: Any, folder: Path) -> None:
        self._say(run, "checkpoint", run.step, folder.name)

    def on_end(self, run: Any, ending: Any) -> None:
        self._say(run, "end", ending.status, ending.step, ending.reason)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.mean = state["seen"], state["mean"]


class Raises(shoal.Callback):
    """Raises on one rank after a step."""

    def __new__(cls, hook: str = "on_step", rank: int = 0, required: bool = False) -> Raises:
        return super().__new__(type(cls.__name__, (cls,), {hook: cls._raise}))

    def __init__(self, hook: str = "on_step", rank: int = 0, required: bool = False) -> None:
        self.required, self.rank = required, rank

    def _raise(self, run: Any, *arguments: Any) -> None:
        if run.rank == self.rank and run.step >= 3:
            raise ValueError("no such file")


class Meddles(shoal.Callback):
    """Changes a parameter."""

    def on_step(self, run: Any, record: Any) -> None:
        next(run.model.parameters()).mul_(0.5)


class Apart(shoal.Callback):
    """Has another state on each rank."""

    def on_step(self, run: Any, record: Any) -> None:
        self.rank = run.rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": getattr(self, "rank", None)}


def job(
    model: str = "mlp", steps: int = 24, ema: float = 0.0, stop: int = 0, asks: str = "", busy: bool = False
) -> Any:
    """The MLP with what is asked for."""
    callbacks: list[Any] = [Told(asks)]
    callbacks += [shoal.EMA(ema)] if ema else []
    callbacks += [shoal.EarlyStopping("ema_loss" if ema else "loss", patience=stop, min_delta=0.02)] if stop else []
    callbacks += [Busy()] if busy else []
    make: Any = {"mlp": tiny.mlp, "convnet": partial(tiny.mlp, 200, 16, steps, 0.02)}[model]
    changes: dict[str, Any] = {"length": shoal.Steps(steps), "callbacks": callbacks}
    if model == "convnet":
        changes |= {"model": tiny.conv_model, "train_data": partial(tiny.images, 200)}
        changes |= {"eval_data": partial(tiny.images, 60, 2)}
        return make(**changes)
    return make(samples=64, **changes)


def one_rank_asks(asks: str = "end@5", rank: int = 1) -> shoal.Job:
    return tiny.mlp(samples=64, steps=24, callbacks=[Told(asks, rank)])


def raises(hook: str = "on_step", rank: int = 0, required: bool = False) -> shoal.Job:
    return tiny.mlp(samples=64, steps=8, callbacks=[Raises(hook, rank, required), Told()])


def meddles() -> shoal.Job:
    return tiny.mlp(steps=4, callbacks=[Meddles()])


def apart() -> shoal.Job:
    return tiny.mlp(steps=4, callbacks=[Apart()])


def others() -> shoal.Job:
    """Not the same callbacks on all ranks."""
    return tiny.mlp(steps=4, callbacks=[Told()] if os.environ.get("RANK") == "1" else [])


def plain(model: str = "mlp") -> shoal.Job:
    made: shoal.Job = job(model)
    return type(made)(**{**vars(made), "callbacks": ()})


def note_weights(model: torch.nn.Module, run: Any) -> None:
    assert run.rank == 0
    Path(run.out, f"sampled-{run.step}.txt").write_text(shoal.weights_sha256(model.state_dict()))


def stack(steps: int = 12) -> shoal.Job:
    """The language model that every axis divides, averaged; its whole weights are noted."""
    callbacks = [shoal.EMA(0.8), shoal.Sample(note_weights, every=3)]
    return dataclasses.replace(layouts.stack(steps), callbacks=callbacks)


def sample_raises() -> shoal.Job:
    """On rank 0, after all ranks have gathered the model for it."""

    def fail(model: torch.nn.Module, run: Any) -> None:
        raise RuntimeError("no display")

    return dataclasses.replace(layouts.stack(6), callbacks=[shoal.Sample(fail, every=1)])


class Gathers(shoal.Callback):
    """Gathers the whole model in a hook; on rank 1 another thing happens before it."""

    def __init__(self, hook: str, instead: str) -> None:
        self.hook, self.instead = hook, instead

    def _gather(self, run: Any, hook: str) -> None:
        if hook == self.hook and run.step >= 2 and run.rank == 1 and self.instead == "raises":
            raise OSError("disk full on this host")
        if hook == self.hook and run.step >= 2 and not (run.rank == 1 and self.instead == "leaves"):
            run.whole_model()

    def on_step(self, run: Any, record: Any) -> None:
        if self.instead == "fails" and run.rank == 1 and run.step == 3:
            next(run.parameters())[1].data.mul_(0.5)  # ends this rank alone
        self._gather(run, "on_step")

    def on_evaluation(self, run: Any, metrics: Any) -> None:
        self._gather(run, "on_evaluation")

    def on_end(self, run: Any, ending: Any) -> None:
        self._gather(run, "on_end")


def gathers(hook: str = "on_step", instead: str = "raises") -> shoal.Job:
    return dataclasses.replace(layouts.stack(6), callbacks=[Gathers(hook, instead), Told()])


def sets(steps: int = 24) -> shoal.Job:
    """Two evaluation sets: one decides which checkpoint is the best, the other when to end."""
    callbacks = [shoal.EMA(0.5), shoal.EarlyStopping("a/loss", patience=1, min_delta=10.0)]
    data = {"a": partial(tiny.vectors, 40, 2), "b": partial(tiny.vectors, 21, 3)}
    return tiny.mlp(samples=64, steps=steps, eval_data=data, watch="ema_b/accuracy:max", callbacks=callbacks)


def served(asks: str = "evaluation@2,checkpoint@3,end@6", ema: bool = False) -> shoal.Job:
    return tiny.mlp(samples=64, steps=24, callbacks=[Told(asks), *([shoal.EMA(0.9)] if ema else [])])


def tracked(tracker: str = "trackio", closing_seconds: float = 1.0) -> shoal.Job:
    """A run that waits little for its tracker."""
    from shoal.runs.options import TrackerName
    from shoal.training.trackers.tracker import Tracker

    name = TrackerName.parse(tracker, tracker)
    return tiny.mlp(samples=64, steps=8, callbacks=[Tracker(name, closing_seconds=closing_seconds)])
