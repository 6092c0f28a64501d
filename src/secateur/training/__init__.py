"""Pruning while training: `Pruner`, and the penalties that prepare units to leave."""

from secateur.training.pruner import Pruner as Pruner
from secateur.training.regularization import growing as growing
