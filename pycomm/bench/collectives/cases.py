"""The measured operations and cases, by the definitions of nccl-tests. The import needs no torch,
so that --help is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pycomm.bench.collectives.peers import PACKAGES, Peer

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes of an element
DTYPES |= {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1}
THEIRS = {"float16": "half", "float32": "float", "float64": "double"}
"""The names of nccl-tests for dtypes; the others are the same."""
REDOPS = ("sum", "prod", "min", "max", "avg")
WINDOW = 64  # messages that p2p_bandwidth and p2p_bidirectional send before an answer


@dataclass(frozen=True)
class Verb:
    """One operation. `size` below is ranks, S the bytes that nccl-tests calls size."""

    name: str
    whole_input: bool  # the input holds a piece for every rank
    whole_output: bool
    bus_factor: Callable[[int], float]  # busbw / algbw, as in nccl-tests
    traffic: Callable[[int], float]  # bytes a rank reads and writes at least, in S; 0: unknown
    in_place: bool = False  # the call changes its input
    reduces: bool = False
    rooted: bool = False
    pieces: bool = False  # the count is of a piece, though input and output are whole
    messages: int = 1  # in one call: the time is that of one
    alone: bool = False  # it has one form: neither in place nor out of place


def _share(n: int) -> float:
    return (n - 1) / n


VERBS = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", True, True, lambda n: 2 * _share(n), lambda n: 2, True, True),
        Verb("reduce", True, True, lambda n: 1, lambda n: 1 + 1 / n, True, True, True),
        # The root only reads, the others only write.
        Verb("broadcast", True, True, lambda n: 1, lambda n: 1, True, rooted=True),
        Verb("all_gather", False, True, _share, lambda n: 2),
        Verb("all_gather_v", False, True, _share, lambda n: 2),  # of equal lengths
        Verb("gather", False, True, _share, lambda n: 2 * _share(n) / n, rooted=True),
        Verb("reduce_scatter", True, False, _share, lambda n: 1 + 1 / n, reduces=True),
        Verb("scatter", True, False, _share, lambda n: 2 * _share(n) / n, rooted=True),
        Verb("all_to_all", True, True, _share, lambda n: 2 * _share(n), pieces=True),
        # Each rank sends to the next one and receives from the one before, as in nccl-tests.
        Verb("send_recv", True, True, lambda n: 1, lambda n: 2),
        # The same, posted in one batch before a computation; "fake" computes only.
        Verb("overlap", True, True, lambda n: 1, lambda n: 2, alone=True),
        Verb("barrier", True, True, lambda n: 0, lambda n: 0, alone=True),
        # Ranks 0 and 1, as in the OSU benchmarks: half a round trip, a window of messages and an
        # answer, and the same in both directions at once.
        *(
            Verb(f"p2p_{name}", True, True, lambda n: 1, lambda n: 0, messages=count, alone=True)
            for name, count in (
                ("latency", 2),
                ("bandwidth", WINDOW),
                ("bidirectional", 2 * WINDOW),
            )
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """One operation on one dtype and size, for `size` ranks.

    `copies`: not in the form of pycomm's call: out of place for those that change their input,
    which is copied first, and in place for the others, as in nccl-tests.
    """

    verb: str
    dtype: str
    wanted_bytes: int
    size: int
    root: int = 0
    redop: str = "sum"
    copies: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES.get(self.dtype, 1)  # bool, in traces

    @property
    def kind(self) -> Verb:
        """The operation."""
        return VERBS[self.verb]

    @property
    def in_place(self) -> bool:
        """Whether the output is the input, or a part of it."""
        return self.kind.in_place != self.copies

    @property
    def whole(self) -> bool:
        """Whether the count is of the input and of the output."""
        kind = self.kind
        return kind.whole_input and kind.whole_output and not kind.pieces

    @property
    def count(self) -> int:
        """Elements as nccl-tests prints them: of the smaller of input and output, at least one."""
        if self.verb == "barrier":
            return 0
        elements = self.wanted_bytes // self.itemsize
        return max(1, elements if self.whole else elements // self.size)

    @property
    def whole_count(self) -> int:
        """Elements of the larger of input and output."""
        return self.count if self.whole else self.count * self.size

    @property
    def bytes(self) -> int:
        """S: bytes of the larger of input and output; rounded from the requested size."""
        return self.whole_count * self.itemsize


@dataclass(frozen=True)
class Run:
    """The requested run.

    Attributes:
        calls: of each contestant in a round; None: 2 to 100, by size.
        busy: a thread of each rank computes in Python meanwhile.
        prefixes: of MPIs outside this environment.
    """

    ranks: int
    cases: list[Case]
    peers: list[Peer]
    rounds: int
    calls: int | None = None
    warm_up: int = 20
    check: bool = True
    busy: bool = False
    device: str = "cpu"
    prefixes: dict[str, Path] = field(default_factory=dict)

    @property
    def mpis(self) -> list[str]:
        """The MPIs among the peers."""
        return [peer.name for peer in self.peers if peer.name in PACKAGES]

    def beside(self, name: str) -> list[Peer]:
        """The contestants of the run with the MPI `name`; "": with none."""
        return [peer for peer in self.peers if peer.name == name or peer.name not in PACKAGES]
