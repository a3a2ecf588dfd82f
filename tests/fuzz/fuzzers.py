"""Builds the fuzz targets, tests/fuzz/*_fuzz.cpp, with clang's libFuzzer and sanitizers.

    python tests/fuzz/fuzzers.py [target ...]     builds, prints the binaries

A target is its own file with main.cpp and what it needs of csrc: the objects of the native suites
under the address sanitizer, which report their coverage. The binaries are in build/fuzz/. Raises
BuildFailed without a suitable clang.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "compile"))
from ninja_files import BuildFailed, NinjaFile, locked

import build as native

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def targets() -> list[str]:
    """Names of the targets: "store" for store_fuzz.cpp."""
    return sorted(p.stem.removesuffix("_fuzz") for p in HERE.glob("*_fuzz.cpp"))


def ninja_file() -> NinjaFile:
    """The targets; main() is libFuzzer's."""
    archive = native.archive_of("asan")
    header = f"-include {archive.parent}/optimized/precompiled.h -Winvalid-pch"
    flags = " ".join([*native.flags_of("asan"), "-O1", f"-I{HERE}"])
    ninja = NinjaFile({"cxx": native.clang(), "flags": flags, "header": header})
    own = {name: HERE / f"{name}.cpp" for name in ("main", *(f"{t}_fuzz" for t in targets()))}
    objects = {n: ninja.build(f"{n}.o", "compile", [path]) for n, path in own.items()}
    for target in targets():
        parts = [objects["main"], objects[f"{target}_fuzz"], archive]
        ninja.build(target, "link", parts, flags="$flags -fsanitize=fuzzer", libs="-ldl")
    return ninja


def build(names: list[str]) -> list[Path]:
    """Builds these targets; the paths of their binaries. Raises BuildFailed."""
    folder = ROOT / "build" / "fuzz"
    if not native.is_built(folder, names):
        native.build("asan", ["library.a"])
        with locked(folder):
            ninja_file().run(folder, names)
    return [folder / name for name in names]


if __name__ == "__main__":
    try:
        print(*build(sys.argv[1:] or targets()), sep="\n")
    except BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(str(error))
