"""The measured verbs: their arrays, calls, right answers and factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], object]

COMPUTED_BYTES = 2**16  # of a message, for each product of two FACTORs in "overlap"
FACTOR = 128

DTYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8"),
)


@dataclass(frozen=True)
class Verb:
    """One verb. `size` below is ranks, S the bytes that nccl-tests calls size."""

    name: str
    redop: str  # as nccl-tests prints it
    whole_input: bool  # the input holds a piece for every rank
    whole_output: bool
    bus_factor: Callable[[int], float]  # busbw / algbw, as in nccl-tests
    traffic: Callable[[int], float]  # bytes a rank reads and writes at least, in S
    in_place: bool = False  # the verb changes its input


VERBS = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", "sum", True, True, lambda n: 2 * (n - 1) / n, lambda n: 2, True),
        # The root only reads, the others only write.
        Verb("broadcast", "none", True, True, lambda n: 1, lambda n: 1, True),
        Verb("all_gather", "none", False, True, lambda n: (n - 1) / n, lambda n: 2),
        Verb("reduce_scatter", "sum", True, False, lambda n: (n - 1) / n, lambda n: 1 + 1 / n),
        # Each rank sends to the next one and receives from the one before, as in nccl-tests.
        Verb("send_recv", "none", True, True, lambda n: 1, lambda n: 2),
        # The same, posted in one batch before a computation; "fake" computes only.
        Verb("overlap", "none", True, True, lambda n: 1, lambda n: 2),
    )
}


@dataclass(frozen=True)
class Case:
    """One verb on one dtype and size, for `size` ranks."""

    verb: str
    dtype: str
    wanted_bytes: int
    size: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def in_place(self) -> bool:
        """Whether the verb changes its input."""
        return VERBS[self.verb].in_place

    @property
    def whole(self) -> bool:
        """Whether input and output have the same size."""
        return VERBS[self.verb].whole_input and VERBS[self.verb].whole_output

    @property
    def count(self) -> int:
        """Elements as nccl-tests prints them: of the smaller of input and output, at least one."""
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


def pattern(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of `rank`: [count] whole numbers below 8, so that sums are exact in every dtype."""
    i = torch.arange(count, dtype=torch.int32)
    return (((i * 40503 + rank * 7919) >> 5) & 7).to(dtype)


class Arrays:
    """The arrays of one rank in one case; `shares`: in memory that all ranks map."""

    def __init__(
        self, case: Case, rank: int, shares: bool = False, device: str | torch.device = "cpu"
    ) -> None:
        self.case, self.rank = case, rank
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        verb = VERBS[case.verb]
        self.source = pattern(rank, self._length(verb.whole_input), self.dtype).to(device)
        self.input = torch.empty_like(self.source)
        if shares:
            if case.verb != "all_reduce":
                raise NotImplementedError("only all_reduce is measured on arrays of pycomm.empty")
            import pycomm

            self.input = pycomm.empty(len(self.source), self.dtype)
        self._factor = torch.eye(FACTOR, device=device)
        self._product = torch.empty_like(self._factor)
        self.rewrite()
        self.output = (
            self.input
            if case.in_place
            else torch.empty(self._length(verb.whole_output), dtype=self.dtype, device=device)
        )

    @property
    def neighbours(self) -> tuple[int, int]:
        """The next rank and the one before."""
        return (self.rank + 1) % self.case.size, (self.rank - 1) % self.case.size

    def compute(self) -> None:
        """The computation beside "overlap": products of matrices, more of them for more bytes."""
        for _ in range(1 + self.case.bytes // COMPUTED_BYTES):
            torch.mm(self._factor, self._factor, out=self._product)

    def rewrite(self) -> None:
        """Puts the input back as it was before the call."""
        self.input.copy_(self.source)

    def expected(self) -> torch.Tensor:
        """The exact output of this rank."""
        case = self.case
        if case.verb == "broadcast":
            return pattern(0, case.count, self.dtype)
        if case.verb in ("send_recv", "overlap"):
            return pattern((self.rank - 1) % case.size, case.count, self.dtype)
        if case.verb == "all_gather":
            return torch.cat([pattern(r, case.count, self.dtype) for r in range(case.size)])
        total = pattern(0, case.whole_count, self.dtype)
        for other in range(1, case.size):
            total += pattern(other, case.whole_count, self.dtype)
        if case.verb == "all_reduce":
            return total
        return total[self.rank * case.count : (self.rank + 1) * case.count]

    def wrong(self, call: Call) -> int:
        """Elements of the output that are wrong after one call."""
        self.output.fill_(99)
        self.rewrite()
        call()
        return int((self.output.cpu() != self.expected()).sum().item())

    def _length(self, whole: bool) -> int:
        return self.case.whole_count if whole else self.case.count


def through_torch(arrays: Arrays, group: dist.ProcessGroup | None) -> Call:
    """The verb as a torch.distributed call on `group`."""
    x, out = arrays.input, arrays.output
    # The newer spelling where this torch has it: the older one warns there.
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "all_gather": lambda: gather(out, x, group=group),
        "reduce_scatter": lambda: scatter(out, x, group=group),
        "send_recv": lambda: _exchange(arrays, group),
        "overlap": lambda: _batch(arrays, group, arrays.compute),
    }[arrays.case.verb]


def _batch(arrays: Arrays, group: dist.ProcessGroup | None, meanwhile: Callable[[], None]) -> None:
    batch = [dist.P2POp(dist.isend, arrays.input, arrays.neighbours[0], group)]
    batch.append(dist.P2POp(dist.irecv, arrays.output, arrays.neighbours[1], group))
    works = dist.batch_isend_irecv(batch)
    meanwhile()
    for work in works:
        work.wait()


def _exchange(arrays: Arrays, group: dist.ProcessGroup | None) -> None:
    x, out, following, previous = arrays.input, arrays.output, *arrays.neighbours
    if x.is_cuda:  # NCCL needs both in one batch
        _batch(arrays, group, lambda: None)
        return
    sent: Any = dist.isend(x, following, group=group)
    dist.recv(out, previous, group=group)
    sent.wait()


def direct(arrays: Arrays) -> Call:
    """The verb as a call of pycomm's own, on its default group."""
    import pycomm

    size = arrays.case.size
    x, out, following, previous = arrays.input, arrays.output, *arrays.neighbours

    def exchange() -> None:
        sent = pycomm.send(x, following, async_op=True)
        pycomm.recv(out, previous)
        sent.wait()

    def overlap() -> None:
        works: list[pycomm.Work] = [
            pycomm.send(x, following, async_op=True),
            pycomm.recv(out, previous, async_op=True),
        ]
        arrays.compute()
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: pycomm.all_reduce(x),
        "broadcast": lambda: pycomm.broadcast(x, src=0),
        "all_gather": lambda: pycomm.all_gather(x, out=out.view(size, -1)),
        "reduce_scatter": lambda: pycomm.reduce_scatter(x.view(size, -1), out=out),
        "send_recv": exchange,
        "overlap": overlap,
    }[arrays.case.verb]
