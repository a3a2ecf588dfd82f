"""Valid calls of the training layer, as in valid_calls.py. All ranks of a group make them."""

from typing import Any

import torch
from malformed import Valid
from torch import nn

import pycomm
from pycomm import Group, elastic


def layer() -> nn.Module:
    return nn.Linear(3, 2)


def sgd(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **more)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu")


def dgc() -> pycomm.DGC:
    return pycomm.DGC(sgd(layer()))


def quantized() -> pycomm.QuantizedGradients:
    return pycomm.QuantizedGradients(layer().named_parameters())


def wrapped(group: Group, compression: Any = None) -> pycomm.DataParallel:
    return pycomm.DataParallel(layer(), compression, group=group)


def local(group: Group, **more: Any) -> pycomm.LocalSGD:
    model = layer()
    return pycomm.LocalSGD(model, sgd(model), group=group, **more)


def local_sgd(group: Group) -> dict[str, Any]:
    model = layer()
    return {"model": model, "optimizer": sgd(model), "k_steps": 2, "group": group}


def adaptive(group: Group) -> dict[str, Any]:
    model = layer()
    return {"model": model, "optimizer": sgd(model), "init_k_steps": 2, "group": group}


def sharded(group: Group) -> dict[str, Any]:
    def build(_: Group) -> tuple[Any, ...]:
        model = torch.nn.utils.skip_init(nn.Linear, 3, 2)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        return model, sgd(model)

    return {"build": build, "group": group}


# On two ranks both ranks make each call.
TRAINING: dict[str, Valid] = {
    "DataParallel": lambda g: {"module": layer(), "group": g},
    "SyncBatchNorm": lambda g: {"num_features": 3, "group": g},
    "SyncBatchNorm.convert_sync_batchnorm": lambda g: {"module": nn.BatchNorm1d(3), "group": g},
    "DGC": lambda _: {
        **{"optimizer": sgd(layer(), momentum=0.9), "sparsity": [0.9], "min_count": 1},
    },
    "QuantizedGradients": lambda _: {"named_parameters": layer().named_parameters()},
    "LocalSGD": local_sgd,
    "AdaptiveLocalSGD": adaptive,
    "StaticLossScaler": lambda _: {},
    "elastic.sync_state": lambda g: {"state": {"x": torch.ones(3)}, "step": 1, "group": g},
    "elastic.ShardedTraining": sharded,
    "elastic.Microbatches": lambda g: {"count": 4, "group": g},
    "elastic.manual_seed": lambda _: {"seed": 1, "*": (2, 3)},
}


def after_a_step(group: Group) -> pycomm.QuantizeState:
    state = pycomm.Quantize().state()
    pycomm.all_reduce(torch.ones(9), group=group, compression=pycomm.Quantize(), state=state)
    return state


def adaptive_of(group: Group) -> pycomm.AdaptiveLocalSGD:
    made = pycomm.AdaptiveLocalSGD(**adaptive(group))
    made.step(1.0)
    return made


def topk_local(group: Group) -> pycomm.LocalSGD:
    return local(group, compression=pycomm.TopK(density=0.5, group=1))


def used_scaler() -> pycomm.StaticLossScaler:
    made = pycomm.StaticLossScaler()
    made.scale(torch.ones(()))
    return made


def wrapped_with(group: Group, compression: Any) -> Any:
    """The compression of a wrapped model."""
    model = layer()
    if isinstance(compression, type):
        compression = compression(sgd(model), min_count=1)
    return pycomm.DataParallel(model, compression, group=group).compression


def states(group: Group, make: Any, name: str = "saved") -> dict[str, Any]:
    """A call of load_state_dict() with the state of another object."""
    return {"self": make(group), name: make(group).state_dict()}


