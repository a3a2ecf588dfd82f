"""The error classes, with the same names as in the C++ core, which looks them up here by name.

Each class is also a subclass of a built-in exception, so code can catch it without importing
pycomm. *Usage errors* (`InvalidArgument`, `Unsupported`, `Mismatch`): no data was sent and the
group stays usable. *Remote failures* (`Timeout`, `PeerLost`): the group is broken permanently;
later calls raise `GroupBroken` with the first cause. *Internal errors* (`InternalError`): a bug in
pycomm. docs/errors.md gives the remedy for each.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "Error",
    "GroupBroken",
    "InternalError",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "Timeout",
    "Unsupported",
]

FIELDS = ("op", "sequence", "rank", "peer", "unreachable", "elapsed_s", "bytes")


class Error(RuntimeError):
    """Any error of pycomm. A field that does not apply is None.

    Attributes:
        op: the name of the call, such as "all_reduce" or "init".
        sequence: the call's number in its group, from 0.
        rank: the rank that raises, in the group of the call.
        peer: the rank that caused the error.
        unreachable: during init or shrink: the peer that this rank could not connect to.
        elapsed_s: seconds since the call began.
        bytes: size of the data that the text refers to.
    """

    op: str | None
    sequence: int | None
    rank: int | None
    peer: int | None
    unreachable: int | None
    elapsed_s: float | None
    bytes: int | None

    def __init__(self, message: str = "", **fields: Any) -> None:
        unknown = fields.keys() - set(FIELDS)
        if unknown:
            raise TypeError(f"an error has no field {sorted(unknown)[0]!r}")
        super().__init__(message)
        for name in FIELDS:
            setattr(self, name, fields.get(name))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the text, the fields and the notes."""
        return type(self), (str(self),), self.__dict__


class InvalidArgument(Error, ValueError):
    """An argument, an environment variable or the time of a call is invalid; no data was sent."""


class Unsupported(Error, NotImplementedError):
    """The request is valid, but not implemented or not available here; no data was sent."""


class Mismatch(Error, ValueError):
    """The ranks' calls differ; no array changed and the group stays usable. If Group.cuda_agreement
    is "after", CUDA arrays may have changed, and the group is broken."""


class Timeout(Error, TimeoutError):
    """A call exceeded its time limit; the text names the missing ranks. The group is broken."""


class PeerLost(Error, ConnectionError):
    """Rank `peer` died, left or is unreachable. The group is broken."""


class GroupBroken(Error):
    """The group failed earlier (the text has the first cause), was closed, or belongs to the parent
    process of a fork.
    """


class InternalError(Error):
    """A bug in pycomm; please report the text."""
