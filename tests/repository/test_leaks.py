"""Tests of the fixture no_leaks of conftest.py: an injected leak of each kind fails its test; a
resource that disappears a moment later, or existed before, fails none.

The injected tests run in a separate pytest, with the same fixture.
"""

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT, SUPPORT, TESTS

HEAD = """
import mmap, os, socket, subprocess, sys, tempfile, threading
import numpy as np
import pytest
import pycomm
from benchmarks.support import leak_check
from pycomm import _core
from pycomm.testing import run_ranks

leak_check.LEAVE_S = 2.0
kept = []

@pytest.fixture(scope="module", autouse=True)
def opened_before():
    with socket.socket() as opened:
        yield opened
"""
LEAKS = {
    "descriptor": ("kept.append(socket.socket())", "1 more descriptors: socket x1"),
    "thread": (
        "threading.Thread(target=threading.Event().wait, name='idler', daemon=True).start()",
        "1 more threads: idler x1",
    ),
    "native_thread": (
        "kept.append(_core.TcpStore.serve('127.0.0.1', 0, 16 * 'k'))",
        "1 more threads: pycomm-store x1",
    ),
    "child": (
        "kept.append(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1))",
        "1 more children: ",
    ),
    "mapping": (
        """
        fd = os.memfd_create("pycomm-some")
        os.ftruncate(fd, 4096)
        kept.append(mmap.mmap(fd, 4096))
        os.close(fd)
        """,
        "1 more mappings: memfd:pycomm-some x1",
    ),
    "file": (
        "os.close(os.open(tempfile.gettempdir() + '/pycomm-some', os.O_CREAT))",
        "1 more files: ",
    ),
    "group": (
        "kept.append(run_ranks(2, lambda group: group.split(0)))",
        "memfd:pycomm-flight-recorder x2",
    ),
}
SOUND = {
    "calls": "run_ranks(2, lambda group: pycomm.all_reduce(np.ones(9), group=group))",
    "moment": "threading.Timer(0.1, int).start()",
    "font": "kept.append(open(tempfile.gettempdir() + '/some.ttf', 'w'))",
    "gpu": """
        leak_check.GPUS = tempfile.gettempdir() + "/nvidia"
        kept.append(open(leak_check.GPUS + "0", "w"))
        """,
    "cycle": """
        cycle = [socket.socket()]
        cycle.append(cycle)
        """,
    # Each becomes garbage when the one before it is freed: arrays hide their references. It is the
    # last test, as no time remains to wait for anything else.
    "chain": """
        leak_check.LEAVE_S = 0.0
        link = socket.socket()
        for _ in range(5):
            hidden = np.empty(1, object)
            hidden[0] = link
            link = [hidden]
            link.append(link)
        """,
}


@pytest.mark.no_attack("a store that it leaves open would count connections as descriptors")
def test_every_kind_of_leak_is_detected_and_nothing_else(tmp_path: Path) -> None:
    bodies = {**{name: body for name, (body, _) in LEAKS.items()}, **SOUND}
    tests = [
        f"def test_{name}():\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
        for name, body in bodies.items()
    ]
    (tmp_path / "test_planted.py").write_text("\n\n".join([HEAD, *tests]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    ways = os.pathsep.join(map(str, (TESTS, SUPPORT, ROOT)))
    done = finished(
        [*command, "--no-attack", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ways, "TMPDIR": str(tmp_path)},
    )
    found = re.findall(r"^ERROR .*test_planted\.py::test_(\w+)", done.stdout, re.MULTILINE)
    assert sorted(found) == sorted(LEAKS), done.stdout
    for name, (_, message) in LEAKS.items():
        assert message in done.stdout, (name, done.stdout)
    assert f"{len(bodies)} passed, " in done.stdout
    assert f", {len(LEAKS)} errors" in done.stdout
