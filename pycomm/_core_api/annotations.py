"""Types of the collective calls' arguments, for type checkers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from pycomm.group import Group

if TYPE_CHECKING:
    from torch.distributed import ReduceOp
    from typing_extensions import Buffer, NotRequired

    Op: TypeAlias = (
        Literal["sum", "avg", "mean", "product", "prod", "min", "max", "band", "bor", "bxor"]
        | ReduceOp
        | ReduceOp.RedOpType
    )


class _DLPack(Protocol):
    @property
    def __dlpack__(self) -> Any: ...


class _ArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> Any: ...


Array = TypeVar("Array", bound="Buffer | _DLPack | _ArrayInterface")
"""An array: a call returns what it was given."""


class Messages(TypedDict, total=False):
    """Arguments that all calls have; they run at once."""

    group: Group | None
    async_op: Literal[False]
    timeout_s: float | None


class Calls(Messages, total=False):
    """Arguments that all collectives have, except barrier."""

    algorithm: str | None


class AsyncMessages(TypedDict):
    """As Messages; they return a Work."""

    group: NotRequired[Group | None]
    async_op: Literal[True]
    timeout_s: NotRequired[float | None]


class AsyncCalls(AsyncMessages):
    """As Calls; they return a Work."""

    algorithm: NotRequired[str | None]
