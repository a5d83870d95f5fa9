"""Programs of Spark users for tests, and what they need."""

from __future__ import annotations

import importlib.util
import shutil

MASTER = "local-cluster[2,1,1024]"
QUIET = {"SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}
SESSION = f"""\
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("{MASTER}").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
)
"""
FRAME_JOB = '''\
import shoal, torch
import numpy as np


class Memory(torch.utils.data.Dataset):
    """The same rows as the DataFrame has, without it."""

    def __init__(self, rows):
        self.x = features(np.arange(rows))
        self.y = labels(self.x)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def features(ids):
    return np.stack([np.sin(ids * k + k) for k in range(1, 5)], 1).astype(np.float32)


def labels(x):
    return (x[:, 0] + x[:, 1] > x[:, 2]).astype(np.int64)


def job(folder: str = "", rows: int = 100_000) -> shoal.Job:
    return shoal.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)),
        loss=lambda model, batch: shoal.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        train_data=(lambda: shoal.Parquet(folder, ["x", "y"])) if folder else (lambda: Memory(rows)),
        eval_data=lambda: Memory(2000),
        metrics={"accuracy": lambda model, batch: shoal.accuracy(model, (batch["x"], batch["y"]))},
        global_batch=1000,
        grains=4,
        length=shoal.Epochs(1),
    )
'''


def unavailable() -> str | None:
    """Why there is no Spark here; None where there is."""
    if importlib.util.find_spec("pyspark") is None:
        return "the package pyspark is not installed"
    return None if shutil.which("java") else "there is no Java"
