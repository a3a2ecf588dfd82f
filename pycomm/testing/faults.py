"""Faults that run_ranks injects on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm import _core
from pycomm._arguments import integer, one_of, path, plain_text, seconds

MOST = 2**31 - 1  # of a number of bytes or of a rank
ACTIONS = ("disconnect", "kill", "stop", "delay", "throttle", "corrupt")


@dataclass(frozen=True)
class FaultPlan:
    """A fault on one rank, after a number of bytes on its channels.

    Args:
        rank: the rank that has the fault.
        action: "disconnect" (closes its connections, as if it died), "kill" (SIGKILL), "stop"
            (SIGSTOP), "delay" (received data is visible `seconds` later), "throttle" (at most
            `chunk_bytes` received bytes are visible at a time), "corrupt" (sends 32 random bytes
            before the next frame).
        at: count the data frames of this operation only; None: all bytes, from the forming on.
        after_bytes: bytes sent and received before the fault, with headers.
        peer: count and act on the channel to this rank only; None: on all.
        seconds: of a delay.
        chunk_bytes: bytes that a throttled channel shows at a time.
        timestamp_file: the rank writes time.monotonic() of the fault ("corrupt": of its sending) to
            this file before the others can notice it; "": none.

    The fault affects the group that run_ranks makes. Subgroups of split() have channels of their
    own, without counting or faults; a killed or stopped rank is so in all groups.

    Raises:
        InvalidArgument: there is no such action or operation, or a number is out of its range.
    """

    rank: int
    action: str
    at: str | None = None
    after_bytes: int = 0
    peer: int | None = None
    seconds: float = 0.01
    chunk_bytes: int = 1
    timestamp_file: str = ""

    def __post_init__(self) -> None:
        one_of("action", self.action, ACTIONS)
        if self.at is not None:
            one_of("at", self.at, _core.OPERATIONS)
        integer("rank", self.rank, 0, MOST)
        integer("after_bytes", self.after_bytes, 0, MOST)
        if self.peer is not None:
            integer("peer", self.peer, 0, MOST)
        seconds("seconds", self.seconds, zero=True)
        integer("chunk_bytes", self.chunk_bytes, 1, MOST)
        if plain_text("timestamp_file", self.timestamp_file):
            path("timestamp_file", self.timestamp_file)

    def for_core(self) -> tuple[str, str, int, int, float, int, str]:
        """The arguments of the core's fault."""
        peer = -1 if self.peer is None else self.peer
        named = self.action, self.at or "", self.after_bytes, peer
        return *named, self.seconds, self.chunk_bytes, self.timestamp_file
