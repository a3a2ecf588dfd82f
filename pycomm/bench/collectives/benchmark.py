"""`pycomm bench collectives`: pycomm's collectives and other libraries', in one run.

Two worker processes (or --ranks of them) hold a process group of every contestant. Each case is
checked against the exact answer; then the contestants are timed in turn, round by round, together
with the copy that gives the limit. Exits with 1 if an answer was wrong or a contestant was faster
than the limit.

The short options, the columns and the last lines are those of nccl-tests; further columns follow.
"out-of-place" of all_reduce, reduce and broadcast copies the input first, and so does "in-place" of
all_to_all, all_gather_v and send_recv. p99, the ratio and the share of the limit are of the other
form, which is that of pycomm's call. p2p_latency, p2p_bandwidth and p2p_bidirectional are tests of
messages as in the OSU benchmarks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pycomm import _command_line
from pycomm._command_line import number
from pycomm.bench.collectives.cases import DTYPES, REDOPS, THEIRS, VERBS, Case, Run
from pycomm.bench.collectives.peers import OPERATORS, OURS, PACKAGES, PEERS
from pycomm.bench.support import packages, summaries
from pycomm.bench.support.sizes import names, parse_size, parse_sizes, series
from pycomm.errors import InvalidArgument


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plot and (why := packages.missing("matplotlib")):
        parser.error(f"--plot {why}")
    if options.replay:
        from pycomm.bench.collectives import replay

        try:
            return replay.run(options.replay, options.rounds, options.json)
        except InvalidArgument as error:  # of the traces
            parser.error(str(error))
    peers = [OURS[name] for name in options.ours] + [PEERS[name] for name in options.peers]
    if not peers:
        parser.error("nothing to measure: at least one contestant is needed")
    if options.root >= options.ranks:
        parser.error(f"invalid --root: got {options.root}, expected less than {options.ranks}")
    if why := _unsupported(options):
        parser.error(why)
    prefixes = dict(options.mpi_prefix)
    if why := _absent(options.peers, prefixes):
        parser.error(why)
    run = Run(
        options.ranks,
        list(dict.fromkeys(_cases(options))),
        peers,
        options.rounds,
        options.iters,
        options.warmup_iters,
        bool(options.check),
        options.busy,
        options.device,
        prefixes,
    )
    from pycomm._tables import console
    from pycomm.bench.collectives import measure, table  # which import torch
    from pycomm.bench.support import machine  # as above

    to = console()
    found = measure.measure(to, run)
    shared = ("ranks", "rounds", "calls", "warm_up", "check", "busy", "device")
    settings = {name: getattr(run, name) for name in shared}
    settings["peers"] = [peer.name for peer in peers]
    summaries.store(options.json, settings=settings, rows=[asdict(line) for line in found])
    if options.plot:
        measure.draw(options.plot, found, run.ranks, machine.caption())
    faults = table.faults(found, run.busy)
    for message in faults:
        to.print(message, style="red")
    return 1 if faults else 0


def _cases(options: argparse.Namespace) -> list[Case]:
    """In each form that an operation has, the form of pycomm's call last."""
    sizes, found = options.sizes, []
    if any((options.minbytes, options.maxbytes, options.stepbytes, options.stepfactor)):
        first, last = options.minbytes or 4, options.maxbytes or max(options.minbytes or 0, 2**26)
        sizes = series(first, last, options.stepfactor or 2, options.stepbytes or 0)
    for verb in options.ops:
        for dtype in options.dtypes:
            for size in [0] if verb == "barrier" else sizes:
                case = Case(verb, dtype, size, options.ranks, options.root, options.op)
                found += [case] if case.kind.alone else [replace(case, copies=True), case]
    return found


def _unsupported(options: argparse.Namespace) -> str:
    """The part of the request that the device does not support, or ""."""
    if options.idle is not None:
        return "--idle: use `python -m benchmarks bursts --idle S` in pycomm's repository"
    if options.device == "cpu":
        return "nccl takes arrays on devices: --device cuda" if "nccl" in options.peers else ""
    hosts = [name for name in options.peers if name not in ("nccl", "fake")]
    if hosts:
        return f"{' and '.join(hosts)}: here for arrays in host memory; --peers nccl"
    import torch

    if options.ranks > torch.cuda.device_count():
        return (
            f"{options.ranks} ranks need as many GPUs, and torch finds {torch.cuda.device_count()}"
        )
    return ""


