"""The network of simulated hosts is removed, however the process that made it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from pycomm.bench.support.netns import Network, missing

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

PROGRAM = """
import signal, sys
from pycomm.bench.support.netns import Network
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
with Network(2) as net:
    print("made", flush=True)
    signal.pause()
"""


def _namespaces(pid: int) -> list[str]:
    names = [path.name for path in Path("/run/netns").glob(f"pyc{pid}n*")]
    return names + [path.name for path in Path("/etc/netns").glob(f"pyc{pid}n*")]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_network_is_removed(how: signal.Signals) -> None:
    line = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert len(_namespaces(process.pid)) == 5
        process.send_signal(how)
        status = process.wait(timeout=60)
        assert status == (-how if how == signal.SIGKILL else 128 + how)
    if how == signal.SIGKILL:
        with Network(1):
            pass
    assert _namespaces(process.pid) == []
