"""Session: shoal's grains, sums and checkpoints for those who keep their own training loop."""

from shoal.training.session.loop import SessionStep
from shoal.training.session.session import Session
from shoal.training.session.training import Training

__all__ = ["Session", "SessionStep", "Training"]
