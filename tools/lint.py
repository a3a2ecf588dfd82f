"""Runs every check of the text of the project: format, lint and types, Python and C++.

    python tools/lint.py          check
    python tools/lint.py --fix    rewrite what the formatters can

Prints each command and ends with status 1 if one complained. clang-tidy is slow, so that a file is
looked at again only when it, a header it includes or the checks have changed (build/lint/). Not
here: the layers (tests/test_layers.py).
"""

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CLEAN = ROOT / "build" / "lint"
PYTHON = ["pycomm", "benchmarks", "docs", "examples", "tests", "tools", "setup.py"]
TYPED = ["pycomm", "benchmarks"]
NATIVE = [".cpp", ".hpp", ".h", ".cu", ".cuh"]
# torch's headers cost a minute and are not ours; g++ -Wall -Werror looks at these.
NOT_TIDIED = set((CSRC / "bindings").glob("c10d*.cpp"))


def tool(name: str) -> str:
    """Path of a program that a Python package brought, wherever that package lies."""
    for file in importlib.metadata.distribution(name).files or []:
        if file.name == name and file.parent.name == "bin":
            return str(file.locate())
    raise FileNotFoundError(name)


def run(*command: str) -> bool:
    """Runs a command from the root, shown first; whether it was content."""
    shown = [Path(command[0]).name, *command[1:]]
    print("+", " ".join(shown[:8]), "..." if len(shown) > 8 else "", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@cache
def closure(path: Path) -> frozenset[Path]:
    """A file of ours and every header of ours that it includes, at any depth."""
    names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    direct = [p for p in (CSRC / name for name in names) if p.exists()]
    return frozenset({path}).union(*(closure(p) for p in direct))


def fingerprint(path: Path, command: list[str]) -> str:
    """Changes when anything does that clang-tidy looks at."""
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(importlib.metadata.version("clang-tidy").encode())
    for part in [ROOT / ".clang-tidy", *sorted(closure(path))]:
        digest.update(part.read_bytes())
    return digest.hexdigest()


def tidy(path: Path) -> str:
    """Runs clang-tidy on one file; what it complained about, or nothing."""
    import pybind11

    includes = ["-I", str(CSRC), "-isystem", pybind11.get_include()]
    includes += ["-isystem", sysconfig.get_paths()["include"]]
    command = [tool("clang-tidy"), "--quiet", str(path), "--", "-std=c++20", *includes]
    mark = CLEAN / path.relative_to(CSRC).with_suffix(".clean")
    print_of = fingerprint(path, command)
    if mark.exists() and mark.read_text() == print_of:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return done.stdout + done.stderr
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(print_of)
    return ""


def tidy_all() -> bool:
    """clang-tidy over csrc, as many at a time as there are processors."""
    paths = sorted(set(CSRC.rglob("*.cpp")) - NOT_TIDIED)
    print(f"+ clang-tidy ({len(paths)} files of csrc)", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [text for text in pool.map(tidy, paths) if text]
    print(*complaints, sep="\n", end="", flush=True)
    return not complaints


def main() -> None:
    """Runs all checks, also after one has failed."""
    fix = "--fix" in sys.argv[1:]
    python = [name for name in PYTHON if (ROOT / name).exists()]
    typed = [name for name in TYPED if any((ROOT / name).rglob("*.py"))]
    folders = (CSRC, ROOT / "tests", ROOT / "benchmarks")
    ours = [str(p) for f in folders for end in NATIVE for p in sorted(f.rglob(f"*{end}"))]
    content = [
        run(tool("ruff"), "check", *(["--fix"] if fix else []), *python),
        run(tool("ruff"), "format", *([] if fix else ["--check"]), *python),
        run(tool("clang-format"), *(["-i"] if fix else ["--dry-run", "-Werror"]), *ours),
        run(sys.executable, "-m", "mypy", "--strict", *typed),
        tidy_all(),
    ]
    print("lint:", "clean" if all(content) else "see above", flush=True)
    sys.exit(not all(content))


if __name__ == "__main__":
    main()
