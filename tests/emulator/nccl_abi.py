"""Compares csrc/nccl/abi.h with NCCL's header and library.

    python tests/emulator/nccl_abi.py [version ...]     # make nccl: downloads 200 to 300 MB each

tests/devices/test_nccl.py checks the installed package. This program downloads the wheels of other
versions from PyPI, one after the other, and deletes each after its check.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import programs

CSRC = programs.CSRC
# The oldest version that pycomm accepts, those of torch 2.3 to 2.11, and the newest.
VERSIONS = ("cu12==2.18.1", "cu12==2.21.5", "cu12==2.27.7", "cu12==2.28.9", "cu13==2.32.3")
NAMES = re.findall(r'"(nccl[A-Z]\w+)"\)', (CSRC / "nccl" / "abi.h").read_text())

ABI = """
#include <nccl.h>
#include <type_traits>
#include "nccl/abi.h"

using namespace pycomm::nccl;

template <class A, class B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && alignof(A) == alignof(B) &&
                        std::is_pointer_v<A> == std::is_pointer_v<B> &&
                        std::is_class_v<A> == std::is_class_v<B>;
template <class F, class G>
struct Same : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Same<R (*)(A...), S (*)(B...)>
    : std::bool_constant<(kAlike<R, S> && ... && kAlike<A, B>)> {};

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId) && std::is_trivially_copyable_v<NcclId>);
static_assert(offsetof(abi::Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(abi::Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(abi::Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(abi::Config) <= sizeof(ncclConfig_t));
static_assert(offsetof(abi::Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(abi::Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(abi::Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(abi::Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(abi::Config, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(abi::kUndefined == NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_VERSION(2, 18, 1) == abi::kLeastVersion);
static_assert(abi::Config{}.magic == ncclConfig_t NCCL_CONFIG_INITIALIZER.magic);
"""
NUMBERS = {
    "Result": {
        **{"success": "Success", "cuda_error": "UnhandledCudaError", "system_error": "SystemError"},
        **{"internal_error": "InternalError", "invalid_argument": "InvalidArgument"},
        **{"invalid_usage": "InvalidUsage", "remote_error": "RemoteError"},
        **{"in_progress": "InProgress"},
    },
    "Dtype": {
        name: name.capitalize()
        for name in (
            *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
            *("float16", "float32", "float64", "bfloat16"),
        )
    },
    "Op": {"sum": "Sum", "product": "Prod", "max": "Max", "min": "Min", "avg": "Avg"},
}


def mismatch(include: Path) -> str:
    """The compiler's errors if abi.h differs from the nccl.h in this folder; else an empty text.

    It compares numbers, layouts, and the arguments of each function by size and kind.
    """
    lines = [ABI]
    for kind, names in NUMBERS.items():
        lines += [
            f"static_assert(static_cast<int>(Nccl{kind}::{ours}) == nccl{theirs});"
            for ours, theirs in names.items()
        ]
    for name in NAMES:
        member = re.sub(r"([A-Z])", r"_\1", name.removeprefix("nccl")).lower().removeprefix("_")
        lines.append(
            f"static_assert(Same<decltype(abi::Functions::{member}), "
            f'decltype(&::{name})>::value, "{name}");'
        )
    # Absent in older packages.
    lines.append("#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)")
    lines.append("static_assert(static_cast<int>(NcclResult::timeout) == ncclTimeout);\n#endif")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{CSRC}", "-isystem", str(include)]
    command += ["-isystem", str(programs.cuda_include()), "-x", "c++", "-"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else ""


def missing(library: Path | str) -> list[str]:
    """The functions of abi.h that the library does not export."""
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    exported = set(re.findall(r" [TW] (\w+)", done.stdout))
    return [name for name in NAMES if name not in exported]


def download(version: str, folder: Path) -> None:
    """Writes nccl.h and libnccl.so.2 of this version of the package to the folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, f"nvidia-nccl-{version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        for name in ("include/nccl.h", "lib/libnccl.so.2"):
            (folder / Path(name).name).write_bytes(files.read(f"nvidia/nccl/{name}"))


def main(versions: list[str]) -> int:
    """Prints what differs in each version; 1 if anything does."""
    failed = 0
    for version in versions:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            download(version, folder)
            errors, absent = mismatch(folder), missing(folder / "libnccl.so.2")
        print(f"{version}: {'agrees' if not errors and not absent else 'DIFFERS'}", flush=True)
        if errors or absent:
            print(errors, *absent, sep="\n")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(VERSIONS)))
