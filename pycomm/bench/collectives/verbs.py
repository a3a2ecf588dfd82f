"""The arrays, calls and right answers of the measured operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pycomm.bench.collectives.cases import WINDOW, Case

Call = Callable[[], object]
Form = Callable[[Any, Any], object]
"""Of an input and an output."""

COMPUTED_BYTES = 2**16  # of a message, for each product of two FACTORs in "overlap"
FACTOR = 128
UNWRITTEN = 99
"""In an output before the call: not among the elements that a call writes there."""
REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{"sum": torch.add, "avg": torch.add, "prod": torch.mul},
    **{"min": torch.minimum, "max": torch.maximum},
}
COPIED = ("all_gather_v", "all_to_all", "send_recv")
"""Operations without a form in place: there their input is copied first."""


def pattern(rank: int, count: int, dtype: torch.dtype, redop: str = "sum") -> torch.Tensor:
    """The input of `rank`: [count] whole numbers below 8, so that sums are exact in every dtype; of
    a product 1 or 2."""
    i = torch.arange(count, dtype=torch.int32)
    x = ((i * 40503 + rank * 7919) >> 5) & 7
    return (x % 2 + 1 if redop == "prod" else x).to(dtype)


class Arrays:
    """The arrays of one rank in one case; `shares`: in memory that all ranks map."""

    def __init__(
        self, case: Case, rank: int, shares: bool = False, device: str | torch.device = "cpu"
    ) -> None:
        self.case, self.rank = case, rank
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        kind = case.kind
        self.source = self._pattern(rank, self._length(kind.whole_input)).to(device)
        self.input = torch.empty_like(self.source)
        if shares:
            if case.verb != "all_reduce" or case.copies:
                raise NotImplementedError("only all_reduce is measured on arrays of pycomm.empty")
            import pycomm

            self.input = pycomm.empty(len(self.source), self.dtype)
        self._factor = torch.eye(FACTOR, device=device)
        self._product = torch.empty_like(self._factor)
        self.answer = torch.zeros(1, dtype=torch.int32, device=device)  # of a window of messages
        self.output = self.input
        if not case.in_place:
            length = self._length(kind.whole_output)
            self.output = torch.empty(length, dtype=self.dtype, device=device)
        elif case.copies:
            self._overlay()
        self.copied = torch.empty_like(self.input) if case.copies else self.input
        self.rewrite()

    def _overlay(self) -> None:
        """Lets input and output share memory, as in nccl-tests."""
        verb, at, count = self.case.verb, self.rank, self.case.count
        mine = not self.case.kind.rooted or self.is_root
        if verb in ("all_gather", "gather", "all_gather_v"):
            whole = torch.empty(self.case.whole_count, dtype=self.dtype, device=self.input.device)
            self.output = whole
            if mine:
                self.input = whole[at * count : (at + 1) * count]
        elif verb in ("reduce_scatter", "scatter"):
            self.output = torch.empty(count, dtype=self.dtype, device=self.input.device)
            if mine:
                self.output = self.input[at * count : (at + 1) * count]

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == self.case.root

    @property
    def neighbours(self) -> tuple[int, int]:
        """The next rank and the one before."""
        return (self.rank + 1) % self.case.size, (self.rank - 1) % self.case.size

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a whole array, by rank."""
        return list(x.view(self.case.size, -1))

    def compute(self) -> None:
        """The computation beside "overlap": products of matrices, more of them for more bytes."""
        for _ in range(1 + self.case.bytes // COMPUTED_BYTES):
            torch.mm(self._factor, self._factor, out=self._product)

    def rewrite(self) -> None:
        """Puts the input back as it was before the call."""
        self.input.copy_(self.source)

    def form(self, call: Form, view: Callable[[torch.Tensor], Any] = lambda x: x) -> Call:
        """The call of an operation, call(input, output) of views, in the form of the case."""
        x, out, copied = self.input, self.output, self.copied
        if not self.case.copies or not (self.case.kind.in_place or self.case.verb in COPIED):
            given = view(x), view(out)
            return lambda: call(*given)
        target = out if self.case.kind.in_place else copied
        given = view(target), view(out)

        def copying() -> None:
            target.copy_(x)
            call(*given)

        return copying

    def expected(self) -> torch.Tensor:
        """The exact output of this rank; rounded by a division of "avg"."""
        case, rank, count = self.case, self.rank, self.case.count
        if case.kind.reduces:
            return self._reduced()
        source = {  # the rank whose whole input the output is
            **{"broadcast": case.root, "p2p_latency": 1 - rank, "p2p_bidirectional": 1 - rank},
            **dict.fromkeys(("send_recv", "overlap"), (rank - 1) % case.size),
            "p2p_bandwidth": 0 if rank == 1 else -1,
        }.get(case.verb, -1)
        if source >= 0:
            return self._pattern(source, count)
        parts: list[torch.Tensor] = []
        mine = slice(rank * count, (rank + 1) * count)
        if case.verb in ("all_gather", "all_gather_v") or (case.verb == "gather" and self.is_root):
            parts = [self._pattern(r, count) for r in range(case.size)]
        elif case.verb == "scatter":
            parts = [self._pattern(case.root, case.whole_count)[mine]]
        elif case.verb == "all_to_all":
            parts = [self._pattern(r, case.whole_count)[mine] for r in range(case.size)]
        # Nothing is written on other ranks, nor by a barrier.
        return torch.cat(parts) if parts else torch.full_like(self.output.cpu(), UNWRITTEN)

    def _reduced(self) -> torch.Tensor:
        case, count = self.case, self.case.count
        total = self._pattern(0, case.whole_count)
        for other in range(1, case.size):
            total = REDUCTIONS[case.redop](total, self._pattern(other, case.whole_count))
        if case.verb == "reduce_scatter":
            total = total[self.rank * count : (self.rank + 1) * count]
        return (total / case.size if case.redop == "avg" else total).to(self.dtype)

    def wrong(self, call: Call) -> int:
        """Elements of the output that are wrong after one call."""
        self.output.fill_(UNWRITTEN)
        self.rewrite()
        call()
        found, right = self.output.cpu(), self.expected()
        if self.case.verb == "reduce" and not self.is_root:  # gloo writes there, too
            return 0
        if self.case.redop == "avg":
            return int((~torch.isclose(found, right, rtol=0.01)).sum().item())
        return int((found != right).sum().item())

    def _pattern(self, rank: int, count: int) -> torch.Tensor:
        return pattern(rank, count, self.dtype, self.case.redop)

    def _length(self, whole: bool) -> int:
        return self.case.whole_count if whole else self.case.count


def point_to_point(
    arrays: Arrays, send: Callable[[Any, int], Any], recv: Callable[[Any, int], Any]
) -> Call:
    """The calls of p2p operations; send(x, rank) and recv(x, rank) return what wait() waits for."""
    rank, verb, x, out = arrays.rank, arrays.case.verb, arrays.input, arrays.output
    if rank > 1:
        return lambda: None
    sends, receives = verb == "p2p_bidirectional" or rank == 0, rank == 1 or verb != "p2p_bandwidth"

    def ping_pong() -> None:
        for turn in (send, recv) if rank == 0 else (recv, send):
            turn(x if turn is send else out, 1 - rank).wait()

    def window() -> None:
        works = [recv(out, 1 - rank) for _ in range(WINDOW if receives else 0)]
        works += [send(x, 1 - rank) for _ in range(WINDOW if sends else 0)]
        for work in works:
            work.wait()
        (send if rank else recv)(arrays.answer, 1 - rank).wait()

    return ping_pong if verb == "p2p_latency" else window


def through_torch(arrays: Arrays, group: dist.ProcessGroup | None) -> Call:
    """The operation as a torch.distributed call on `group`."""
    case, root = arrays.case, arrays.case.root
    # The newer spelling where this torch has it: the older one warns there.
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    op = getattr(dist.ReduceOp, "PRODUCT" if case.redop == "prod" else case.redop.upper())
    rows, at_root = arrays.rows, arrays.is_root
    if case.verb.startswith("p2p_"):
        if arrays.input.is_cuda:
            raise NotImplementedError("NCCL needs messages in batches")
        return point_to_point(
            arrays,
            lambda x, peer: dist.isend(x, peer, group=group),
            lambda x, peer: dist.irecv(x, peer, group=group),
        )
    forms: dict[str, Form] = {
        "all_reduce": lambda x, _: dist.all_reduce(x, op, group=group),
        "reduce": lambda x, _: dist.reduce(x, root, op, group=group),
        "broadcast": lambda x, _: dist.broadcast(x, root, group=group),
        "all_gather": lambda x, out: gather(out, x, group=group),
        "all_gather_v": lambda x, out: dist.all_gather(rows(out), x, group=group),
        "gather": lambda x, out: dist.gather(x, rows(out) if at_root else None, root, group=group),
        "reduce_scatter": lambda x, out: scatter(out, x, op, group=group),
        "scatter": lambda x, out: dist.scatter(
            out, rows(x) if at_root else None, root, group=group
        ),
        "all_to_all": lambda x, out: dist.all_to_all_single(out, x, group=group),
        "send_recv": lambda x, out: _exchange(arrays, x, out, group),
        "overlap": lambda x, out: _batch(arrays, x, out, group, arrays.compute),
        "barrier": lambda *_: dist.barrier(group=group),
    }
    return arrays.form(forms[case.verb])


def _batch(
    arrays: Arrays,
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup | None,
    meanwhile: Callable[[], None],
) -> None:
    batch = [dist.P2POp(dist.isend, x, arrays.neighbours[0], group)]
    batch.append(dist.P2POp(dist.irecv, out, arrays.neighbours[1], group))
    works = dist.batch_isend_irecv(batch)
    meanwhile()
    for work in works:
        work.wait()


def _exchange(
    arrays: Arrays, x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    following, previous = arrays.neighbours
    if x.is_cuda:  # NCCL needs both in one batch
        _batch(arrays, x, out, group, lambda: None)
        return
    sent: Any = dist.isend(x, following, group=group)
    dist.recv(out, previous, group=group)
    sent.wait()


def direct(arrays: Arrays) -> Call:
    """The operation as a call of pycomm's own, on its default group."""
    import pycomm

    case, root, (following, previous) = arrays.case, arrays.case.root, arrays.neighbours
    op: Any = case.redop
    rows, at_root = arrays.rows, arrays.is_root

    def exchange(x: torch.Tensor, out: torch.Tensor) -> None:
        sent = pycomm.send(x, following, async_op=True)
        pycomm.recv(out, previous)
        sent.wait()

    def overlap(x: torch.Tensor, out: torch.Tensor) -> None:
        works: list[pycomm.Work] = [
            pycomm.send(x, following, async_op=True),
            pycomm.recv(out, previous, async_op=True),
        ]
        arrays.compute()
        for work in works:
            work.wait()

    views: dict[int, torch.Tensor] = {}

    def whole(x: torch.Tensor) -> torch.Tensor:
        """Made once: torch takes longer for a view than the core for a small call."""
        if id(x) not in views:
            views[id(x)] = x.view(case.size, -1)
        return views[id(x)]

    if case.verb.startswith("p2p_"):
        return point_to_point(
            arrays,
            lambda x, peer: pycomm.send(x, peer, async_op=True),
            lambda x, peer: pycomm.recv(x, peer, async_op=True),
        )
    forms: dict[str, Form] = {
        "all_reduce": lambda x, _: pycomm.all_reduce(x, op),
        "reduce": lambda x, _: pycomm.reduce(x, root, op),
        "broadcast": lambda x, _: pycomm.broadcast(x, root),
        "all_gather": lambda x, out: pycomm.all_gather(x, out=whole(out)),
        "all_gather_v": lambda x, out: pycomm.all_gather_v(x, out=rows(out)),
        "gather": lambda x, out: pycomm.gather(x, root, out=whole(out) if at_root else None),
        "reduce_scatter": lambda x, out: pycomm.reduce_scatter(whole(x), op, out=out),
        "scatter": lambda x, out: pycomm.scatter(whole(x), root, out=out),
        "all_to_all": lambda x, out: pycomm.all_to_all(whole(x), out=whole(out)),
        "send_recv": exchange,
        "overlap": overlap,
        "barrier": lambda *_: pycomm.barrier(),
    }
    return arrays.form(forms[case.verb])
