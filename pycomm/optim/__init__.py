"""Local SGD and a static loss scale; needs torch."""

from pycomm.optim.adaptive import AdaptiveLocalSGD
from pycomm.optim.local_sgd import LocalSGD
from pycomm.optim.loss_scaler import StaticLossScaler

__all__ = ["AdaptiveLocalSGD", "LocalSGD", "StaticLossScaler"]
