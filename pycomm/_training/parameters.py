"""The parameters of a model that ranks exchange."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

__all__ = ["unknown_parameter"]


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
