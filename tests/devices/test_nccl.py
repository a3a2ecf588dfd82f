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

import nccl_abi
import programs
import pytest
from finished import finished
from nccl_abi import NAMES

from pycomm import config
from pycomm._core_api import nccl
from pycomm.errors import Unsupported

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.timeout(180),
]

CSRC = programs.CSRC


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
    done = finished([sys.executable, "-c", code], timeout=120, cwd=CSRC.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_real_library_loads_and_runs_up_to_the_driver():
    output = alone("""if True:
        from pycomm import _core, _cuda  # _core registers the types of errors
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
@pytest.mark.parametrize("where", ["environment", ".nccl.conf", "another.conf"])
def test_settings_that_prevent_an_abort_are_refused(setting, where, monkeypatch, tmp_path):
    """Also those of NCCL's files, which it reads at its first call."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if where == "environment":
        monkeypatch.setenv(*setting.split("="))
    else:
        (tmp_path / where).write_text(f"# NCCL_COMM_BLOCKING=7\nNCCL_DEBUG=INFO\n {setting} \n")
    if where == "another.conf":
        monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / where))
        (tmp_path / ".nccl.conf").write_text("NCCL_COMM_BLOCKING=8\n")  # not read
    with pytest.raises(Unsupported, match=f"{setting}: a call that waits .*; unset it"):
        nccl.load()
    monkeypatch.setenv(setting.partition("=")[0], "")  # before a file
    assert config.nccl_prevents_aborts() == ""


def test_every_function_is_needed():
    assert len(NAMES) == len(set(NAMES)) == 17


def test_missing_package_is_reported(monkeypatch):
    monkeypatch.setattr(nccl, "PACKAGE", "no-such-package")
    assert nccl.places()[1][1] == ""


def test_types_match_the_header():
    """Of the installed package; `make nccl` checks others, the oldest first."""
    file = Path(nccl.places()[1][1])
    assert nccl_abi.mismatch(file.parent.parent / "include") == ""
    assert nccl_abi.missing(file) == []


def test_wrong_types_and_missing_functions_are_found(tmp_path):
    """Of a header and a library that differ from the installed ones in one place each."""
    include = Path(nccl.places()[1][1]).parent.parent / "include"
    text = (include / "nccl.h").read_text()
    for old, new in (
        (r"\bint cgaClusterSize;", "long long cgaClusterSize;"),
        (r"\bncclRemoteError\s*=\s*6", "ncclRemoteError = 66"),
        (r"\bncclUint64\s*=\s*5", "ncclUint64 = 55"),
        (r"\bncclSend\(const void\* sendbuff, size_t", "ncclSend(const void* sendbuff, int"),
    ):
        changed, found = re.subn(old, new, text)
        assert found > 0
        (tmp_path / "nccl.h").write_text(changed)
        assert "static assertion failed" in nccl_abi.mismatch(tmp_path)
    assert nccl_abi.missing(stub(tmp_path / "lacking", lacks="ncclCommSplit")) == ["ncclCommSplit"]
