"""Builds the native suites, tests/native/*_test.cpp: plain, under a sanitizer, or for aarch64.

    python tests/native/build.py [VARIANT] [suite ...]    builds, prints the binaries

VARIANT is plain, product, unoptimized, asan, tsan, aarch64, odr or mutated (for mutations.py).
product links the objects of the module _core, as `make build` left them, so that only the suites
are compiled. clang compiles for both sanitizers, most files without optimization: g++ takes three
to four times as long.

A suite is its own file with harness.cpp, the other files of this folder and all of csrc that needs
no Python. The suites of one sanitizer share objects, in build/native/<sanitizer>/ with the
binaries; only changed files are built. No suppression files: a sanitizer report is a failure.
aarch64 is a cross build for qemu-aarch64, without the simulation, whose fibers need x86-64. odr has
one target, "core": all of csrc but torch and CUDA, linked so that two types of one name are errors.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "compile"))
from ninja_files import BuildFailed, NinjaFile, locked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"

SANITIZERS = {
    "plain": [],
    "product": [],
    "unoptimized": ["-O0"],  # every function has a frame, for the suite frames
    "asan": [
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        "-D__SANITIZE_ADDRESS__=1",  # as g++ does: tests read it
    ],
    "tsan": ["-fsanitize=thread", "-D__SANITIZE_THREAD__=1"],
    "mutated": ["-O0", "-g0", "-w"],  # one file of csrc, changed: mutations.py
    "aarch64": ["-g0", "-static"],
    "odr": ["-O0", "-g0", "-flto=auto", "-fPIC", "-fvisibility=hidden", "-Werror=odr"],
}
CLANG = ("asan", "tsan")
# For the fuzz targets, which link the suites' objects: all of csrc but the kernels, under asan.
COVERAGE = "-fsanitize-coverage=inline-8bit-counters,indirect-calls,trace-cmp,pc-table"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
FLAGS = [
    # -g1: the lines of functions, for reports; -g takes half as long again with a sanitizer.
    *("-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
    # g++ 12 reports false positives in std::string.
    *("-Wno-restrict", "-Wno-array-bounds", "-Wno-stringop-overflow", "-Wno-stringop-overread"),
]
CLANGS = ["clang++", *(f"clang++-{version}" for version in range(25, 16, -1))]
PACKAGES = "apt-get install clang-19 libclang-rt-19-dev"
PROBE = """\
#include <source_location>
int main() {
  return __builtin_cpu_supports("f16c") + std::source_location::current().line() < 0;
}
"""
# g++ reports the warnings. Without times, a precompiled header is the same each time.
CLANG_FLAGS = ["-O0", "-fpch-instantiate-templates", "-Xclang", "-fno-pch-timestamp", "-w"]
# Clang optimizes these: their suites run long. Optimized kernels take too long to compile.
OPTIMIZED = [
    *(CSRC / name for name in ("collectives", "core", "engine", "os", "shared", "transport")),
    *(HERE / f"{name}_test.cpp" for name in ("halves", "kernels", "plans", "sparse")),
    HERE / "prove.cpp",
]
PRECOMPILED = "precompiled.h.gch"
BUILT = "TEST_PROGRAMS_ARE_BUILT"  # in the environment: set by conftest.py for --built


@cache
def clang() -> str:
    """The first clang that has the sanitizers, C++20 and the processor's features by name, which 14
    to 16 lack. Raises BuildFailed."""
    for name in CLANGS:
        command = [name, "-std=c++20", "-fsanitize=address", "-x", "c++", "-", "-o", "/dev/null"]
        try:
            done = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # the next one, then
            continue
        if done.returncode == 0:
            return name
    raise BuildFailed(f"sanitizers need clang 17 or newer. On Debian: {PACKAGES}")


def suites() -> list[str]:
    """Names of the suites: "plans" for plans_test.cpp."""
    return sorted(p.stem.removesuffix("_test") for p in HERE.glob("*_test.cpp"))


def python_flags() -> list[str]:
    """Include paths of Python and pybind11."""
    import pybind11

    folders = (sysconfig.get_paths()["include"], pybind11.get_include())
    return [f"-isystem {folder}" for folder in folders]


def flags_of(sanitizer: str) -> list[str]:
    """The options of the compiler for a variant."""
    flags = [*FLAGS, *SANITIZERS[sanitizer], f"-I{CSRC}", f"-I{HERE}", f"-I{HERE.parent}"]
    return flags + CLANG_FLAGS * (sanitizer in CLANG)


def ninja_file(sanitizer: str) -> NinjaFile:
    """The suites. All other objects form one archive, with main() of harness.cpp; a suite links the
    objects that it uses."""
    flags = flags_of(sanitizer)
    apart = (CSRC / "bindings", CSRC / "cuda")
    library = [p for p in sorted(CSRC.rglob("*.cpp")) if not any(a in p.parents for a in apart)]
    built = ROOT / "build" / str(sysconfig.get_config_var("SOABI")) / "_core"
    objects = []
    if sanitizer == "product":
        objects = [str(built / p.relative_to(CSRC).with_suffix(".o")) for p in library]
        library = []
    if sanitizer == "odr":
        flags += python_flags()
        library += sorted((CSRC / "bindings").glob("core*.cpp"))
    else:
        library += [p for p in sorted(HERE.glob("*.cpp")) if not p.stem.endswith("_test")]
        library.append(HERE.parent / "emulator" / "fiber.cpp")
    compiler = clang() if sanitizer in CLANG else os.environ.get("CXX", "g++")
    if sanitizer == "aarch64":
        compiler = CROSS_COMPILER
        library = [p for p in library if p.stem not in ("fiber", "simulation")]
    variables = {"cxx": compiler, "flags": " ".join(flags), "libs": "-ldl"}
    ninja = NinjaFile(variables, {"archive": "rm -f $out && ar crs $out $in"})
    header = CSRC / "core" / "precompiled.h"
    precompile = "precompile_here" if sanitizer in CLANG else "precompile"
    ninja.build(PRECOMPILED, precompile, [header])
    ninja.build(f"optimized/{PRECOMPILED}", precompile, [header], flags="$flags -O1")

    def compile_(source: Path, target: str) -> str:
        parser = sanitizer == "asan" and CSRC in source.parents and "kernels" not in source.parts
        optimized = sanitizer in CLANG and any(p in (source, *source.parents) for p in OPTIMIZED)
        folder = "optimized/" * optimized
        return ninja.build(
            target, "compile", [source],
            after=[folder + PRECOMPILED],
            flags="$flags" + " -O1" * optimized + f" {COVERAGE}" * parser,
            # Found in the folder where the compiler runs, as .gch.
            header=f"-include {folder}precompiled.h -Winvalid-pch",
        )  # fmt: skip

    for source in library:
        objects.append(compile_(source, str(source.relative_to(ROOT).with_suffix(".o"))))
    if sanitizer == "odr":
        ninja.build("core", "link", objects, flags="$flags -shared")
    ninja.build("library.a", "archive", objects)
    # Takes half the time of the other linker for a sanitizer's objects.
    gold = " -fuse-ld=gold" * (sanitizer in CLANG and shutil.which("ld.gold") is not None)
    for suite in suites():
        compiled = compile_(HERE / f"{suite}_test.cpp", f"{suite}.o")
        ninja.build(suite, "link", [compiled, "library.a"], flags="$flags" + gold)
    return ninja


def archive_of(sanitizer: str) -> Path:
    """The archive of all objects of a variant."""
    return ROOT / "build" / "native" / sanitizer / "library.a"


def object_of(sanitizer: str, source: Path) -> Path:
    """Where library.a has the object of a file of csrc."""
    return archive_of(sanitizer).parent / source.relative_to(ROOT).with_suffix(".o")


def build(sanitizer: str, names: Iterable[str]) -> list[Path]:
    """Builds these suites; the paths of their binaries. Raises BuildFailed."""
    folder, names = ROOT / "build" / "native" / sanitizer, list(names)
    if not is_built(folder, names):
        with locked(folder):
            ninja_file(sanitizer).run(folder, names)
    return [folder / name for name in names]


def is_built(folder: Path, names: Iterable[str]) -> bool:
    """Whether the Makefile built these files before the tests (tests/support/programs_of_tiers.py).
    Raises BuildFailed if it should have and did not: a time limit of a test contains no
    compilation."""
    if BUILT not in os.environ:
        return False
    if missing := [name for name in names if not (folder / name).exists()]:
        raise BuildFailed(f"{missing} of {folder}: not in tests/support/programs_of_tiers.py")
    return True


def main() -> None:
    """The command line: see the head of this file."""
    sanitizer, *names = sys.argv[1:] or ["plain"]
    if sanitizer not in SANITIZERS:
        sys.exit(f"{sanitizer}: not one of {', '.join(SANITIZERS)}")
    try:
        print(*build(sanitizer, names or suites()), sep="\n")
    except BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(str(error))


if __name__ == "__main__":
    main()
