"""The search of examples/sweep.py by Optuna (pip install optuna), which chooses the settings and the runs to prune.

python examples/sweep_optuna.py; then: shoal runs runs/optuna
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import digits
import shoal


def parts(journal: str) -> dict[str, Any]:
    """Return the parts of the study in a file, which the ranks share with the process that calls `shoal.run`."""
    return {
        "study_name": "digits",
        "storage": JournalStorage(JournalFileBackend(journal)),
        "sampler": optuna.samplers.TPESampler(seed=0),
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=23),
    }


class Prune(shoal.Callback):
    """Reports each evaluation to a trial of the study, and ends the run if the study's pruner says so."""

    def __init__(self, journal: str, trial: int) -> None:
        self.journal, self.trial = journal, trial

    def on_evaluation(self, run: shoal.RunControl, metrics: Mapping[str, float]) -> None:
        if run.rank == 0:
            trial = optuna.Trial(optuna.load_study(**parts(self.journal)), self.trial)
            trial.report(metrics["accuracy"], run.step)
            if trial.should_prune():
                run.request_end("pruned by Optuna")


def job(lr: float, momentum: float, journal: str, trial: int, epochs: int = 4) -> shoal.Job:
    """The job of examples/digits.py, as a trial of the study."""
    return replace(
        digits.job(lr=lr, momentum=momentum, epochs=epochs), callbacks=[Prune(journal, trial)], watch="accuracy:max"
    )


def sweep(trials: int = 6, devices: int = 1, out: str = "runs/optuna") -> optuna.Study:
    """Run the study, each trial as a run in `out`, and return it."""
    Path(out).mkdir(parents=True, exist_ok=True)
    journal = str(Path(out).absolute() / "study.journal")

    def objective(trial: optuna.Trial) -> float:
        settings = {
            "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.9),
            "journal": journal,
            "trial": trial._trial_id,
        }
        run = shoal.run(job, settings=settings, devices=devices, out=f"{out}/{trial.number}")
        if run.result.get("ended_by"):
            raise optuna.TrialPruned
        return float(run.result["metrics"]["accuracy"])

    study = optuna.create_study(**parts(journal), direction="maximize", load_if_exists=True)
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    best = sweep().best_trial
    print("best:", best.number, best.params)
