"""What a program does to the model of a LocalSGD between its steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pycomm._training.parameters import unknown_parameter
from pycomm.errors import InvalidArgument


class ModelWatch:
    """Notices parameters that ranks do not share, and weights that were loaded.

    Args:
        model: its parameters.
        optimizer: that changes them.
        shared: the parameters that ranks exchange.

    Attributes:
        loaded: weights were loaded, and the snapshot is that of earlier ones.
        restored: the snapshot was loaded after the last step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, shared: Sequence[nn.Parameter]
    ) -> None:
        self.loaded = self.restored = False
        self._model, self._optimizer = model, optimizer
        self._shared, self._count = {id(p) for p in shared}, self._counted()
        hook = _LoadHook(weakref.ref(self))
        for module in model.modules():
            register: Any = module.register_load_state_dict_post_hook
            register(hook)

    def check(self) -> None:
        """Raises InvalidArgument if a parameter would be trained on this rank alone."""
        self.restored = False
        name = unknown_parameter(self._model, self._shared)
        if name is not None:
            raise InvalidArgument(
                f"LocalSGD: {name!r} is a new parameter, or requires gradients only since LocalSGD "
                "was made, so ranks do not exchange it: make LocalSGD anew"
            )
        if self._counted() != self._count:
            raise InvalidArgument(
                f"LocalSGD: the optimizer has {self._counted()} parameters, and had {self._count} "
                "when LocalSGD was made: call add_param_group() before pycomm.LocalSGD"
            )

    def _counted(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


class _LoadHook:
    """Notes that weights were loaded. A copy of the model has one without a function."""

    def __init__(self, watch: weakref.ref[ModelWatch] | None = None) -> None:
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        found = None if self._watch is None else self._watch()
        if found is not None and not found.restored:
            found.loaded = True

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return _LoadHook, ()
