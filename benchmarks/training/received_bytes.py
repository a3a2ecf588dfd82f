"""`python -m benchmarks wire RESIDUALS`: bytes that DGC receives, counted with the real codec.

A simulation for any number of ranks; only the last part uses processes and sockets. Each rank has a
wider copy of the recorded model (`python -m benchmarks residuals`): every parameter is repeated to
reach `--elements`, and each repetition is a window of one worker. So a rank selects elements that
real training selects, and frequently selected parameters stay together. There are 144 windows and
as many different ranks; with more ranks each window is used several times.

    ramp      the levels of a warm-up as exchange="auto" codes them, beside a ring of bfloat16
    ranks     bytes that a rank receives with gather and sharded, and the busiest owner of all, by
              the shares of sharded and by plain ranges
    counted   the counters of real ranks, processes of this machine, beside the estimate of "auto"

Owners 0 to 3 really sum and select; k->4k is an owner that forwards four times as many, which DGC
does not offer. Four frames of each other rank and their lengths are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from benchmarks.support import command
from benchmarks.training import received_bytes_ranks
from pycomm import kernels
from pycomm._command_line import numbers
from pycomm.bench.kernels import residuals
from pycomm.bench.support import plots
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.compress.bucket import Pair
from pycomm.compress.packet_exchange import decode, encode
from pycomm.compress.schedule import code_at
from pycomm.compress.sharded import Sharding
from pycomm.kernels import PacketBatch

SPARSITY = 0.999  # after a warm-up of these levels
RAMP = (0.75, 0.9375, 0.984375, 0.996, SPARSITY)
SAMPLED = 4  # owners that sum
MESSAGES = 4 * 32 + 2 * 4  # of each other rank: frames of lengths and packets, to owners and back
PAIR = 8  # bytes of (int32, float32)
WAYS = {"gather": "gather", "sharded": "sharded, k->k", "sharded4": "sharded, k->4k"}
OWNERS = {"busiest": "blocks, rows turned", "busiest_range": "plain ranges"}

Array = Any  # of NumPy


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
    counts: dict[str, Any] = {"elements": (3 * 10**8, "")}
    counts["counted"] = 1 << 23, "elements of real ranks"
    parser = command.parser("wire", __doc__, **counts)
    parser.add_argument("residuals", type=Path, help="of `python -m benchmarks residuals`")
    whole = numbers(int, lambda n: n > 0, "above 0")
    usual = "8,16,64,128,256,1024"
    parser.add_argument("--ranks", type=whole, default=usual, help="(%(default)s)")
    usual = "2,4,8,16"
    parser.add_argument("--processes", type=whole, default=usual, help="that count (%(default)s)")
    options = parser.parse_args(argv)
    found = residuals.load(options.residuals)
    ramp = []
    for sparsity in command.progress(RAMP, "levels"):
        code = code_at("2bit", 1 - sparsity)
        sets = Sets(found, sparsity, min(options.elements, 10**7))
        level = {"sparsity": sparsity, "values": code}
        ramp.append(level | {"of_ring": of_ring(sets.of(0), sets, code)})
    sets = Sets(found, SPARSITY, options.elements)
    ranks = [received(sets, size) for size in command.progress(options.ranks, "numbers of ranks")]
    real = [(way, size) for size in options.processes for way in ("gather", "sharded")]
    counted = [
        received_bytes_ranks.counted(*one, options.counted)
        for one in command.progress(real, "processes")
    ]
    settings = command.chosen(options, "elements", "counted") | {"residuals": found.digest}
    content = {"ramp": ramp, "ranks": ranks, "counted": counted}
    command.report(options.json, settings=settings, **content)
    return 0


def of_ring(pair: Pair, sets: Sets, code: str) -> float:
    """A packet's bytes over those of all elements in bfloat16. Both go 2 (N - 1) / N times: so does
    a ring, so does sharded, and of 2 ranks gather."""
    return float(_bytes(pair, sets.count, code) / (2 * sets.count))


def _bytes(pair: Pair, count: int, code: str) -> int:
    """Of a packet."""
    return sum(encode(PacketBatch(*pair, [len(pair[0])]), [count], code).sizes)


def received(sets: Sets, size: int) -> dict[str, Any]:
    """Counts the bytes that a rank receives in a step, of one number of ranks. Ranks that are
    copies of another are coded once."""
    code, share = "2bit", Sharding([sets.count], size)
    copies = Counter(rank % sets.different for rank in range(size))
    owners = min(SAMPLED, size)
    loads, ranges = np.zeros(size), np.zeros(size)
    totals = [torch.zeros(sum(share.places)) for _ in range(owners)]
    whole = to_owners = k = 0
    for rank, times in copies.items():
        indices, values = sets.of(rank)
        k = len(indices)
        whole += times * _bytes((indices, values), sets.count, code)
        cut, _ = share.cut(indices, values)
        loads += times * np.array(cut.lengths)
        reach = -(-sets.count // size)
        ranges += times * np.bincount(indices.numpy() // reach, minlength=size)
        some = sum(cut.lengths[:owners])
        first = PacketBatch(cut.indices[:some], cut.values[:some], cut.lengths[:owners])
        packets = encode(first, share.places, code)
        to_owners += sum(
            (times - (owner == rank)) * nbytes for owner, nbytes in enumerate(packets.sizes)
        )
        decoded = decode(packets, share.places, indices.device)
        parts = (
            torch.split(part, list(first.lengths)) for part in (decoded.indices, decoded.values)
        )
        for total, places, arrived in zip(totals, *parts, strict=True):
            total[places.long()] += times * arrived
    answers = [
        sum(len(_answer(total, factor * k, size, code)) for total in totals) / owners
        for factor in (1, 4)
    ]
    sharded, sharded4 = (
        round(to_owners / owners + (size - 1) * (answer + MESSAGES)) for answer in answers
    )
    pairs = (size - 1) * k * PAIR
    return {
        "sparsity": SPARSITY,
        "values": code,
        "size": size,
        "gather": round((size - 1) * (whole / size + MESSAGES / 2)),
        "sharded": sharded,  # k->k
        "sharded4": sharded4,  # k->4k
        "per_element": sharded / sets.count,  # of the gradient's
        "fewer": pairs / sharded,  # times fewer than an all-gather of PAIRs
        "fewer4": pairs / sharded4,
        "busiest": float(loads.max() / loads.mean()),  # owner, over the mean: by shares
        "busiest_range": float(ranges.max() / ranges.mean()),  # by plain ranges
    }


def _answer(total: torch.Tensor, k: int, size: int, code: str) -> torch.Tensor:
    """The elements that an owner forwards, as sharded.py selects them."""
    places, values = kernels.topk(total, min(-(-k // size), len(total)))
    some = values != 0
    return encode(
        PacketBatch(places[some], values[some], [int(some.sum())]), [len(total)], code
    ).message


def draw(path: Path, ranks: Sequence[dict[str, Any]], elements: int) -> None:
    """A panel of bytes, and one of the busiest owner."""
    sizes = [row["size"] for row in ranks]

    def over_ranks(axes: Axes, fields: dict[str, str]) -> None:
        for (field, label), dashes in zip(fields.items(), ("-", "--", ":"), strict=False):
            scale = 1.0 if field.startswith("busiest") else 1e6
            style = plots.style("dgc") | {"label": label, "ls": dashes}
            axes.plot(sizes, [row[field] / scale for row in ranks], marker="o", ms=3, **style)
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axes.minorticks_off()
        axes.grid()
        plots.label_lines(axes)

    def received_by(axes: Axes) -> None:
        ring = [2 * (size - 1) / size * 2 * elements / 1e6 for size in sizes]
        axes.plot(sizes, ring, label="dense ring, bfloat16", **plots.LIMIT)
        axes.set(ylabel="MB")
        over_ranks(axes, WAYS)

    def busiest(axes: Axes) -> None:
        axes.set(ylabel="of the mean")
        over_ranks(axes, OWNERS)

    panels = {f"received by a rank, sparsity {SPARSITY}": received_by}
    panels["elements of the busiest owner"] = busiest
    first, last = ranks[0], ranks[-1]
    more, times = last["sharded"] / first["sharded"], last["gather"] / first["gather"]
    title = (
        f"From {first['size']} to {last['size']} ranks, a rank receives {more:.2g} times as many "
    )
    title += f"bytes with sharded, {times:.3g} times with gather"
    caption = f"{elements / 1e6:.0f} M elements, index sets of a real training, 2-bit values"
    plots.save(path, panels, title, caption, 2.4)
