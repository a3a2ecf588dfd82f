"""NCCL without a GPU: the real library up to the missing driver, and unusable libraries.

A stub is a library whose functions have NCCL's names and do nothing. A library that dlopen loaded
belongs to the whole process, so that the real one is loaded in a separate process.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest

from pycomm._core_api import nccl
from pycomm.errors import Unsupported

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.timeout(180),
]

CSRC = programs.CSRC
NAMES = re.findall(r'"(nccl[A-Z]\w+)"\)', (CSRC / "nccl" / "abi.h").read_text())


def stub(folder: Path, version: int = 21801, lacks: str = "", result: int = 0) -> str:
    """A compiled library with all functions but one; its file."""
    lines = [f"int ncclGetVersion(int *v) {{ *v = {version}; return {result}; }}"]
    lines += [f"int {n}(void) {{ return 0; }}" for n in NAMES if n not in ("ncclGetVersion", lacks)]
    folder.mkdir(exist_ok=True)
    file = folder / "libnccl.so.2"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-x", "c", "-", "-o", file]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    return str(file)


def load(*places):
    from pycomm import _cuda

    return _cuda.nccl.load(list(places))


def alone(code: str) -> str:
    """The output of a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, timeout=120, cwd=CSRC.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_real_library_loads_and_runs_up_to_the_driver():
    output = alone("""if True:
        from pycomm import _cuda
        from pycomm._core_api import nccl
        from pycomm.errors import Unsupported

        loaded, package, _ = nccl.places()
        try:
            _cuda.nccl.load([loaded])
        except Unsupported as error:
            print(error)
        library = _cuda.nccl.load([loaded, package])
        print(library.version, library.origin)
        print(_cuda.nccl.load([loaded]).origin)
        one, other = library.unique_id(), library.unique_id()
        print(len(one), one != other)
        try:
            library.try_communicator()
            print("a communicator")
        except Unsupported as error:
            print(error)
    """).splitlines()
    version = importlib.metadata.version(nccl.PACKAGE)
    file = nccl.places()[1][1]
    assert output[0].endswith("such as torch's: none); pip install nvidia-nccl-cu13")
    assert output[1:4] == [f"{version} {file}", file, "128 True"]
    if os.path.exists("/proc/driver/nvidia/version"):
        assert output[4] == "a communicator"
    else:  # in NCCL's words, the library's name, and CUDA's error
        assert output[4].startswith("ncclCommInitRankConfig: unhandled cuda error")
        assert f"(NCCL {version}, {file})" in output[4]
        assert "; NCCL requires NVIDIA's driver and a GPU: " in output[4]


def test_info_names_version_and_file():
    output = alone("from pycomm.observe import info; print(dict(info._built())['nccl'])")
    assert output == f"{importlib.metadata.version(nccl.PACKAGE)}, {nccl.places()[1][1]}\n"


def test_oldest_version_with_all_functions_is_accepted(tmp_path):
    file = stub(tmp_path / "good")
    library = load(("a stub", file, False))
    assert (library.version, library.origin) == ("2.18.1", file)


def test_unusable_libraries_are_named_and_skipped(tmp_path):
    """Each stub has the same soname: one left open would be found for the next path."""
    old = stub(tmp_path / "old", version=21800)
    outdated = stub(tmp_path / "ancient", version=2804)
    lacking = stub(tmp_path / "lacking", lacks="ncclCommAbort")
    broken = stub(tmp_path / "broken", result=3)
    absent = str(tmp_path / "absent.so")
    bad = [
        *[("old", old, False), ("ancient", outdated, False), ("lacking", lacking, False)],
        *[("broken", broken, False), ("absent", absent, False), ("package", "", False)],
    ]
    with pytest.raises(Unsupported) as raised:
        load(*bad, ("left open", old, True))
    assert str(raised.value) == (
        f"NCCL 2.18.1 or newer was not found (old: {old} is NCCL 2.18.0; "
        f"ancient: {outdated} is NCCL 2.8.4; lacking: it has no ncclCommAbort; "
        f"broken: ncclGetVersion returned 3; absent: {absent}: cannot open shared object file: "
        "No such file or directory; package: not installed; left open: none); "
        "pip install nvidia-nccl-cu13"
    )
    good = stub(tmp_path / "good", version=22807)
    assert load(*bad, ("good", good, False)).version == "2.28.7"


@pytest.mark.parametrize(
    "setting", ["NCCL_COMM_SPLIT_SHARE_RESOURCES=0", "NCCL_COMM_BLOCKING=0", "NCCL_COMM_BLOCKING=1"]
)
def test_settings_that_prevent_an_abort_are_refused(setting, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    with pytest.raises(Unsupported, match=f"{setting}: a call that waits .*; unset it"):
        nccl.load()


def test_every_function_is_needed():
    assert len(NAMES) == len(set(NAMES)) == 17


def test_missing_package_is_reported(monkeypatch):
    monkeypatch.setattr(nccl, "PACKAGE", "no-such-package")
    assert nccl.places()[1][1] == ""


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


def test_types_match_the_header(tmp_path):
    """Of the package: numbers, layouts, and each function's arguments by size and kind."""
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
    include = Path(nccl.places()[1][1]).parent.parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{CSRC}", "-isystem", include]
    command += ["-isystem", programs.cuda_include(), "-x", "c++", "-"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
