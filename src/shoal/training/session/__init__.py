"""Session: grains, gradient sums and checkpoints for a user's own training loop."""

from shoal.training.session.arguments import Training
from shoal.training.session.loop import SessionStep
from shoal.training.session.session import Session

__all__ = ["Session", "SessionStep", "Training"]
