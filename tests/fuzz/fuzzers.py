"""Builds the fuzz targets, tests/fuzz/*_fuzz.cpp, with clang's libFuzzer and sanitizers.

    python tests/fuzz/fuzzers.py [target ...]     builds, prints the binaries

A target is its own file with main.cpp and its files of csrc in NEEDS; objects and binaries are in
build/fuzz/. Raises BuildFailed without a suitable clang.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "compile"))
from ninja_files import BuildFailed, NinjaFile, locked

from build import clang, is_built

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"

FLAGS = [
    *("-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-pthread"),
    "-Wno-deprecated-declarations",  # of libstdc++, in itself
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", f"-I{HERE}"),
]
ENGINE = [
    "engine",
    *(f"os/{name}.cpp" for name in ("fd", "process", "processor", "socket", "wake_event")),
]
NEEDS = {
    "frames": ENGINE,
    "handshake": [
        "core",
        *(f"os/{name}.cpp" for name in ("fd", "random", "socket")),
        *(f"transport/{name}.cpp" for name in ("handshake", "handshake_protocol")),
    ],
    "rank_info": [
        *("core", "bootstrap/rank_info.cpp"),
        *(f"os/{name}.cpp" for name in ("fd", "random", "socket")),
    ],
    "buffer_exchange": [
        *ENGINE,
        *("collectives", "cpu/copy.cpp", "cpu/isa.cpp", "shared"),
    ],
    "packets": ["codec/cpu", "cpu/isa.cpp"],
    "store": [],
}
PRECOMPILED = "precompiled.pch"


def targets() -> list[str]:
    """Names of the targets: "store" for store_fuzz.cpp."""
    return sorted(p.stem.removesuffix("_fuzz") for p in HERE.glob("*_fuzz.cpp"))


def sources(target: str) -> list[Path]:
    """The files of csrc that a target links."""
    named = [CSRC / name for name in NEEDS[target]]
    return [p for at in named for p in ([at] if at.is_file() else sorted(at.glob("*.cpp")))]


def ninja_file() -> NinjaFile:
    """The targets. Files of csrc report their coverage to libFuzzer, which has its own main(). The
    headers of the standard library are compiled once: parsing takes a third of the time."""
    coverage = "$flags -fsanitize=fuzzer-no-link"
    variables = {"flags": " ".join(FLAGS), "header": f"-include-pch {PRECOMPILED}"}
    ninja = NinjaFile({"cxx": clang(), **variables})
    precompiling = f"{coverage} -fpch-instantiate-templates"
    ninja.build(PRECOMPILED, "precompile", [CSRC / "core/precompiled.h"], flags=precompiling)
    own = [HERE / "main.cpp", *(HERE / f"{target}_fuzz.cpp" for target in targets())]
    objects = {
        source: ninja.build(
            source.relative_to(ROOT).with_suffix(".o"), "compile", [source],
            after=[PRECOMPILED], flags=coverage,
        )
        for source in sorted({*own, *(p for target in targets() for p in sources(target))})
    }  # fmt: skip
    for target in targets():
        parts = [own[0], HERE / f"{target}_fuzz.cpp", *sources(target)]
        linked = [objects[part] for part in parts]
        ninja.build(target, "link", linked, flags="$flags -fsanitize=fuzzer")
    return ninja


def build(names: list[str]) -> list[Path]:
    """Builds these targets; the paths of their binaries. Raises BuildFailed."""
    folder = ROOT / "build" / "fuzz"
    if not is_built(folder, names):
        with locked(folder):
            ninja_file().run(folder, names)
    return [folder / name for name in names]


if __name__ == "__main__":
    try:
        print(*build(sys.argv[1:] or targets()), sep="\n")
    except BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(str(error))
