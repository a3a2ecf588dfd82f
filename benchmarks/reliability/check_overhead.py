"""`python -m benchmarks check_overhead`: the cost of checking that all ranks make the same call.

The objects of the compiled core are linked twice to check_overhead.cpp: unchanged, and with four
sources compiled without their checks (REMOVED; each text must be found). Both programs make the
same calls between two ranks, in turn; the cost is the difference of their times. Needs an in-place
build and its compiler. Exits with 1 if the cost exceeds the limit of its case.
"""

from __future__ import annotations

import math
import shlex
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import command
from benchmarks.support.command import ROOT

CSRC = ROOT / "csrc"
LIMIT_S = 600.0  # of one program

REMOVED = {
    "shared/flag_task.cpp": [
        ("before_ = std::exchange(region.last, job.header);", ""),
        ("signature_ = region.signature = signature_of(job.header, region.signature);", ""),
        ("if (filled.signature != signature_) throw_mismatch(peer, ticket);", ""),
        ("filled.signature = signature_;", ""),
        ("own.reduced[ticket % kSlots].header.store(job_.header);", ""),
        ("own.reduced[ticket % kSlots].before.store(before_);", ""),
        ("uint32_t signature_of(", "[[maybe_unused]] uint32_t signature_of("),
    ],
    "shared/flags.h": [("header_.store(header);", "(void)header;")],
    "shared/shared_memory_region.cpp": [
        ("return !engine::same_call(theirs, mine);", "return false;"),
    ],
    "engine/call_sequence.cpp": [
        ("call_hash_ = next_hash(call_hash_, header);", ""),
        ("signature.context = static_cast<uint16_t>(call_hash_);", ""),
        ("uint64_t next_hash(", "[[maybe_unused]] uint64_t next_hash("),
    ],
    "engine/frame_dispatcher.cpp": [
        (
            "if (!same_call(header, calls_.expected_from(peer))) "
            "mismatches_.throw_mismatch(peer, header);",
            "",
        ),
        (
            "if (header.context != running->context) mismatches_.throw_mismatch_before(peer);",
            "",
        ),
    ],
}
"""By source file: the removed text, and its replacement."""


@dataclass(frozen=True)
class Case:
    """A measured call, and the allowed cost of its checks."""

    transport: str
    bytes: int
    calls: int  # of a batch
    most_ns: float = math.inf
    most_percent: float = math.inf


CASES = [
    Case("shm", 4, 20_000, most_ns=30.0),
    Case("tcp", 4096, 2_000, most_percent=1.0),
]
BATCHES = 5  # of one process


def without_checks(path: str) -> str:
    """The text of csrc/`path` without its checks. Raises ValueError if one of them is missing."""
    text = (CSRC / path).read_text()
    for old, new in REMOVED[path]:
        if text.count(old) != 1:
            raise ValueError(f"csrc/{path} has {text.count(old)} times, not once: {old}")
        text = text.replace(old, new)
    return text


def build(folder: Path) -> dict[str, Path]:
    """The two programs, in `folder`. Raises OSError or CalledProcessError without the build."""
    built = ROOT / "build" / sysconfig.get_config_var("SOABI")
    # The compiler and its options, as build.ninja has them for the core.
    text = (built / "build.ninja").read_text().splitlines()
    named = dict(line.split(" = ", 1) for line in text if " = " in line and line[0] != " ")
    compiler, flags = shlex.split(named["cxx"]), shlex.split(named["_core_compile"])

    def compile_(source: Path, made: Path, *more: str) -> Path:
        include = f"-I{folder}"  # of a header without its checks
        subprocess.check_call([*compiler, include, *flags, *more, "-c", source, "-o", made])
        return made

    code, headers = Path(__file__).with_suffix(".cpp"), f"-I{ROOT}/tests/native"
    main = compile_(code, folder / "checks.o", headers)
    core = built / "_core"
    objects = {o: o for o in core.rglob("*.o") if o.parent.name != "bindings"}
    instead = {}
    for path in REMOVED:
        source = folder / path
        source.parent.mkdir(exist_ok=True)
        source.write_text(without_checks(path))
    for path in (p for p in REMOVED if p.endswith(".cpp")):
        source = folder / path
        instead[(core / path).with_suffix(".o")] = compile_(source, source.with_suffix(".o"))
    programs = {"with": folder / "with", "without": folder / "without"}
    for linked, program in zip((objects, objects | instead), programs.values(), strict=True):
        files = [main, *linked.values()]
        subprocess.check_call([compiler[0], "-pthread", *files, "-ldl", "-o", program])
    return programs


def measure(programs: dict[str, Path], case: Case, rounds: int) -> dict[str, Any]:
    """Both programs in turn, `rounds` times; of each process its best batch counts. The cost is the
    median difference of consecutive runs, the spread half of the distance between the quartiles."""
    best: dict[str, list[float]] = {name: [] for name in programs}
    what = [case.transport, str(case.bytes // 4), str(case.calls), str(BATCHES)]
    for _ in command.progress(range(rounds), f"{case.transport}, {case.bytes} B"):
        for name, program in programs.items():
            output = subprocess.check_output([program, *what], text=True, timeout=LIMIT_S)
            best[name].append(min(map(float, output.split())))
    differences = [a - b for a, b in zip(best["with"], best["without"], strict=True)]
    low, cost, high = statistics.quantiles(differences, n=4)
    without = statistics.median(best["without"])
    return {
        "transport": case.transport,
        "bytes": case.bytes,
        "with_ns": statistics.median(best["with"]),
        "without_ns": without,
        "cost_ns": cost,
        "spread_ns": (high - low) / 2,
        "kept": cost <= case.most_ns and 100 * cost / without <= case.most_percent,
    }


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = command.parser("check_overhead", __doc__, rounds=(21, "of both programs"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        programs = build(Path(folder))
        costs = [measure(programs, case, args.rounds) for case in CASES]
    command.report(args.json, rounds=args.rounds, costs=costs)
    return 0 if all(cost["kept"] for cost in costs) else 1
