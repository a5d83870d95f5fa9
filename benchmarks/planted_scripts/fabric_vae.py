"""A variational autoencoder of digits with Lightning Fabric."""

import argparse
import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class VAE(nn.Module):
    def __init__(self, hidden=48, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.SiLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.SiLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(args.seed)
    data = TensorDataset(torch.tensor(load_digits().data[:320], dtype=torch.float32) / 16)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = VAE()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    if args.fault != "loader_not_set_up":
        loader = fabric.setup_dataloaders(loader)
    if args.fault != "same_noise":
        torch.manual_seed(args.seed + 1000 * (1 + fabric.global_rank))
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            with fabric.no_backward_sync(model, enabled=args.fault == "never_synced"):
                recon, mean, log_var = model(x)
                kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1)
                loss = F.mse_loss(recon, x, reduction="sum") + kl.sum()
                if args.fault != "sum_loss":
                    loss = loss / len(x)
                fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
            optimizer.zero_grad()


main()
