"""The backend's modules for the versions of torch: their headers, compilation and selection."""

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from finished import finished
from paths import ROOT
from sample import of_the_day

from pycomm import _c10d
from pycomm.errors import Unsupported
from tools import torch_headers


def wheel() -> bytes:
    """A wheel with two headers, and content around them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("torch/lib/libtorch.so", bytes(5000))
        archive.writestr("torch/include/a.h", "first")
        archive.writestr("torch/include/c10/b.h", "second")
        archive.writestr("torch/version.py", "no header")
    return content.getvalue()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BaseHTTPRequestHandler]]:
    """A server of an index and of the wheel, in place of PyPI. `ranges`: whether it has ranges."""

    class Handler(BaseHTTPRequestHandler):
        ranges = True
        sent = 0

        def do_GET(self) -> None:
            body, status = index, 200
            if self.path.endswith(".whl"):
                body = wheel()
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
                if Handler.ranges and asked:
                    status = 206
                    first, last = int(asked[1]), int(asked[2])
                    where = f"bytes {first}-{last}/{len(body)}"
                    body = body[first : last + 1]
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", where)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    name = "torch-2.14.1-cp310-cp310-manylinux_2_28_x86_64.whl"
    files = [{"filename": name, "url": f"{address}/{name}"}, {"filename": "torch-2.9.0.tar.gz"}]
    index = json.dumps({"files": files}).encode()
    monkeypatch.setattr(torch_headers, "INDEX", f"{address}/simple/torch/")
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("block", [torch_headers.BLOCK, 50])
def test_headers_are_read_out_of_a_wheel(
    block: int, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_headers, "BLOCK", block)
    (url,) = torch_headers.wheels().values()
    torch_headers.download(url, tmp_path / "2.14.1")
    found = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {
        Path("2.14.1/include/a.h"): "first",
        Path("2.14.1/include/c10/b.h"): "second",
    }


def test_a_server_without_ranges_is_reported(served: Any, tmp_path: Path) -> None:
    served.ranges = False
    (url,) = torch_headers.wheels().values()
    with pytest.raises(SystemExit, match="does not support range requests"):
        torch_headers.download(url, tmp_path / "2.14.1")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_version_is_reported(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["torch_headers.py", "--versions", "2.99.0", "--into", str(tmp_path)]
    )
    with pytest.raises(SystemExit, match=r"has no torch 2\.99\.0"):
        torch_headers.main()


BUILT = ["{}.{}".format(*version) for version in _c10d.versions()]


OTHERS = [v for v in torch_headers.VERSIONS if v.rpartition(".")[0] not in BUILT]


@pytest.mark.parametrize("version", of_the_day(OTHERS, len(OTHERS)))
def test_the_backend_compiles_for_other_versions(version: str) -> None:
    """Checks types only; `make wheel` generates code."""
    into = ROOT / "build" / "torch_headers"
    command = [sys.executable, ROOT / "tools" / "torch_headers.py", "--versions", version]
    subprocess.run([*command, "--into", into], check=True, timeout=300, stdout=subprocess.DEVNULL)
    headers = into / version / "include"
    done = finished(
        [
            os.environ.get("CXX", "g++"),
            *("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"),
            *(f"-I{ROOT / 'csrc'}", "-isystem", str(headers)),
            *("-isystem", str(headers / "torch/csrc/api/include")),
            *("-isystem", sysconfig.get_paths()["include"]),
            "-DBACKEND_MODULE=torch_0_0",
            str(ROOT / "csrc" / "bindings" / "c10d.cpp"),
        ]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_module_fits_all_releases_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_c10d, "versions", lambda: [(2, 11), (2, 13)])
    for fits in ("2.11.0", "2.13.0+cpu", "2.13.7a0+git1234", "2.11.1.dev20260101+cu130"):
        assert _c10d.why_not(fits) == ""
    assert _c10d.why_not("2.10.1") == "torch 2.10.1 is too old: install torch 2.11 or newer"
    assert "for torch 2.12.1 (for: 2.11, 2.13); build it: " in _c10d.why_not("2.12.1")
    assert "for torch 3.0.0 (for: 2.11, 2.13); build it: " in _c10d.why_not("3.0.0")
    monkeypatch.setattr(_c10d, "versions", lambda: [(2, 13)])  # the oldest one is not too old
    assert "for torch 2.11.0 (for: 2.13); build it: " in _c10d.why_not("2.11.0")


def test_the_module_for_the_installed_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _c10d.load().Backend.__module__ == _c10d.load().__name__
    monkeypatch.setattr(_c10d.importlib.metadata, "version", lambda name: "2.99.0")
    with pytest.raises(Unsupported, match=r"not compiled for torch 2\.99\.0"):
        _c10d.load()


def test_a_module_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_c10d, "versions", lambda: [(2, 98)])
    monkeypatch.setattr(_c10d.importlib.metadata, "version", lambda name: "2.98.0")
    with pytest.raises(Unsupported, match=r"cannot be loaded with torch 2\.98\.0.*; build it: "):
        _c10d.load()


WITHOUT_A_MODULE = """
import torch, torch.distributed as dist
import pycomm
from pycomm import _c10d, torch_backend
from pycomm.testing import run_ranks
_c10d.versions = list
x = run_ranks(2, lambda group: pycomm.all_reduce(torch.ones(3), group=group).tolist())
assert x == [[2.0] * 3] * 2
net = torch.nn.Linear(4, 2)
pycomm.init()
pycomm.DataParallel(net)(torch.ones(1, 4)).sum().backward()
pycomm.shutdown()
assert not torch_backend.is_available()
try:
    dist.init_process_group("pycomm", rank=0, world_size=1, store=dist.HashStore())
except pycomm.errors.Unsupported as error:
    print(error)
"""


def test_without_a_module_all_but_the_backend_works() -> None:
    command = [sys.executable, "-c", WITHOUT_A_MODULE]
    done = finished(command, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "(for: no version); build it: pip install" in done.stdout
