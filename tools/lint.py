"""Checks format, lint and types of Python and C++ code.

    python tools/lint.py          check
    python tools/lint.py --fix    let the formatters rewrite files

Prints each command and exits with status 1 if one failed. clang-tidy is slow: it checks a file
again only if the file, an included header or the checks changed (build/lint/). The test suite
checks the dependencies between folders.
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
TYPED = ["pycomm", "benchmarks", "pycomm_torch_autoload.py"]
PYTHON = [*TYPED, "docs", "examples", "tests", "tools", "setup.py"]
NATIVE = [".cpp", ".hpp", ".h", ".cu", ".cuh"]
# clang-tidy takes a minute for torch's headers; g++ -Wall -Werror checks these files.
NOT_TIDIED = set((CSRC / "bindings").glob("c10d*.cpp"))


def tool(name: str) -> str:
    """Path of a program that a Python package installed."""
    for file in importlib.metadata.distribution(name).files or []:
        if file.name == name and file.parent.name == "bin":
            return str(file.locate())
    raise FileNotFoundError(name)


def run(*command: str) -> bool:
    """Prints and runs a command from the root; whether it succeeded."""
    shown = [Path(command[0]).name, *command[1:]]
    print("+", " ".join(shown[:8]), "..." if len(shown) > 8 else "", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@cache
def closure(path: Path) -> frozenset[Path]:
    """A file and every project header that it includes, directly or indirectly."""
    names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    direct = [p for p in (CSRC / name for name in names) if p.exists()]
    return frozenset({path}).union(*(closure(p) for p in direct))


def fingerprint(path: Path, command: list[str]) -> str:
    """A hash of all inputs of clang-tidy for one file."""
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(importlib.metadata.version("clang-tidy").encode())
    for part in [ROOT / ".clang-tidy", *sorted(closure(path))]:
        digest.update(part.read_bytes())
    return digest.hexdigest()


def tidy(path: Path) -> str:
    """Runs clang-tidy on one file; returns its messages, or ""."""
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
    """Runs clang-tidy on csrc, one process per processor; with SAMPLE, a day's number, on a tenth
    of the files, which take a processor some minutes."""
    paths = sorted(set(CSRC.rglob("*.cpp")) - NOT_TIDIED)
    if sample := os.environ.get("SAMPLE"):
        paths = paths[int(sample) % 10 :: 10]
    print(f"+ clang-tidy ({len(paths)} files of csrc)", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [text for text in pool.map(tidy, paths) if text]
    print(*complaints, sep="\n", end="", flush=True)
    return not complaints


def main() -> None:
    """Runs all checks, also after a failure."""
    fix = "--fix" in sys.argv[1:]
    folders = (CSRC, ROOT / "tests", ROOT / "benchmarks")
    ours = [str(p) for f in folders for end in NATIVE for p in sorted(f.rglob(f"*{end}"))]
    workflows = sorted(str(p.relative_to(ROOT)) for p in (ROOT / ".github").rglob("*.yml"))
    content = [
        run(tool("ruff"), "check", *(["--fix"] if fix else []), *PYTHON),
        run(tool("ruff"), "format", *([] if fix else ["--check"]), *PYTHON),
        run(tool("clang-format"), *(["-i"] if fix else ["--dry-run", "-Werror"]), *ours),
        run(sys.executable, "-m", "mypy", "--strict", *TYPED),
        run(sys.executable, "tools/language.py"),
        run(tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *workflows),
        tidy_all(),
    ]
    print("lint:", "clean" if all(content) else "see above", flush=True)
    sys.exit(not all(content))


if __name__ == "__main__":
    main()
