"""Builds the suites of mutations.txt: a check of csrc is removed or weakened, and a test fails."""

import os
import subprocess
from pathlib import Path

import mutation_table
from mutation_table import Mutation

from build import CSRC, PRECOMPILED, ROOT, build, flags_of, is_built

ROWS = mutation_table.read(Path(__file__).with_suffix(".txt"))


def mutated(row: Mutation) -> Path:
    """Builds the suite of a row with its weakened check. Raises BuildFailed."""
    suite, text = row.key, row.of((CSRC / row.file).read_text())
    folder = ROOT / "build" / "native" / "mutated" / row.name
    if is_built(folder, [suite]):
        return folder / suite
    build("product", [suite])  # nothing is left to do if another row built it
    product = ROOT / "build" / "native" / "product"
    folder.mkdir(parents=True, exist_ok=True)
    source, program = folder / "csrc" / row.file, folder / suite
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    header = source.suffix == ".h"
    (precompiled,) = build("mutated", [PRECOMPILED])
    flags = [f"-I{folder / 'csrc'}", *flags_of("mutated"), "-include", "precompiled.h"]
    compiler = os.environ.get("CXX", "g++")
    made = folder / "mutated.o"
    compiled = Path(__file__).with_name(f"{suite}_test.cpp") if header else source
    command = [compiler, *flags, "-c", str(compiled), "-o", str(made)]
    subprocess.run(command, cwd=precompiled.parent, check=True)
    # The object precedes the archive, so the linker does not take the original.
    parts = [str(product / f"{suite}.o")] * (not header) + [str(made), str(product / "library.a")]
    subprocess.run([compiler, "-pthread", *parts, "-ldl", "-o", str(program)], check=True)
    return program
