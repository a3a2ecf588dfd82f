"""`python -m benchmarks wire RESIDUALS`: bytes that DGC receives, counted with the real codec.

A simulation for any number of ranks; only the last part uses processes and sockets. Each rank has a
wider copy of the recorded model (`python -m benchmarks residuals`): every parameter is repeated to
reach `--elements`, and each repetition is a window of one worker. So a rank selects elements that
real training selects, and frequently selected parameters stay together. There are 144 windows and
as many different ranks; with more ranks each window is used several times.

    packets   compact packets of one rank, beside the entropy of a uniform choice
    ramp      the levels of a warm-up as exchange="auto" codes them, beside a ring of bfloat16
    ranks     bytes that a rank receives with gather and sharded, and the busiest owner of all, by
              the shares of sharded and by plain ranges
    counted   the counters of real ranks, processes of this machine, beside the estimate of "auto"

Owners 0 to 3 really sum and select; k->4k is an owner that forwards four times as many, which DGC
does not offer. Four frames of each other rank and their lengths are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.codec import entropy_bits
from benchmarks.support import command
from benchmarks.training import received_bytes_plot, received_bytes_ranks
from pycomm import kernels
from pycomm.bench.kernels import residuals
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.compress.bucket import Pair
from pycomm.compress.packet_codec import decode, encode
from pycomm.compress.schedule import code_at
from pycomm.compress.sharded import Sharding
from pycomm.kernels import PacketBatch

RAMP = (0.75, 0.9375, 0.984375, 0.996, 0.999)
SAMPLED = 4  # owners that sum
MESSAGES = 4 * 32 + 2 * 4  # of each other rank: frames of lengths and packets, to owners and back
PAIR = 8  # bytes of (int32, float32)

Array = Any  # of NumPy


@dataclass(frozen=True)
class Packets:
    """Of one rank's compact packet."""

    sparsity: float
    values: str
    k: int
    bytes_each: float
    index_bits: float
    over_entropy: float  # of a uniform choice


@dataclass(frozen=True)
class Ranks:
    """Of one number of ranks at one density; bytes are those that a rank receives in a step."""

    sparsity: float
    values: str
    size: int
    gather: int
    sharded: int  # k->k
    sharded4: int  # k->4k
    per_element: float  # sharded, of the gradient's
    fewer: float  # times fewer than an all-gather of PAIRs: sharded
    fewer4: float
    busiest: float  # owner, over the mean: by shares
    busiest_range: float  # by plain ranges


class Sets:
    """The selections of ranks at one density, in a model `wide` times as wide.

    Attributes:
        count: elements of the wide model.
    """

    def __init__(self, found: residuals.Residuals, sparsity: float, elements: int) -> None:
        windows, small = found.v.shape
        self._windows, self._small = windows, small
        self._wide = max(1, round(elements / small))
        self.count = self._wide * small
        sizes = [p.numel() for p in CharGPT(Shape(width=64, layers=2)).parameters()]
        assert sum(sizes) == small, "residuals of another model"
        self._sizes = np.array(sizes)
        self._ends = np.cumsum(sizes)
        k = max(1, round(small * (1 - sparsity)))
        self._taken = [_taken(found, window, k) for window in range(windows)]

    def of(self, rank: int) -> Pair:
        """Indices int32 [k], ascending, and values of a rank."""
        worker, turn = rank % residuals.WORKERS, rank // residuals.WORKERS
        turns = self._windows // residuals.WORKERS
        indices, values = [], []
        for piece in range(self._wide):
            window = worker + residuals.WORKERS * ((piece + turn) % turns)
            own, numbers = self._taken[window]
            part = np.searchsorted(self._ends, own, side="right")
            begin = self._ends[part] - self._sizes[part]
            indices.append(begin * (self._wide - 1) + piece * self._sizes[part] + own)
            values.append(numbers)
        together = np.concatenate(indices).astype(np.int32)
        order = np.argsort(together, kind="stable")
        return torch.from_numpy(together[order]), torch.from_numpy(np.concatenate(values)[order])

    @property
    def different(self) -> int:
        """Ranks that are not copies of another."""
        return int(self._windows)


def _taken(found: residuals.Residuals, window: int, k: int) -> tuple[Array, Array]:
    """The selection of a DGC step from a window at this density."""
    u, v = found.u[window].copy(), found.v[window].copy()
    indices, values = np.empty(k, np.int32), np.empty(k, np.float32)
    g = found.gradients[0, window]
    kernels.dgc_step(g, u, v, k, momentum=residuals.MOMENTUM, indices=indices, values=values)
    return indices.astype(np.int64), values


