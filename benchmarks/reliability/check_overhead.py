"""`python -m benchmarks check_overhead`: the cost of checking that all ranks make the same call.

The objects of the compiled core are linked twice to check_overhead.cpp: unchanged, and
with four sources compiled without their checks (REMOVED; each text must be found). Both programs
make the same calls between two ranks, in turn; the cost is the difference of their times. Needs an
in-place build and its compiler. Exits with 1 if the cost exceeds the limit in docs/errors.md.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reliability import command
from benchmarks.reliability.command import ROOT

CSRC = ROOT / "csrc"

REMOVED = {
    "shared/flag_task.cpp": [
        ("before_ = std::exchange(region.last, header);", ""),
        ("signature_ = region.signature = signature_of(header, region.signature);", ""),
        ("if (filled.signature != signature_) throw_mismatch(peer, ticket);", ""),
        ("filled.signature = signature_;", ""),
        ("own.reduced[ticket % kSlots].header.store(header_);", ""),
        ("own.reduced[ticket % kSlots].before.store(before_);", ""),
        ("uint32_t signature_of(", "[[maybe_unused]] uint32_t signature_of("),
    ],
    "shared/shared_memory_region.cpp": [
        ("begun.header.store(header);", ""),
        ("return !engine::same_call(theirs, mine);", "return false;"),
    ],
    "engine/call_sequence.cpp": [
        ("past_ = followed_by(past_, header);", ""),
        ("signature.context = static_cast<uint16_t>(past_);", ""),
        ("uint64_t followed_by(", "[[maybe_unused]] uint64_t followed_by("),
    ],
    "engine/frame_dispatcher.cpp": [
        (
            "if (!same_call(header, calls_.expected_from(peer))) "
            "mismatches_.throw_mismatch(peer, header);",
            "",
        ),
        (
            "if (header.context != running->context) mismatches_.throw_mismatch_on_past(peer);",
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
    most_ns: float | None = None
    most_percent: float | None = None


CASES = [
    Case("shm", 4, 20_000, most_ns=30.0),
    Case("tcp", 4096, 2_000, most_percent=1.0),
]
BATCHES = 5  # of one process


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of a call with its checks and without."""

    transport: str
    bytes: int
    with_ns: float
    without_ns: float
    cost_ns: float
    """The median over rounds of the difference between consecutive runs."""
    spread_ns: float
    """Half of the distance between the quartiles of those differences."""
    kept: bool


class NotBuilt(Exception):
    """There are no objects to link, or a source no longer contains a text of REMOVED."""


def without_checks(path: str) -> str:
    """The text of csrc/`path` without its checks.

    Raises NotBuilt if one of them is missing.
    """
    text = (CSRC / path).read_text()
    for old, new in REMOVED[path]:
        if text.count(old) != 1:
            raise NotBuilt(f"csrc/{path} has {text.count(old)} times, not once: {old}")
        text = text.replace(old, new)
    return text


def build(folder: Path) -> dict[str, Path]:
    """The two programs, in `folder`. Raises NotBuilt, also if compilation fails."""
    built = ROOT / "build" / sysconfig.get_config_var("SOABI")
    sources = [p.relative_to(CSRC) for p in sorted(CSRC.rglob("*.cpp"))]
    compiled = {
        p: built / "_core" / p.with_suffix(".o") for p in sources if p.parts[0] != "bindings"
    }
    objects = {p: o for p, o in compiled.items() if o.exists()}  # others: of another module
    if not objects:
        raise NotBuilt("the core is not built: run `make build`")
    # The compiler and its options, as build.ninja has them for the core.
    text = (built / "build.ninja").read_text().splitlines()
    named = dict(line.split(" = ", 1) for line in text if " = " in line and line[0] != " ")
    compiler, flags = shlex.split(named["cxx"]), shlex.split(named["_core_compile"])

    def compile_(source: Path, into: str) -> Path:
        _run([*compiler, *flags, "-c", str(source), "-o", str(folder / into)])
        return folder / into

    main = compile_(Path(__file__).with_suffix(".cpp"), "checks.o")
    instead = {}
    for path in REMOVED:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(without_checks(path))
        instead[Path(path)] = compile_(folder / path, f"{path}.o")
    programs = {"with": folder / "with", "without": folder / "without"}
    for linked, program in zip((objects, objects | instead), programs.values(), strict=True):
        files = map(str, [main, *linked.values()])
        _run([compiler[0], "-pthread", *files, "-ldl", "-o", str(program)])
    return programs


def measure(programs: dict[str, Path], case: Case, rounds: int) -> Cost:
    """Both programs in turn, `rounds` times; of each process its best batch counts."""
    best: dict[str, list[float]] = {name: [] for name in programs}
    what = [case.transport, str(case.bytes // 4), str(case.calls), str(BATCHES)]
    for _ in command.progress(range(rounds), f"{case.transport}, {case.bytes} B"):
        for name, program in programs.items():
            output = _run([str(program), *what])
            best[name].append(min(map(float, output.split())))
    differences = [a - b for a, b in zip(best["with"], best["without"], strict=True)]
    low, cost, high = statistics.quantiles(differences, n=4)
    without = statistics.median(best["without"])
    kept = case.most_ns is None or cost <= case.most_ns
    kept &= case.most_percent is None or 100 * cost / without <= case.most_percent
    return Cost(
        case.transport,
        case.bytes,
        statistics.median(best["with"]),
        without,
        cost,
        (high - low) / 2,
        kept,
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = command.parser("check_overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=21, help="of both programs (21)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            programs = build(Path(folder))
            costs = [measure(programs, case, args.rounds) for case in CASES]
    except NotBuilt as error:
        print(f"check_overhead: {error}", file=sys.stderr)
        return 2
    command.report(args.json, rounds=args.rounds, costs=[asdict(one) for one in costs])
    return 0 if all(cost.kept for cost in costs) else 1


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise NotBuilt(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout
