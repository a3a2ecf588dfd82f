"""`python -m benchmarks convergence`: what each technique costs in accuracy and saves in bytes.

Simulated workers, ranks as threads, train the same model on the same batches by each method, with
pycomm.DGC, pycomm.LocalSGD and pycomm.DataParallel, so that a step has the bits of one between
processes. A run in --json is not repeated: a long series can be interrupted. Scores are compared
with expected_costs.py; the exit status is 1 if one is worse or replicas differ.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn

import pycomm
from benchmarks.support import command
from benchmarks.training.expected_costs import LIMITS, WANTED, disordered, judged
from benchmarks.training.methods import METHODS, Method
from benchmarks.training.soap import SOAP
from benchmarks.training.workloads import WORKLOADS, Workload, missing
from pycomm._tables import Table
from pycomm.bench.support import plots, summaries
from pycomm.compress.dgc import compressor_of
from pycomm.testing import run_ranks

MB = 2**20
DRAWN = ("dense", "dgc", "dgc without ramp", "top-k without feedback", "local 8", "dgc sharded")


@dataclass(frozen=True)
class Run:
    """One training."""

    workload: str
    method: str
    seed: int
    ranks: int
    steps: int
    score: float  # accuracy in per cent, or loss in nats
    sent_mb: float  # sent by each rank in all steps
    dense_mb: float
    seconds: float
    replicas_equal: bool
    losses: list[float]  # means of the parts of the run (summaries.ends), of rank 0's batches; of
    # seed 0, which is drawn, else []
    mb: list[float]  # sent so far, at the end of each part
    samples_per_s: float | None = None  # of all ranks: images or texts; None: not measured
    link_mbit: float | None = None  # of each rank, in Mbit/s; None: not limited


def main(argv: Sequence[str]) -> int:
    """Trains, prints, stores; returns the exit status."""
    counts: dict[str, Any] = {"ranks": (8, ""), "seeds": (3, "how many, from 0")}
    parser = command.parser("convergence", __doc__, **counts)
    sgd = [method.name for method in METHODS.values() if method.adaptive is None]
    command.add_names(parser, "workloads", WORKLOADS, ["images", "text"])
    command.add_names(parser, "methods", METHODS, sgd)
    parser.add_argument("--steps", type=int, help="instead of the workload's own")
    parser.add_argument("--link-mbit", type=float, help="limit each rank's link (not limited)")
    options = parser.parse_args(argv)
    for name in options.workloads:
        if why := missing(name):
            parser.error(why)
    found = _stored(options.json)
    cases = itertools.product(range(options.seeds), options.workloads, options.methods)
    for seed, name, method in cases:
        steps = options.steps or WORKLOADS[name].steps
        key = (name, method, seed, options.ranks, steps, options.link_mbit)
        if any(key == (r.workload, r.method, r.seed, r.ranks, r.steps, r.link_mbit) for r in found):
            continue
        workload = WORKLOADS[name]
        found.append(
            train(workload, METHODS[method], seed, options.ranks, steps, options.link_mbit)
        )
        command.CONSOLE.print(_said(found[-1]))
        summaries.store(options.json, rows=[asdict(run) for run in found])
    lines, good = summary(found)
    command.CONSOLE.print("\n".join(lines))
    return 0 if good else 1


def train(
    workload: Workload,
    method: Method,
    seed: int,
    ranks: int,
    steps: int,
    link_mbit: float | None = None,
) -> Run:
    """One run, on `ranks` threads."""
    models = [workload.model(seed) for _ in range(ranks)]  # here: threads share torch's generator
    x, _ = workload.batch(ranks, torch.Generator())  # reads the data, once for all threads
    start = time.perf_counter()
    names = workload.name, method.name
    gc.freeze()  # otherwise each collection scans all objects of torch
    link_bytes_per_s = None if link_mbit is None else link_mbit * 1e6 / 8
    options: dict[str, Any] = {"timeout_s": 600, "heartbeat_s": 600}
    options["link_bytes_per_s"] = link_bytes_per_s
    results = run_ranks(ranks, rank_runs, names, seed, steps, models, **options)
    gc.unfreeze()
    seconds = time.perf_counter() - start
    losses, sent, first = results[0]
    return Run(
        workload=workload.name,
        method=method.name,
        seed=seed,
        ranks=ranks,
        steps=steps,
        score=workload.score(models[0]),
        sent_mb=sent[-1] / MB,
        dense_mb=steps * first.nbytes / MB,
        seconds=seconds,
        replicas_equal=all(torch.equal(parameters, first) for _, _, parameters in results),
        losses=summaries.curve(losses) if seed == 0 else [],
        mb=[sent[end - 1] / MB for end in summaries.ends(steps)],
        samples_per_s=steps * ranks * len(x) / seconds,
        link_mbit=link_mbit,
    )


@dataclass(frozen=True)
class _Parallel:
    """A model made parallel by one method."""

    forward: nn.Module
    step: Callable[[torch.Tensor], object]  # after backward, with this rank's loss
    sent_bytes: Callable[[], int]  # bytes that this rank sent in the last step
    end: Callable[[], object] = lambda: None


def rank_runs(
    group: pycomm.Group,
    names: tuple[str, str],
    seed: int,
    steps: int,
    models: list[nn.Module],
) -> tuple[list[float], list[int], torch.Tensor]:
    """Trains one rank: losses of its batches, bytes sent so far, both by step; all parameters.

    `names` are those of the workload and the method, so that this can be sent to a process.
    """
    torch.set_num_threads(1)  # of the process; how a sum is split decides its bits
    workload, model = WORKLOADS[names[0]], models[group.rank]
    method = METHODS[names[1]]
    adaptive = method.adaptive
    optimizers = optimizers_of(model, workload, method)
    parallel = parallel_of(group, model, optimizers, workload, method, steps)
    random = torch.Generator().manual_seed(1000 * seed + group.rank)
    losses: list[float] = []
    sent: list[int] = []
    for step in range(steps):
        rate = (
            workload.rate_at(step, steps)
            if adaptive is None
            else adaptive.rate_at(workload.name, step, steps)
        )
        for parameters in [group for one in optimizers for group in one.param_groups]:
            parameters["lr"] = rate
        loss = workload.loss(parallel.forward, *workload.batch(group.size, random))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        parallel.step(loss.detach())
        losses.append(loss.item())
        sent.append(parallel.sent_bytes() + (sent[-1] if sent else 0))
    parallel.end()
    return losses, sent, nn.utils.parameters_to_vector(model.parameters()).detach()


def optimizers_of(
    model: nn.Module, workload: Workload, method: Method
) -> list[torch.optim.Optimizer]:
    """One optimizer; of Muon, the one of all other parameters first."""
    adaptive = method.adaptive
    if adaptive is None:
        decay = workload.weight_decay
        return [torch.optim.SGD(model.parameters(), 0.0, momentum=0.9, weight_decay=decay)]
    if adaptive.kind == "soap":
        return [SOAP(model.parameters(), adaptive.betas)]
    rest = dict(model.named_parameters())
    matrices: list[nn.Parameter] = []
    if adaptive.kind == "muon":
        inside = [name for name, p in rest.items() if p.ndim == 2 and name.startswith("blocks.")]
        matrices = [rest.pop(name) for name in inside]
    others = torch.optim.AdamW(rest.values(), 0.0, adaptive.betas, weight_decay=0.0)
    return [others, *([torch.optim.Muon(matrices, 0.0, weight_decay=0.0)] if matrices else [])]


def parallel_of(
    group: pycomm.Group,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    workload: Workload,
    method: Method,
    steps: int,
) -> _Parallel:
    whole = sum(p.nbytes for p in model.parameters())
    limit = workload.clip_norm
    optimizer, *muon = optimizers

    def clip() -> None:
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)

    if method.local is not None:
        chooses = "init_k_steps" in method.local
        kind: Any = pycomm.AdaptiveLocalSGD if chooses else pycomm.LocalSGD
        local = kind(model, optimizer, **method.local)

        def local_step(loss: torch.Tensor) -> None:
            clip()
            local.step(loss) if chooses else local.step()

        averaged = lambda: whole * (local.last_sync == local.step_count)  # noqa: E731 - read as one line
        return _Parallel(model, local_step, averaged, local.average)
    if method.adaptive is not None and method.adaptive.updates is not None:
        options = method.adaptive.updates | ({"muon": muon[0]} if muon else {})
        updates = pycomm.LocalSGD(model, optimizer, clip_norm=limit, **options)

        def sent_bytes() -> int:
            synced = updates.last_sync == updates.step_count
            return int(updates.stats()["sent_bytes"]) if synced else 0

        quantizes = isinstance(method.adaptive.updates["compression"], pycomm.Quantize)
        return _Parallel(
            model,
            lambda _: updates.step(),
            _written(group) if quantizes else sent_bytes,
            updates.average if updates.k_steps > 1 else lambda: None,
        )
    if method.dgc is None:
        quantize = None if method.adaptive is None else method.adaptive.gradients

        def dense_step(_: torch.Tensor) -> None:
            clip()
            for one in optimizers:
                one.step()

        if quantize is not None:
            gradients = pycomm.DataParallel(model, compression=quantize)
            return _Parallel(gradients, dense_step, _written(group))
        return _Parallel(pycomm.DataParallel(model), dense_step, lambda: whole)
    dgc = pycomm.DGC(
        optimizer,
        rampup_step=max(1, int(steps * method.ramp)),
        clip_norm=limit if method.clip else None,
        clip="global",
        select="model",
        min_count=0,
        **method.dgc,
    )

    def sparse_step(_: torch.Tensor) -> None:
        optimizer.step()
        for memory in () if method.feedback else compressor_of(dgc).state.memories.values():
            if memory.v is not None:
                memory.v.zero_()

    parallel = pycomm.DataParallel(model, compression=dgc)
    return _Parallel(parallel, sparse_step, lambda: int(dgc.stats()["sent_bytes"]))


def _written(group: pycomm.Group) -> Callable[[], int]:
    """Counts the bytes that this rank wrote since the last call, of an all-reduce in two phases.

    A dense ring writes 2 (N - 1) / N times the array; the result is relative to that.
    """
    before = [group.stats().bytes_written]

    def count() -> int:
        before.append(group.stats().bytes_written)
        return int((before[-1] - before[-2]) * group.size / (2 * (group.size - 1)) + 0.5)

    return count


def _said(run: Run) -> str:
    return (
        f"{run.workload} {run.method}, seed {run.seed}: {run.score:.3f}, "
        f"{run.dense_mb / run.sent_mb:.0f}x fewer bytes, {run.seconds:.0f} s, "
        f"{run.samples_per_s or math.nan:,.0f} samples/s"
    )


def summary(found: Sequence[Run]) -> tuple[list[str], bool]:
    """The lines of a table, mean and deviation over seeds, and whether all results are as expected.

    "cost": of accuracy in points or of loss in nats, against dense with the same seeds. "bytes":
    times fewer than dense in the whole run; "later": in its second half, after the warm-up. Bands
    hold for runs of the workload's own length with 8 ranks.
    """
    scores = {"# workload": "", "method": "<42", "runs": ">", "score": "7.3f", "+-": "6.3f"}
    bands = {"cost": ">7", "wanted": ">7", "within": ">", "verdict": ""}
    table = Table(scores | bands | {"bytes": ">7", "later": ">7", "replicas": ""})
    wrong, good = [], True
    for workload in dict.fromkeys(run.workload for run in found):
        own = [run for run in found if run.workload == workload]
        methods = list(dict.fromkeys(run.method for run in own))
        costs = {method: _costs(own, method) for method in methods}
        for method in methods:
            row, fits = _row([run for run in own if run.method == method], costs[method])
            table.add(*row)
            good = good and fits
        for better, worse in disordered(workload, costs) if _whole(own) else ():
            wrong.append(f"{workload}: {worse!r} ranked before {better!r}")
            good = False
    return [*str(table).splitlines(), *wrong], good


def _whole(runs: Sequence[Run]) -> bool:
    return all((run.steps, run.ranks) == (WORKLOADS[run.workload].steps, 8) for run in runs)


def _costs(runs: Sequence[Run], method: str) -> list[float]:
    """The loss of a method against dense with the same optimizer, for each seed that both have."""
    sign = -1 if WORKLOADS[runs[0].workload].higher_is_better else 1
    known = METHODS.get(method)  # a stored run may have an older name
    against = "dense" if known is None or known.adaptive is None else known.adaptive.reference
    dense = {run.seed: run.score for run in runs if run.method == against}
    return [
        sign * (run.score - dense[run.seed])
        for run in runs
        if run.method == method and run.seed in dense
    ]


def _row(runs: Sequence[Run], costs: Sequence[float]) -> tuple[tuple[object, ...], bool]:
    workload, method = runs[0].workload, runs[0].method
    scores = [run.score for run in runs]
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    whole = bool(costs) and _whole(runs)
    band = WANTED.get((workload, method)) if whole else None
    verdict = judged(workload, method, costs) if whole else ""
    limit = LIMITS.get(method) if whole and workload == "text" else None
    wanted = f"{band.cost:.3f}" if band else f"<={limit:.3f}" if limit else ""
    equal = all(run.replicas_equal for run in runs)
    cost = f"{statistics.mean(costs):.3f}" if costs else ""
    within = f"{band.reach(len(costs)):.3f}" if band else ""
    fewer = statistics.mean(run.dense_mb / run.sent_mb for run in runs)
    row = (
        *(workload, method, str(len(runs)), statistics.mean(scores), spread),
        *(cost, wanted, within, verdict, f"{fewer:.1f}x"),
        *(f"{statistics.mean(map(_later, runs)):.1f}x", "equal" if equal else "DIFFER"),
    )
    return row, equal and verdict != "worse"


def _later(run: Run) -> float:
    """Times fewer bytes than dense in the second half of a run."""
    half = len(run.mb) // 2 - 1
    dense = run.dense_mb * (1 - (half + 1) / len(run.mb))
    return dense / max(run.mb[-1] - run.mb[half], 1e-12) if half >= 0 else math.nan


def draw(path: Path, found: Sequence[Run], caption: str) -> None:
    """Training loss, a mean over a twentieth of the run, over MB sent; seed 0. Of many methods
    those of DRAWN."""

    def panel(own: Sequence[Run], axes: Axes) -> None:
        for run in own:
            axes.plot(run.mb, run.losses, lw=1.5, **plots.style(run.method))
        axes.set(xlabel="MB sent by a rank", xscale="log", ylabel="loss (nats)")
        axes.grid()
        plots.label_lines(axes, below=True)

    first = [run for run in found if run.seed == 0]
    drawn = [run for run in first if run.method in DRAWN] or first
    shown = next((run for run in drawn if run.method == "dgc"), drawn[-1])
    name, fewer = plots.LABELS.get(shown.method, shown.method), shown.dense_mb / shown.sent_mb
    title = f"{name} sends {fewer:.3g} times fewer bytes: {shown.workload}, loss "
    title += f"{shown.losses[-1]:.2f}"
    for run in drawn:
        if (run.method, run.workload) == ("dense", shown.workload):
            title += f" instead of {run.losses[-1]:.2f}"
    plots.save(path, plots.grouped(drawn, lambda run: run.workload, panel), title, caption)


def _stored(path: Path | None) -> list[Run]:
    if path is None or not path.exists():
        return []
    return [Run(**row) for row in summaries.read(path)["rows"]]