# Methods. On two ranks both ranks make each call.
METHODS: dict[str, Valid] = {
    "Group.split": lambda g: {"self": g, "color": 0},
    "Work.wait": lambda g: {
        **{"self": pycomm.all_reduce(torch.ones(3), group=g, async_op=True), "timeout_s": 20.0},
    },
    "TopK.groups": lambda _: {"self": pycomm.TopK(density=0.5), "counts": [100]},
    "DataParallel.join": lambda g: {"self": wrapped(g), "*": (sgd(layer()),)},
    "DGC.gather_state": lambda g: {"self": wrapped_with(g, pycomm.DGC)},
    "QuantizedGradients.gather_state": lambda g: {"self": wrapped_with(g, pycomm.Quantize())},
    "LocalSGD.gather_state": lambda g: {"self": topk_local(g)},
    "LocalSGD.is_due": lambda g: {"self": local(g), "step": 1},
    "LocalSGD.step": lambda g: {"self": local(g)},
    "LocalSGD.zero_grad": lambda g: {"self": local(g)},
    "AdaptiveLocalSGD.step": lambda g: {"self": adaptive_of(g), "loss": 1.0},
    "StaticLossScaler.update": lambda _: {"self": used_scaler(), "new_scale": 2.0},
    "elastic.Microbatches.of_step": lambda g: {"self": elastic.Microbatches(4, 1, g), "step": 1},
    "metrics.Mean.update": lambda g: {"self": pycomm.metrics.Mean(9, g), "value": 1.0},
    "metrics.Mean.compute": lambda g: {"self": pycomm.metrics.Mean(9, g), "now": True},
    "metrics.Accuracy.update": lambda g: {
        **{"self": pycomm.metrics.Accuracy((1,), 9, g), "scores": torch.zeros(4, 3)},
        "labels": torch.zeros(4).long(),
    },
    "metrics.Accuracy.compute": lambda g: {
        **{"self": pycomm.metrics.Accuracy((1,), 9, g), "now": True},
    },
}
# The same of methods that load a state, each value of which may be wrong.
STATES: dict[str, Valid] = {
    "QuantizeState.load_state_dict": lambda g: states(g, after_a_step),
    "DGC.load_state_dict": lambda g: states(g, lambda g: wrapped_with(g, pycomm.DGC)),
    "QuantizedGradients.load_state_dict": lambda g: states(
        g, lambda g: wrapped_with(g, pycomm.Quantize())
    ),
    "LocalSGD.load_state_dict": lambda g: states(g, local, "state"),
    "LocalSGD.load_state_dict with TopK": lambda g: states(g, topk_local, "state"),
    "AdaptiveLocalSGD.load_state_dict": lambda g: states(g, adaptive_of, "state"),
    "StaticLossScaler.load_state_dict": lambda g: states(
        g, lambda _: pycomm.StaticLossScaler(), "state_dict"
    ),
    "elastic.RandomState.load_state_dict": lambda g: states(
        g, lambda _: elastic.RandomState(), "state"
    ),
}
# The same of one rank.
METHODS_ALONE: dict[str, Valid] = {
    "Group.abort": lambda g: {"self": g.split(0), "reason": "a test"},
    "Group.shrink": lambda g: {"self": g.split(0), "timeout_s": 20.0},
    "Group.replace": lambda g: {"self": g, "timeout_s": 20.0, "wait_s": 0.0},
    "Group.grow": lambda g: {"self": g, "timeout_s": 20.0},
    "DataParallel.shrink": lambda g: {
        **{"self": wrapped(g.split(0)), "*": (sgd(layer()),), "timeout_s": 20.0},
    },
    "DataParallel.replace": lambda g: {
        **{"self": wrapped(g), "*": (sgd(layer()),), "timeout_s": 20.0, "wait_s": 0.0},
    },
    "LocalSGD.shrink": lambda g: {"self": local(g.split(0)), "timeout_s": 20.0},
    "LocalSGD.replace": lambda g: {
        **{"self": local(g), "*": (sgd(layer()),), "timeout_s": 20.0, "wait_s": 0.0},
    },
    "elastic.ShardedTraining.replace": lambda g: {
        **{"self": elastic.ShardedTraining(**sharded(g.split(0))), "timeout_s": 20.0},
        "wait_s": 0.0,
    },
}
