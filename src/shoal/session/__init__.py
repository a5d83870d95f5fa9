"""Session: shoal's grains, sums and checkpoints for those who keep their own training loop."""

from shoal.session.loop import Step
from shoal.session.session import Session
from shoal.session.training import Training

__all__ = ["Session", "Step", "Training"]
