"""The parameters of a model that ranks exchange."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pycomm.errors import InvalidArgument


def check_initialized(owner: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises InvalidArgument for a parameter of a lazy module without a shape."""
    for name, parameter in named:
        if is_lazy(parameter):
            raise InvalidArgument(
                f"{owner}: {name!r} of a lazy module has no shape yet: run a dummy forward pass "
                "first, on all ranks"
            )


def unknown_parameter(model: nn.Module, known: Collection[int]) -> str | None:
    """The name of a parameter that requires gradients, and whose identity is not in `known`."""
    parts, seen = [model], {model}
    for part in parts:  # as model.modules(), which is slower
        new = [child for child in part._modules.values() if child is not None and child not in seen]
        seen.update(new)
        parts += new
        for parameter in part._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in known:
                return next(name for name, one in model.named_parameters() if one is parameter)
    return None