def _absent(chosen: Sequence[str], prefixes: Mapping[str, Path]) -> str:
    """The first of the peers that is not installed, with the remedy, or ""."""
    from pycomm.bench.collectives import groups, mpi  # which import torch

    reasons = [mpi.missing(name, prefixes.get(name)) for name in chosen if name in PACKAGES]
    for name in (name for name in chosen if name in OPERATORS):
        found = groups.operators()
        reasons.append(found.missing(name) if found else f"{name} needs pycomm's repository")
    return next(filter(None, reasons), "")


def _dtypes(text: str) -> list[str]:
    """Names of dtypes, those of nccl-tests included."""
    ours = {theirs: name for name, theirs in THEIRS.items()}
    return names(DTYPES)(",".join(ours.get(word.strip(), word) for word in text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = _command_line.parser("bench collectives", __doc__, "bandwidth over size")
    positive = number(int, lambda n: n > 0, "above 0")
    least_0 = number(int, lambda n: n >= 0, "from 0")
    ranks = number(int, lambda n: n > 1, "above 1")
    parser.add_argument("--ranks", type=ranks, default=2, help="(%(default)s)")
    parser.add_argument(
        "--sizes", type=parse_sizes, default="4:64M", help="first:last[:factor], list (%(default)s)"
    )
    for short, long, kind, text in (
        ("-b", "--minbytes", parse_size, "the first size, in place of --sizes (4)"),
        ("-e", "--maxbytes", parse_size, "the last size (64M)"),
        ("-f", "--stepfactor", number(int, lambda n: n > 1, "above 1"), "between two sizes (2)"),
        ("-i", "--stepbytes", parse_size, "between two sizes, in place of a factor"),
        ("-n", "--iters", positive, "calls of a contestant in a round (2 to 100, by size)"),
    ):
        parser.add_argument(short, long, type=kind, metavar="N", help=text)
    parser.add_argument(
        *("-w", "--warmup-iters"), type=least_0, default=20, metavar="N", help="(%(default)s)"
    )
    parser.add_argument("-r", "--root", type=least_0, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument(
        *("-o", "--op"), choices=REDOPS, default="sum", help="reduction (%(default)s)"
    )
    parser.add_argument(
        *("-c", "--check"), type=int, choices=(0, 1), default=1, help="check answers (%(default)s)"
    )
    parser.add_argument("--ops", type=names(VERBS), default="all_reduce", help=",".join(VERBS))
    parser.add_argument(
        *("-d", "--dtypes", "--datatype"),
        type=_dtypes,
        default="float32",
        help=f"{','.join(DTYPES)}; also {', '.join(THEIRS.values())}",
    )
    parser.add_argument("--peers", type=names(PEERS), default="gloo", help=",".join(PEERS))
    parser.add_argument(
        "--mpi-prefix",
        type=_prefix,
        action="append",
        default=[],
        metavar="MPI=DIR",
        help="folder of an MPI outside this environment (pip install --prefix DIR); each MPI has a "
        "run of its own, with all other contestants",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the arrays"
    )
    parser.add_argument(
        "--ours",
        type=names(OURS),
        default=",".join(OURS),
        help="pycomm through torch.distributed, called directly, and on arrays of pycomm.empty "
        "(%(default)s)",
    )
    rounds = "turns of each contestant (%(default)s)"
    parser.add_argument("--rounds", type=positive, default=7, help=rounds)
    parser.add_argument(
        "--busy",
        action="store_true",
        help="beside each rank, a thread of its process computes in Python all the time",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FOLDER",
        help="issue the calls of the traces in a folder (PYCOMM_TRACE) again, --rounds times",
    )
    parser.add_argument("--idle", help=argparse.SUPPRESS)  # refused, with its replacement
    return parser


def _prefix(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in PACKAGES or not folder:
        known = ", ".join(PACKAGES)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected MPI=DIR with one of {known}")
    return name, Path(folder).absolute()
