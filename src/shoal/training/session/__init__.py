"""Session: grains, gradient sums and checkpoints for a user's own training loop."""

from shoal.training.session.loop import SessionStep
from shoal.training.session.session import Session
from shoal.training.session.training import Training

__all__ = ["Session", "SessionStep", "Training"]
