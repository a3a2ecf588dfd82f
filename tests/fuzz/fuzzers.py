"""Builds the fuzz targets, tests/fuzz/*_fuzz.cpp, with clang's libFuzzer and sanitizers.

    python tests/fuzz/fuzzers.py [target ...]     builds, prints the binaries

A target is its own file with main.cpp and its files of csrc in NEEDS; objects and binaries are in
build/fuzz/. Raises BuildFailed without a suitable clang.
"""

import fcntl
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))
from build import BuildFailed, clang, is_built, ninja_binary

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
# Files of csrc report their coverage to libFuzzer, which has its own main(). The headers of the
# standard library are compiled once: parsing them takes a third of the time.
PRECOMPILED = "precompiled.pch"
RULES = f"""\
rule precompile
  command = $cxx -MMD -MF $out.d $flags $coverage -fpch-instantiate-templates -x c++-header $in $
    -o $out
  depfile = $out.d
  deps = gcc
rule compile
  command = $cxx -MMD -MF $out.d $flags $coverage -include-pch {PRECOMPILED} -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx $flags -fsanitize=fuzzer $in -o $out
"""


def targets() -> list[str]:
    """Names of the targets: "store" for store_fuzz.cpp."""
    return sorted(p.stem.removesuffix("_fuzz") for p in HERE.glob("*_fuzz.cpp"))


def sources(target: str) -> list[Path]:
    """The files of csrc that a target links."""
    named = [CSRC / name for name in NEEDS[target]]
    return [p for at in named for p in ([at] if at.is_file() else sorted(at.glob("*.cpp")))]


def write_ninja(folder: Path) -> None:
    """Writes build.ninja into `folder`."""
    lines = [f"cxx = {clang()}", f"flags = {' '.join(FLAGS)}"]
    lines += ["coverage = -fsanitize=fuzzer-no-link", RULES]
    lines.append(f"build {PRECOMPILED}: precompile {CSRC / 'core' / 'precompiled.h'}")
    own = [HERE / "main.cpp", *(HERE / f"{target}_fuzz.cpp" for target in targets())]
    for source in sorted({*own, *(p for target in targets() for p in sources(target))}):
        target = source.relative_to(ROOT).with_suffix(".o")
        lines.append(f"build {target}: compile {source} | {PRECOMPILED}")
    for target in targets():
        parts = [own[0], HERE / f"{target}_fuzz.cpp", *sources(target)]
        objects = [str(p.relative_to(ROOT).with_suffix(".o")) for p in parts]
        lines.append(f"build {target}: link {' '.join(objects)}")
    text = "\n".join(lines) + "\n"
    path = folder / "build.ninja"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build(names: list[str]) -> list[Path]:
    """Builds these targets; the paths of their binaries. Raises BuildFailed."""
    folder = ROOT / "build" / "fuzz"
    if is_built(folder, names):
        return [folder / name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # one build at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_ninja(folder)
        command = [ninja_binary(), "-C", str(folder), *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(done.stdout + done.stderr)
    return [folder / name for name in names]


if __name__ == "__main__":
    try:
        print(*build(sys.argv[1:] or targets()), sep="\n")
    except BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(str(error))
