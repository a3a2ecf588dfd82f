"""Metrics of `pycomm top` for Prometheus: the file and the server, read by its own parser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm.__main__ import main
from pycomm.errors import Unsupported
from pycomm.observe import flight_recorder, prometheus
from pycomm.testing import run_ranks

LIMIT_S = 60.0
NAME = "world/0.0"  # of the subgroup
parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
PAGE = Path(__file__).parents[2] / "docs" / "observability.md"


def parsed(text: str) -> dict[str, dict[str, Any]]:
    """By metric and rank, with the state of its labels: the values of this process's group."""
    found: dict[str, dict[str, Any]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels["pid"] == str(os.getpid()) and sample.labels["group"] == NAME:
                key = " ".join(filter(None, map(sample.labels.get, ("rank", "state"))))
                found.setdefault(sample.name, {})[key] = sample.value
    return found


def named(group: pycomm.Group, body: Any, *args: Any) -> Any:
    """The result of body() on rank 0, while rank 1 is inside the call after two sums."""
    part = group.split(0)
    assert part is not None
    for _ in range(2):
        pycomm.all_reduce(np.ones(1000, np.float32), group=part)
    found = None
    if group.rank == 0:
        end = time.monotonic() + LIMIT_S
        while not any(
            one.name == NAME and one.pid == os.getpid() and one.rank == 1 and one.is_inside()
            for one in flight_recorder.running()
        ):
            assert time.monotonic() < end, "rank 1 is not inside the barrier"
        found = body(*args)
    pycomm.barrier(group=part)
    part.close()
    return found


def run_named(body: Any, *args: Any) -> Any:
    """named() on two ranks, which are threads of this process."""
    return run_ranks(2, named, body, *args)[0]


def written(file: Path) -> tuple[str, str]:
    """The file after two commands, and what a program reads that opened it between them: another
    file, which the second command does not change."""
    command = [sys.executable, "-m", "pycomm", "top", "--textfile", str(file), "--once"]
    command += ["--group", NAME]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    with file.open() as before:
        subprocess.run(command, check=True, timeout=LIMIT_S)
        assert os.fstat(before.fileno()).st_ino != file.stat().st_ino
        return file.read_text(), before.read()


def test_the_file_has_all_documented_metrics_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pycomm.prom"
    now, before = run_named(written, file)
    assert list(tmp_path.iterdir()) == [file]
    found = parsed(now)
    assert parsed(before).keys() == found.keys()
    assert parsed(before)["pycomm_calls_total"] == found["pycomm_calls_total"]
    documented = re.findall(r"`(pycomm_\w+)`", PAGE.read_text().partition("| metric |")[2])
    assert sorted(found) == sorted(documented)
    assert found["pycomm_calls_total"] == {"0": 3, "1": 4}  # and the agreement of split()
    assert found["pycomm_group_size"] == {"0": 2, "1": 2}
    assert (
        found["pycomm_current_call_seconds"]["0"] == 0 < found["pycomm_current_call_seconds"]["1"]
    )
    assert found["pycomm_sent_bytes_total"]["0"] >= 2 * 4000
    assert found["pycomm_rank_state"].keys() == {
        f"{rank} {state}" for rank in "01" for state in ("broken", "stopped", "late")
    }
    assert found["pycomm_rank_state"]["1 broken"] == 0


def served() -> tuple[str, str]:
    """The metrics from a server, and its address."""
    command = [sys.executable, "-m", "pycomm", "top", "--listen", "0", "--group", NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=LIMIT_S) as reply:
                text = reply.read().decode()
            port = int(address.rpartition(":")[2].partition("/")[0])
            with socket.socket() as other:  # no other address of this host
                assert other.connect_ex(("127.0.0.2", port)) != 0
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(LIMIT_S) == 0
    return text, address


def test_the_server_listens_on_loopback() -> None:
    text, address = run_named(served)
    assert address.startswith("http://127.0.0.1:")
    assert parsed(text)["pycomm_calls_total"] == {"0": 3, "1": 4}  # and the agreement of split()


def test_without_the_package_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(Unsupported, match=r'pip install "prometheus_client>=0.20"'):
        prometheus.export(None, tmp_path, None, 1.0)
    assert main(["top", "--textfile", str(tmp_path / "x"), "--once"]) == 1
    assert "pycomm top: metrics need prometheus_client" in capsys.readouterr().err
