"""Batches: tensors, or lists, tuples and dicts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def on_values(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """The batch with fn(value) for each value in its lists, tuples and dicts."""
    if isinstance(batch, dict):
        return {key: on_values(part, fn) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_values(part, fn) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(on_values(part, fn) for part in batch)
    return fn(batch)


def on_tensors(batch: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The batch with fn(tensor) for each tensor; other values are unchanged."""
    return on_values(batch, lambda value: fn(value) if isinstance(value, Tensor) else value)


def flattened(batch: Any) -> tuple[list[Tensor], Any]:
    """The tensors in order, and the batch with "\\0" and their numbers in their
    places."""
    tensors: list[Tensor] = []

    def number(x: Tensor) -> str:
        tensors.append(x)
        return f"\0{len(tensors) - 1}"

    return tensors, on_tensors(batch, number)
