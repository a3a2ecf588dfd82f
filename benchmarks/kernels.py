"""`python -m benchmarks kernels`: the kernels of sparse training, beside torch and the limit.

The data are those of residuals.py. Each case is checked against pycomm.reference, bit by bit; then
all take their turns, round by round, with the compiled loops of csrc/kernels/stream.h among them,
which only move memory and give the limit. Ends with 1 when a bit was wrong or somebody beat it.
The limit of a kernel is the longest of three times: for the bytes that it reads, at the fastest
that any loop read; for those that it writes, at the fastest that any wrote; and for all of them, at
the rate of the best of copying and of 3 reads and 2 writes, also of reading where twice as much is
read as written, and of filling where it is the other way about.

    dgc_step       20 bytes an element
    topk           4 bytes, read
    decode_update  the packets, and each cache line that they touch read and written; through
                   p.grad, 4 bytes more an element to clear it and 12 for SGD
    DGC            a step of pycomm.DGC on one rank, with the optimizer's: 20 bytes with fused=True,
                   36 through p.grad
    the others     as alone.py counts them

main() is called by benchmarks.__main__ and pycomm.__main__.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import pycomm
from benchmarks import alone, residuals
from benchmarks.alone import OURS, Call, Contest, Traffic, touched
from benchmarks.composed import COMPOSED, Tensors
from benchmarks.limits import TOLERANCE
from benchmarks.residuals import MOMENTUM, SPARSITY, STEPS, WORKERS, Residuals
from benchmarks.sizes import format_size
from pycomm import _core, kernels, reference
from pycomm.demo import machine

SIZES = (2**18, 2**20, 2**22, 2**24)
REST_S = 0.005
"""Between two calls: the threads of torch's operations look for work for a while after each, on the
processors that the next contestant needs."""
STREAMS = {
    "step": Traffic(12, 8),
    "copy": Traffic(4, 4),
    "copy around": Traffic(4, 4),
    "torch's copy": Traffic(4, 4),
    "read": Traffic(4, 0),
    "fill": Traffic(0, 4),
}
"""Bytes that each loop moves for an element."""
Array = Any  # of NumPy


@dataclass(frozen=True)
class Row:
    """One contestant in one case."""

    kernel: str
    count: int
    peer: str
    time_ms: float  # median over rounds
    best_ms: float
    limit_bytes: float  # that must be read and written
    limit_ms: float
    limit_percent: float
    ratio: float  # times faster is pycomm
    step_percent: float  # of the time of pycomm's dgc_step


class Case:
    """Windows of the recording laid end to end, and everybody's own u and v."""

    def __init__(self, recorded: Residuals, count: int) -> None:
        windows = max(1, min(len(recorded.u), round(count / recorded.u.shape[1])))
        self.start = [
            np.ascontiguousarray(x[:windows].reshape(-1)) for x in (recorded.u, recorded.v)
        ]
        self.gradients = [np.ascontiguousarray(g[:windows].reshape(-1)) for g in recorded.gradients]
        self.count = self.start[0].size
        self.k = max(1, round(self.count * (1 - SPARSITY)))
        self.packets = [self._packet(recorded, windows, worker) for worker in range(WORKERS)]
        n, lines = self.count, touched(self.packets)
        packets = 8 * sum(indices.size for indices, _ in self.packets)
        self.traffic = {
            "dgc_step": Traffic(12 * n, 8 * n),
            "topk": Traffic(4 * n, 8 * self.k),
            "decode_update": Traffic(packets + lines, lines),
            "decode_update/through p.grad": Traffic(packets + lines + 8 * n, lines + 8 * n),
            "DGC": Traffic(12 * n, 8 * n),
            "DGC/through p.grad": Traffic(20 * n, 16 * n),
        }

    def _packet(self, recorded: Residuals, windows: int, worker: int) -> tuple[Array, Array]:
        """What the next worker but `worker` sent in the same window, for each of them."""
        length = recorded.u.shape[1]
        parts = [
            recorded.packets[0][w // WORKERS * WORKERS + (w + worker) % WORKERS] + w * length
            for w in range(windows)
        ]
        indices = np.concatenate(parts).astype(np.int32)
        return indices, np.full(indices.size, 1e-3, np.float32)

    def mine(self) -> list[Array]:
        """u and v, to be changed."""
        return [x.copy() for x in self.start]

    def restart(self, u: Array, v: Array) -> None:
        """Both as recorded."""
        np.copyto(u, self.start[0])
        np.copyto(v, self.start[1])


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm bench kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--residuals", type=Path, help="of `python -m benchmarks residuals`; else made first"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of 5 steps each (%(default)s)")
    parser.add_argument("--sizes", type=_numbers, default=list(SIZES), help="elements, with commas")
    parser.add_argument("--peers", default=",".join(COMPOSED), help="of dgc_step (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="where to store all figures")
    parser.add_argument("--plot", type=Path, help="where to draw the fraction of the limit")
    options = parser.parse_args(argv)
    peers = [name for name in options.peers.split(",") if name]
    if unknown := [name for name in peers if name not in COMPOSED]:
        parser.error(f"{unknown[0]!r} is not among {', '.join(COMPOSED)}")
    recorded = residuals.load(options.residuals) if options.residuals else residuals.record()
    torch.set_num_threads(options.threads)
    pycomm.set_num_threads(options.threads)
    pycomm.init()  # DGC's group: this process alone
    print(f"# {recorded.u.size} elements recorded, SHA-256 {recorded.digest}\n{HEADER}")
    rows: list[Row] = []
    for size in options.sizes:
        case = Case(recorded, size)
        contests = alone.contests(case.start[1], case.packets, case.gradients)
        if said := wrong(case) or next(filter(None, map(alone.wrong, contests)), ""):
            print(f"{case.count} elements: {said}")
            return 1
        new = measured(case, options.rounds, peers, contests)
        rows += new
        print("\n".join(text(row) for row in new), flush=True)
    settings = {"threads": options.threads, "rounds": options.rounds, "residuals": recorded.digest}
    _store(rows, settings, options.json, options.plot)
    fast = [r for r in rows if r.limit_percent > 100 * TOLERANCE]
    for row in fast:
        said = f"{row.peer}: {row.kernel} of {row.count} runs at {row.limit_percent:.0f} %"
        print(f"{said}: the limit is wrong")
    return 1 if fast else 0


def wrong(case: Case) -> str:
    """A sentence where a kernel and the reference differ in a bit, else ""."""
    u, v = case.mine()
    wanted = reference.dgc_step(case.gradients[0], u, v, case.k, momentum=MOMENTUM)
    found = kernels.dgc_step(case.gradients[0], u, v, case.k, momentum=MOMENTUM)
    pairs = list(zip((u, v, *found), wanted, strict=False))
    pairs += list(zip(kernels.topk(v, case.k), reference.topk(v, case.k), strict=True))
    param = kernels.decode_update(case.start[0].copy(), case.packets, 0.1, 1 / WORKERS)
    pairs.append((param, reference.decode_update(case.start[0], case.packets, 0.1, 1 / WORKERS)))
    same = all(a.tobytes() == b.tobytes() for a, b in pairs)
    return "" if same else "a kernel and the reference differ"


def measured(
    case: Case, rounds: int, peers: Sequence[str], contests: Sequence[Contest]
) -> list[Row]:
    """All contestants in turn; each round goes through the recorded steps once, the first of which,
    after the way back to the recorded state, is not timed."""
    calls, restarts = _contestants(case, peers)
    calls = _between(calls, contests)
    restarts += [contest.restart for contest in contests]
    traffic = case.traffic | {contest.kernel: contest.traffic for contest in contests}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for restart in restarts:
            restart()
        for step in range(STEPS):
            for name, call in calls.items():
                time.sleep(REST_S)  # so that nobody pays for the last one's threads
                begin = time.perf_counter()
                call(step)
                if step:
                    seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    speeds = {
        name: Traffic(*(each * case.count / medians[name] for each in moved))
        for name, moved in STREAMS.items()
    }
    rows = []
    for name in calls.keys() - STREAMS.keys():
        kernel, peer = name.split("/")
        ours = medians[f"{kernel}/{OURS}"]
        moved = traffic.get(name, traffic[kernel])
        limit = _limit(speeds, moved)
        rows.append(
            Row(
                kernel=kernel,
                count=case.count,
                peer=peer,
                time_ms=medians[name] * 1e3,
                best_ms=min(seconds[name]) * 1e3,
                limit_bytes=sum(moved),
                limit_ms=limit * 1e3,
                limit_percent=100 * limit / medians[name],
                ratio=medians[name] / ours,
                step_percent=100 * medians[name] / medians[f"dgc_step/{OURS}"],
            )
        )
    return sorted(rows, key=lambda r: (r.kernel, r.ratio))


def _limit(speeds: dict[str, Traffic], moved: Traffic) -> float:
    """Seconds below which nobody moves that; of each loop, the bytes that it read and wrote in a
    second."""
    others = {"read": moved.read >= 2 * moved.written, "fill": moved.written >= 2 * moved.read}
    mixed = max(sum(speed) for name, speed in speeds.items() if others.get(name, True))
    read = max(speed.read for speed in speeds.values())
    written = max(speed.written for speed in speeds.values())
    return max(sum(moved) / mixed, moved.read / read, moved.written / written)


def _between(calls: dict[str, Call], contests: Sequence[Contest]) -> dict[str, Call]:
    """With those of the contests: pycomm's first and the others last, so that what one of them has
    read or written has left the caches before another one of its contest comes."""
    alone = [[(f"{c.kernel}/{peer}", call) for peer, call in c.calls.items()] for c in contests]
    first, *others = (filter(None, turn) for turn in zip_longest(*alone))
    return dict(first) | calls | dict(chain(*others))


def _contestants(
    case: Case, peers: Sequence[str]
) -> tuple[dict[str, Call], list[Callable[[], None]]]:
    """Calls by "kernel/peer", each given the number of the step; and what begins a round."""
    gradients = [torch.from_numpy(g) for g in case.gradients]
    target = torch.zeros(case.count)
    # Before the DGC that writes its result there.
    calls: dict[str, Call] = {"torch's copy": lambda i: target.copy_(gradients[i])}
    restarts: list[Callable[[], None]] = []
    for peer, given in ((OURS, gradients), ("through p.grad", [target] * len(gradients))):
        calls[f"DGC/{peer}"], restart = _whole_step(case, given, fused=peer == OURS)
        restarts.append(restart)
    u, v = case.mine()
    room, k = kernels.dgc_workspace(u, v, case.k), case.k
    indices, values = np.empty(k, np.int32), np.empty(k, np.float32)

    def step(i: int) -> object:
        return kernels.dgc_step(
            case.gradients[i],
            u,
            v,
            k,
            momentum=MOMENTUM,
            indices=indices,
            values=values,
            workspace=room,
        )

    calls[f"dgc_step/{OURS}"] = step
    restarts.append(lambda: case.restart(u, v))
    for name in peers:
        call, restart = _composed(case, name, gradients)
        calls[f"dgc_step/{name}"] = call
        restarts.append(restart)
    x = case.start[1]
    other = torch.from_numpy(x)
    selecting = kernels.topk_workspace(x, k)
    calls[f"topk/{OURS}"] = lambda i: kernels.topk(
        x, k, indices=indices, values=values, workspace=selecting
    )
    calls["topk/torch.topk"] = lambda i: other.abs().topk(k, sorted=False)
    param, dense = case.start[0].copy(), torch.zeros(case.count)
    weights = torch.from_numpy(param)
    calls[f"decode_update/{OURS}"] = lambda i: kernels.decode_update(
        param, case.packets, 0.1, 1 / WORKERS
    )

    def through_grad(i: int) -> object:
        kernels.decode_sum(dense, case.packets, 1 / WORKERS)
        return weights.add_(dense, alpha=-0.1)

    calls["decode_update/through p.grad"] = through_grad
    return calls | _streams(case), restarts


def _streams(case: Case) -> dict[str, Call]:
    """Each in arrays of its own, which like everybody's have left the caches between two calls."""
    n = case.count
    own = np.ones((8, n), np.float32)
    grad, u, v, *pairs, read = (int(row.ctypes.data) for row in own)

    def step(_: int, _own: Array = own) -> None:  # which keeps the arrays
        _core.stream_step(grad, u, v, n)

    filled = torch.empty(n)
    return {
        "fill": lambda _: filled.zero_(),
        "step": step,
        "copy": lambda _: _core.stream_copy(pairs[0], pairs[1], n, False),
        "copy around": lambda _: _core.stream_copy(pairs[2], pairs[3], n, True),
        "read": lambda _: _core.stream_read(read, n),
    }


def _whole_step(
    case: Case, gradients: Sequence[torch.Tensor], fused: bool
) -> tuple[Call, Callable[[], None]]:
    """A step of DGC from the last gradient on, as a DataParallel goes through it."""
    parameter = torch.nn.Parameter(torch.from_numpy(case.start[0].copy()))
    optimizer = torch.optim.SGD([parameter], lr=1e-3, momentum=MOMENTUM)
    dgc = pycomm.DGC(optimizer, sparsity=[SPARSITY], min_count=1, fused=fused)
    memory = dgc.memories[parameter]

    def step(i: int) -> None:
        parameter.grad = gradients[i]
        dgc.buckets.add(gradients[i], [parameter], [gradients[i]])
        dgc.buckets.finish()
        optimizer.step()

    def restart() -> None:
        assert memory.v is not None
        case.restart(memory.u.numpy(), memory.v.numpy())

    return step, restart


def _composed(
    case: Case, name: str, gradients: list[torch.Tensor]
) -> tuple[Call, Callable[[], None]]:
    own = case.mine()
    tensors = Tensors(torch.from_numpy(own[0]), torch.from_numpy(own[1]), case.k, MOMENTUM)
    step = COMPOSED[name]
    return lambda i: step(tensors, gradients[i]), lambda: case.restart(*own)


HEADER = (
    f"{'# kernel':14} {'elements':>9} {'peer':>16} {'time (ms)':>10} {'% limit':>8} {'pycomm':>8} "
    f"{'% of a step':>12}"
)


def text(row: Row) -> str:
    """One line under HEADER."""
    return (
        f"{row.kernel:14} {format_size(row.count):>9} {row.peer:>16} {row.time_ms:>10.3f} "
        f"{row.limit_percent:>8.1f} {f'{row.ratio:.2f}x':>8} {row.step_percent:>12.1f}"
    )


def _store(
    rows: Sequence[Row], settings: dict[str, Any], json_to: Path | None, plot_to: Path | None
) -> None:
    where = machine.describe()
    if json_to:
        content = {"machine": where, "settings": settings, "rows": [asdict(r) for r in rows]}
        json_to.write_text(json.dumps(content, indent=1) + "\n")
    if plot_to:
        figure = _figure(rows, f"{where['cpu']}, {settings['threads']} threads, {where['date']}")
        figure.savefig(plot_to, dpi=150)


def _figure(rows: Sequence[Row], title: str) -> Figure:
    """The fraction of the limit over size, one panel for each kernel."""
    names = list(dict.fromkeys(r.kernel for r in rows))
    figure = Figure(figsize=(14, 2.8 * -(-len(names) // 4)), layout="constrained")
    panels = figure.subplots(-(-len(names) // 4), 4, sharex=True, squeeze=False).flat
    for axes, name in zip_longest(panels, names):
        if name is None:
            axes.set_visible(False)
            continue
        peers = {r.peer for r in rows if r.kernel == name}
        for peer in sorted(peers, key=lambda p: (p != OURS, p)):  # pycomm in one colour
            own = [r for r in rows if (r.kernel, r.peer) == (name, peer)]
            axes.plot(
                [r.count for r in own], [r.limit_percent for r in own], "o-", ms=3, label=peer
            )
        axes.set(xscale="log", ylim=(0, 105), title=name)
        axes.axhline(100, ls="--", lw=1, color="#d93025")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.supxlabel("elements")
    figure.supylabel("% of the memory's limit")
    figure.suptitle(title, fontsize=9)
    return figure


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
