"""The table "program, gloo, pycomm" of docs/torch_backend.md, from stored results.

    python tests/compat/table.py          write the table
    python tests/compat/table.py --run    run everything first, one after the other: 15 minutes

The results are in benchmarks/results/, as torch_suite.py and programs.py store them, each with its
machine. Tests that pass with one backend only are named below the table, with the reason that the
run reported. tests/torch_backend/test_torch_suite.py checks that the page contains this table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "torch_backend.md"
BEGIN, END = "<!-- tests/compat/table.py writes from here -->", "<!-- to here -->"

BACKENDS = ("gloo", "pycomm")
SUITES = {  # suffix of the file name: options of torch_suite.py
    "2": ["--world-size", "2"],
    "3": ["--world-size", "3"],
    "4": ["--world-size", "4"],
    "3_cuda_as_cpu": ["--world-size", "3", "--cuda-as-cpu"],
}
OTHER_TORCHES = "3_torch_"  # with a version: what tools/matrix.py stored
PROGRAMS = {  # names in programs.py
    "accelerate_script": "`test_script`",
    "accelerate_sync": "`test_sync`",
    "lightning": "`DDPStrategy`",
    "trainer": "`Trainer`",
    "ray_train": "`TorchTrainer`",
}


def suite_file(kind: str, backend: str) -> Path:
    return RESULTS / f"torch_suite_{backend}_{kind}.json"


def programs_file(backend: str) -> Path:
    return RESULTS / f"programs_{backend}.json"


def run() -> None:
    """Runs everything and stores the results. A run with failing tests is a result too."""
    for backend in BACKENDS:
        for kind, options in SUITES.items():
            stored = suite_file(kind, backend)
            _script("torch_suite.py", "--backend", backend, *options, "--json", str(stored))
        _script("programs.py", "--backend", backend, "--json", str(programs_file(backend)))


def _script(name: str, *options: str) -> None:
    done = subprocess.run([sys.executable, str(HERE / name), *options], check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{name} {' '.join(options)} ended with {done.returncode}")


def table() -> str:
    """The table as Markdown."""
    lines = ["| program | gloo | pycomm |", "|---|---|---|"]
    others = sorted(RESULTS.glob(suite_file(f"{OTHER_TORCHES}*", "pycomm").name))
    kinds = [*SUITES, *(path.stem.removeprefix("torch_suite_pycomm_") for path in others)]
    suites = [{b: _read(suite_file(kind, b)) for b in BACKENDS} for kind in kinds]
    for suite in suites:
        cells = (_counts(suite[backend]) for backend in BACKENDS)
        lines.append(f"| {_suite_name(suite['pycomm'])} | {' | '.join(cells)} |")
    programs = [_read(programs_file(backend))["programs"] for backend in BACKENDS]
    for name, title in PROGRAMS.items():
        ran = [results[name] for results in programs]
        called = f"{ran[1]['package']} {ran[1].get('version', '')}".strip()
        lines.append(f"| {called}, {title} | {' | '.join(r['status'] for r in ran)} |")
    return "\n".join(lines).rstrip() + "\n"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _suite_name(result: dict[str, Any]) -> str:
    torch, options = result["torch"].partition("+")[0], result["options"]
    kind = ", GPU tests too" if options["cuda_as_cpu"] else ""
    return f"`distributed_test.py` of torch {torch}, {options['world_size']} processes{kind}"


def _counts(result: dict[str, Any]) -> str:
    totals = result["totals"]
    ran = sum(count for status, count in totals.items() if status != "left out")
    return f"{totals['passed']} of {ran}"


def written(page: str) -> str:
    """The text of the page with the table of the stored results."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has no place for the table: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def main(argv: Sequence[str]) -> int:
    """Writes the table into the page."""
    if list(argv) not in ([], ["--run"]):
        sys.exit("usage: table.py [--run]")
    if argv:
        run()
    PAGE.write_text(written(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
