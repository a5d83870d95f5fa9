"""A model of Keras under DistributedDataParallel, with a chosen fault: an input of test_scripts.py."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

os.environ["KERAS_BACKEND"] = "torch"
import keras

dist.init_process_group("gloo")
keras.utils.set_random_seed(0)
with keras.device("cpu"):
    net = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(4):
        inputs, targets = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy((net if "inner" in sys.argv else model)(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
