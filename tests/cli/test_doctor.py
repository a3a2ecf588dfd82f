"""`pycomm doctor`: the checks of a host, links between ranks, and two hosts that differ."""

import dataclasses
import json
import re
import resource
import sys
from pathlib import Path

import pytest
from paths import ROOT

import pycomm
from pycomm.__main__ import main
from pycomm.bench.support.netns import Network, missing
from pycomm.observe import doctor, host_checks, info, link_checks
from pycomm.observe.host_checks import FAILED, OK, WARNING
from pycomm.observe.link_checks import Link
from pycomm.testing import run_ranks

LINK = Link(a=0, b=1, transport="tcp", latency_us=10.0, rate_gb_s=1.0, clock_ms=0.0)
WHY_NOT = missing()
ROW = re.compile(r"^  (\d), (\d) +.*? (shm|tcp) +[\d.]+ +[\d.]+ ", re.MULTILINE)
LINE = re.compile(r"^  (ok|warning|FAILED) +(.+?)  +(.+)$", re.MULTILINE)


def test_a_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    shown = capsys.readouterr().out
    lines = {name: (status, text) for status, name, text in LINE.findall(shown)}
    assert lines["transport shm"] == (OK, "two ranks communicate")
    assert lines["torch backend"] == (OK, "loaded")
    assert info.version("torch") in lines["versions"][1]
    assert {"transport tcp", "open files", "processors", "memory", "address", "GPUs"} < lines.keys()
    failed = [name for name, (status, _) in lines.items() if status == FAILED]
    assert status == bool(failed)
    assert f"{len(lines)} checks: {len(failed)} failed" in shown


def test_a_failed_check_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "why_not", lambda name: "no memfd" if name == "shm" else "")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    stored = json.loads(capsys.readouterr().out)
    (found,) = stored["found"].values()
    assert {"name": "transport shm", "status": FAILED, "text": "no memfd"}.items() <= next(
        one.items() for one in found if one["name"] == "transport shm"
    )
    assert (stored["links"], stored["failed"]) == ([], 1)
    assert "FAILED   transport shm    no memfd\n" in shown
    assert "allow memfd_create" in shown
    assert " checks: 1 failed, " in shown


@pytest.mark.parametrize(
    ("ranks", "usable", "quota", "status", "part"),
    [
        (2, 2, None, OK, "2 for 2 ranks"),
        (3, 2, None, WARNING, "2 for 3 ranks"),
        (1, 4, 1.5, WARNING, "4 for 1 rank, and a quota of 1.5"),
        (1, 4, 4.0, OK, "4 for 1 rank"),
    ],
)
def test_processors(ranks: int, usable: int, quota: float | None, status: str, part: str) -> None:
    found = host_checks.processors(ranks, usable, quota)
    assert (found.status, found.text) == (status, part)
    assert bool(found.advice) == (status != OK)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("nonsense", None)]
)
def test_quota_of_a_control_group(text: str, quota: float | None, tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    assert host_checks.quota(file) is None
    file.write_text(text + "\n")
    assert host_checks.quota(file) == quota


@pytest.mark.parametrize(
    ("limit", "status"), [(resource.RLIM_INFINITY, OK), (10_000, OK), (300, WARNING), (60, FAILED)]
)
def test_open_files(limit: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    found = host_checks._descriptors(100)
    assert found.status == status
    assert found.advice == ("" if status == OK else "ulimit -n 456, for 100 ranks")


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    for mib, status in ((400, WARNING), (4000, OK)):
        file.write_text(f"MemTotal:  9 kB\nMemAvailable:   {mib * 1024} kB\n")
        assert host_checks._memory(file).status == status


def test_an_address_of_another_host_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    found = host_checks._address()
    assert found.status == FAILED
    assert "no-such-interface" in found.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert host_checks._address().status == OK


def test_a_torch_without_a_module_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks._torch_backend().status == OK
    monkeypatch.setattr(host_checks._c10d, "versions", lambda: [(2, 11)])
    found = host_checks._torch_backend()
    assert found.status == WARNING
    assert "(for: 2.11)" in found.text
    assert found.advice.startswith("build it: pip install")


def test_pairs_join_ranks_of_a_host_and_hosts() -> None:
    assert link_checks.pairs(["x"]) == []
    assert link_checks.pairs(["x", "x", "y", "x", "y", "z"]) == [
        *[(0, 1), (2, 4)],
        *[(0, 2), (0, 5), (2, 5)],
    ]
    many = link_checks.pairs([str(i) for i in range(20)])
    assert many == [*((i, i + 1) for i in range(19)), (19, 0)]


def test_slow_links_and_clocks_are_warnings() -> None:
    alike = [LINK, dataclasses.replace(LINK, b=2), dataclasses.replace(LINK, a=1, b=2)]
    assert doctor.check_links(alike) == []
    assert doctor.check_links([]) == []
    slow = dataclasses.replace(LINK, a=2, b=3, rate_gb_s=0.4)
    found = doctor.check_links([*alike, slow, dataclasses.replace(slow, transport="shm")])
    assert [(one.name, one.status) for one in found] == [("slow tcp", WARNING)]
    assert found[0].text == "ranks 2 and 3: 0.40 GB/s, median 1.00"
    late = dataclasses.replace(LINK, clock_ms=-250.0)
    assert doctor.check_links([LINK, late])[0].text == "ranks 0 and 1 differ by -250 ms"


def test_links_are_measured() -> None:
    def program(group: pycomm.Group) -> list[Link | None]:
        return list(link_checks.measure(group, [(0, 1), (2, 1)]))

    by_rank = run_ranks(3, program, transport="tcp")
    assert by_rank[1] == by_rank[2] == [None, None]
    for link, ends in zip(by_rank[0], ((0, 1), (2, 1)), strict=True):
        assert link is not None
        assert (link.a, link.b, link.transport) == (*ends, "tcp")
        assert link.latency_us > 0
        assert link.rate_gb_s > 0
        assert abs(link.clock_ms) < 1000  # one clock


def test_hosts_of_one_name_have_numbers() -> None:
    assert doctor.labels(["x", "x", "y"], [0, 0, 1]) == ["x", "x", "y"]
    assert doctor.labels(["x", "x", "y"], [0, 1, 2]) == ["x #0", "x #1", "y"]


def test_different_versions_are_a_warning() -> None:
    assert doctor.compare_versions(["pycomm 1", "pycomm 1"]).status == OK
    found = doctor.compare_versions(["pycomm 1", "pycomm 2", "pycomm 1"])
    assert (found.status, found.text) == (WARNING, "pycomm 1; pycomm 2")


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_hosts_are_checked_and_measured(tmp_path: Path) -> None:
    base = [sys.executable, "-m", "pycomm", "launch", "--nnodes=2", "--nproc=2"]
    with Network(2, ipv6=False) as net:
        base.append(f"--rdzv-endpoint={net.hosts[0].ipv4()}:29400")
        started = [
            host.start(
                [*base, f"--log-dir={tmp_path / host.name}", "-m", "pycomm", "doctor"],
                {"PYTHONPATH": str(ROOT), "PYCOMM_SECRET": "of this test and long enough"},
            )
            for host in net.hosts
        ]
        outputs = []
        for process in started:
            out, err = process.communicate(timeout=150)
            assert process.returncode in (0, 1), out + err
            outputs.append(out)
    shown = next(out for out in outputs if "all hosts" in out)
    assert shown.count("  ok       transport tcp") == 2  # once for each host
    assert ROW.findall(shown) == [("0", "1", "shm"), ("2", "3", "shm"), ("0", "2", "tcp")]
    assert "ok       equal versions   on all ranks" in shown