def main(argv: Sequence[str]) -> int:
    """Counts, prints, stores; returns the exit status."""
    parser = command.parser("wire", __doc__, plot="bytes over ranks")
    parser.add_argument("residuals", type=Path, help="of `python -m benchmarks residuals`")
    parser.add_argument("--elements", type=int, default=3 * 10**8, help="(%(default)s)")
    parser.add_argument("--ranks", default="8,16,64,128,256,1024", help="(%(default)s)")
    parser.add_argument("--processes", default="2,4,8,16", help="that count (%(default)s)")
    parser.add_argument("--counted", type=int, default=1 << 23, help="elements (%(default)s)")
    parser.add_argument("--sparsities", default="0.999", help="for --ranks (%(default)s)")
    options = parser.parse_args(argv)
    sizes = [int(word) for word in options.ranks.split(",")]
    sparsities = [float(word) for word in options.sparsities.split(",")]
    found = residuals.load(options.residuals)
    with command.bar() as bar:
        cases = sum(min(size, found.v.shape[0]) for size in sizes) * len(sparsities)
        real = [int(word) for word in options.processes.split(",")]
        task = bar.add_task("packets", total=cases + len(RAMP) + 2 * len(real))
        packets, ramp = [], []
        for sparsity in RAMP:
            sets = Sets(found, sparsity, min(options.elements, 10**7))
            pair = sets.of(0)
            codes = ["2bit", "1bit"] if sparsity != RAMP[0] else ["1bit"]
            packets += [packets_of(sparsity, pair, sets.count, code) for code in codes]
            code = code_at("2bit", 1 - sparsity)
            ramp.append(
                {"sparsity": sparsity, "values": code, "of_ring": of_ring(pair, sets, code)}
            )
            bar.advance(task)
        sets = Sets(found, 0.99, min(options.elements, 10**7))
        packets.append(packets_of(0.99, sets.of(0), sets.count, "2bit"))
        ranks = []
        for sparsity in sparsities:
            sets = Sets(found, sparsity, options.elements)
            for size in sizes:
                bar.update(task, description=f"{size} ranks")
                ranks.append(received(sparsity, sets, size, lambda: bar.advance(task)))
        counted = []
        for size in real:
            bar.update(task, description=f"{size} processes")
            for exchange in ("gather", "sharded"):
                counted.append(received_bytes_ranks.counted(exchange, size, options.counted))
                bar.advance(task)
    by_size = [asdict(one) for one in ranks]
    command.report(
        options.json,
        settings={name: getattr(options, name) for name in ("elements", "counted")}
        | {"residuals": found.digest},
        packets=[asdict(one) for one in packets],
        ramp=ramp,
        ranks=by_size,
        counted=[asdict(one) for one in counted],
    )
    if options.plot:
        received_bytes_plot.draw(options.plot, by_size, options.elements)
    return 0


def packets_of(sparsity: float, pair: Pair, count: int, code: str) -> Packets:
    """One packet of a whole rank; its index bits are what values and their heads leave."""
    k = len(pair[0])
    whole = _bytes(pair, count, code)
    listed = len(kernels.encode(*pair, count, code, codec="list")) - 4 * k
    bits = 8 * (whole - listed) / k
    return Packets(sparsity, code, k, whole / k, bits, bits / entropy_bits(count, k))


def of_ring(pair: Pair, sets: Sets, code: str) -> float:
    """A packet's bytes over those of all elements in bfloat16. Both go 2 (N - 1) / N times: so does
    a ring, so does sharded, and of 2 ranks gather."""
    return float(_bytes(pair, sets.count, code) / (2 * sets.count))


def _bytes(pair: Pair, count: int, code: str) -> int:
    """Of a packet."""
    return sum(encode(PacketBatch(*pair, [len(pair[0])]), count, code)[1])


def received(sparsity: float, sets: Sets, size: int, advance: Callable[[], object]) -> Ranks:
    """Counts one number of ranks. Ranks that are copies of another are coded once."""
    code, share = "2bit", Sharding(sets.count, size)
    copies = Counter(rank % sets.different for rank in range(size))
    owners = min(SAMPLED, size)
    loads, ranges = np.zeros(size), np.zeros(size)
    totals = [torch.zeros(share.places) for _ in range(owners)]
    whole = to_owners = k = 0
    for rank, times in copies.items():
        indices, values = sets.of(rank)
        k = len(indices)
        whole += times * _bytes((indices, values), sets.count, code)
        cut = share.cut(indices, values)
        loads += times * np.array(cut.lengths)
        reach = -(-sets.count // size)
        ranges += times * np.bincount(indices.numpy() // reach, minlength=size)
        some = sum(cut.lengths[:owners])
        first = PacketBatch(cut.indices[:some], cut.values[:some], cut.lengths[:owners])
        packets = encode(first, share.places, code)
        to_owners += sum(
            (times - (owner == rank)) * nbytes for owner, nbytes in enumerate(packets[1])
        )
        decoded = decode(packets, share.places, indices.device)
        parts = (
            torch.split(part, list(first.lengths)) for part in (decoded.indices, decoded.values)
        )
        for total, places, arrived in zip(totals, *parts, strict=True):
            total[places.long()] += times * arrived
        advance()
    answers = [
        sum(len(_answer(total, factor * k, size, code)) for total in totals) / owners
        for factor in (1, 4)
    ]
    sharded, sharded4 = (
        round(to_owners / owners + (size - 1) * (answer + MESSAGES)) for answer in answers
    )
    pairs = (size - 1) * k * PAIR
    return Ranks(
        sparsity=sparsity,
        values=code,
        size=size,
        gather=round((size - 1) * (whole / size + MESSAGES / 2)),
        sharded=sharded,
        sharded4=sharded4,
        per_element=sharded / sets.count,
        fewer=pairs / sharded,
        fewer4=pairs / sharded4,
        busiest=float(loads.max() / loads.mean()),
        busiest_range=float(ranges.max() / ranges.mean()),
    )


def _answer(total: torch.Tensor, k: int, size: int, code: str) -> torch.Tensor:
    """The elements that an owner forwards, as sharded.py selects them."""
    places, values = kernels.topk(total, min(-(-k // size), len(total)))
    some = values != 0
    return encode(PacketBatch(places[some], values[some], [int(some.sum())]), len(total), code)[0]
