"""Optimizers that communicate rarely, and a static loss scale; with torch."""

from pycomm.optim.adaptive import AdaptiveLocalSGD
from pycomm.optim.local_sgd import LocalSGD
from pycomm.optim.loss_scaler import StaticLossScaler

__all__ = ["AdaptiveLocalSGD", "LocalSGD", "StaticLossScaler"]
