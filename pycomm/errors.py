"""The tree of errors: the same classes, by the same names, as in the C++ core.

Each is also a built-in's subclass, so that code that knows nothing of pycomm can catch it. Three
kinds of them. *Your mistake* (`InvalidArgument`, `Unsupported`, `Mismatch`): nothing moved, the
group stays usable. *The world's* (`Timeout`, `PeerLost`): the group is broken for good, and later
calls raise `GroupBroken` with the first cause. *Ours* (`InternalError`): a bug in pycomm.

The core looks the classes up here by name; docs/errors.md says what to do about each.
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

FIELDS = ("op", "sequence", "rank", "peer", "elapsed_s", "bytes")


class Error(RuntimeError):
    """Any error of pycomm. A field that does not apply is None.

    Attributes:
        op: the call, as "all_reduce" or "init".
        sequence: which call of its group, counted from 0.
        rank: who raises, in the group of the call.
        peer: who is to blame.
        elapsed_s: seconds since the call began.
        bytes: of the data that the text speaks of.
    """

    op: str | None
    sequence: int | None
    rank: int | None
    peer: int | None
    unreachable: int | None = None  # set while forming: a peer that this rank could not connect to
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
        """Errors travel between processes whole: text, fields and notes."""
        return type(self), (str(self),), self.__dict__


class InvalidArgument(Error, ValueError):
    """An argument, a variable of the environment or the time of a call is wrong; nothing moved."""


class Unsupported(Error, NotImplementedError):
    """Right in principle, but not built, or not on this machine; nothing moved."""


class Mismatch(Error, ValueError):
    """The ranks disagree about a call; no array has changed and the group stays usable."""


class Timeout(Error, TimeoutError):
    """The time limit of a call has passed; the text names who is missing. The group is broken."""


class PeerLost(Error, ConnectionError):
    """Rank `peer` died, left or cannot be reached. The group is broken."""


class GroupBroken(Error):
    """The group failed before (with the first cause), was closed, or is another process's."""


class InternalError(Error):
    """A bug in pycomm: please report the text."""
