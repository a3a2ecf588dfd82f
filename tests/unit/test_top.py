"""`pycomm top`: ranks that run, wait or are stopped, as another process sees them."""

import dataclasses
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import pycomm
from pycomm.observe import flight_recorder, gpus, top
from pycomm.testing import run_ranks

LIMIT_S = 60.0  # against hanging


def ours(sample: top.Sample) -> list[flight_recorder.FlightRecord]:
    """The entries of this process's newest group; other tests may have left some."""
    mine = [one for one in sample.flight_records if one.pid == os.getpid()]
    newest = max(mine, key=lambda one: one.steady_ns, default=None)
    return [one for one in mine if newest and one.id == newest.id]


def seen(now: top.Sample, before: top.Sample | None = None) -> list[str]:
    """The lines of the view that show this process's group."""
    for sample in filter(None, (now, before)):
        sample.flight_records = ours(sample)
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(top.view(now, before))
    return capture.get().splitlines()


def wait_until_inside(rank: int, verb: str) -> top.Sample:
    """A sample in which the rank of this process's group is inside such a call."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        sample = top.Sample()
        for one in ours(sample):
            inside = one.rank == rank and one.is_inside()
            if inside and flight_recorder.title(one.records[-1]).startswith(verb):
                return sample
    raise AssertionError(f"rank {rank} is inside no {verb}")


def watched(group: pycomm.Group) -> Any:
    lines: list[str] = []
    x = np.ones(1000, np.float32)
    for _ in range(100):
        pycomm.all_reduce(x, "max", group=group)
    if group.rank == 1:
        now = wait_until_inside(0, "broadcast")
        waits = next(one for one in ours(now) if one.is_inside())
        # As if sampled ten seconds later.
        now.at_ns = int(waits.records[-1]["begun"]) + 10_000_000_000
        lines = seen(now)
    pycomm.broadcast(x, 1, group=group)
    return lines


def test_ranks_inside_a_call_and_late_ranks() -> None:
    lines = run_ranks(2, watched)[1]
    assert 'group "world", 2 ranks' in lines[0]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines[4:6]]
    assert [row[1] for row in rows] == ["0", "1"]
    assert rows[0][2] == rows[1][2] == str(os.getpid())
    assert rows[0][6:8] == ["", "broadcast(float32, 1,000, root 1) for 10.0 s"]
    assert rows[1][6] == "late"
    assert re.match(r"outside of calls for [0-9.]+ s, after all_reduce\(float32, 1,000", rows[1][7])


def rates(group: pycomm.Group) -> list[str]:
    before = top.Sample()
    for _ in range(500):
        pycomm.barrier(group=group)
    now = top.Sample()
    now.at_ns = before.at_ns + 1_000_000_000
    return seen(now, before)


def test_rates_are_computed_between_two_samples() -> None:
    row = next(line for line in run_ranks(1, rates)[0] if str(os.getpid()) in line)
    assert row.split("│")[3].strip() == "500"


class FakeNvml(types.ModuleType):
    """In place of pynvml: GPU 0 runs this process, GPU 1 supports no query, GPU 2 is lost."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.driver = driver

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - NVML's name
        return self._supported(index, index < 2, index)

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802 - NVML's name
        return f"model [/b] {handle}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802 - NVML's name
        return types.SimpleNamespace(busId=f"00000000:{handle + 10:02X}:00.0")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802 - NVML's name
        return self._supported(handle, handle == 0, types.SimpleNamespace(gpu=93, memory=41))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802 - NVML's name
        memory = types.SimpleNamespace(used=3 << 29, total=80 << 30)
        return self._supported(handle, handle == 0, memory)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:  # noqa: N802 - NVML's name
        pids = (os.getpid(), os.getppid())  # the parent is no rank
        return self._supported(handle, handle == 0, [types.SimpleNamespace(pid=p) for p in pids])

    def _supported(self, handle: int, supported: bool, value: Any) -> Any:
        if not supported:
            raise self.NVMLError(f"Not Supported by {handle}")
        return value


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    gpus.load_nvml.cache_clear()
    yield fake
    gpus.load_nvml.cache_clear()


def gpu_lines(_: pycomm.Group) -> list[str]:
    lines = seen(top.Sample())
    at = [i for i, line in enumerate(lines) if "GPUs of this host" in line]
    return lines[at[0] :] if at else []


def test_gpus_are_shown_with_nvml(nvml: FakeNvml) -> None:
    lines = run_ranks(1, gpu_lines)[0]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[4:-1]]
    assert rows == [
        ["0", "93 %", "1.5 of 80.0 GiB", str(os.getpid()), "model [/b] 0, 0000:0a:00.0"],
        ["1", "", "", "", "model [/b] 1, 0000:0b:00.0"],
    ]


def test_no_gpus_are_shown_without_a_driver_or_the_package(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.driver = False
    assert run_ranks(1, gpu_lines)[0] == []
    gpus.load_nvml.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib, "import_module", None)
    assert gpus.running() == []


def test_fake_nvml_has_the_functions_of_the_package() -> None:
    real = importlib.import_module("pynvml")
    used = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert "nvmlInit" in used
    assert all(callable(getattr(real, name)) for name in used)


def narrow(_: pycomm.Group) -> list[str]:
    sample = top.Sample()
    sample.flight_records = ours(sample)
    console = Console(width=60, no_color=True)
    with console.capture() as capture:
        console.print(top.view(sample))
    return capture.get().splitlines()


def test_a_narrow_terminal_has_a_row_for_each_rank() -> None:
    pycomm_lines = run_ranks(1, narrow)[0]
    assert max(map(len, pycomm_lines)) <= 60
    assert "MB/s sent" not in pycomm_lines[2]
    assert [cell.strip() for cell in pycomm_lines[2].split("┃")[1:3]] == ["rank", "calls/s"]
    assert pycomm_lines[4].split("│")[1].strip() == "0"


def named(group: pycomm.Group) -> list[tuple[str, str]]:
    """The groups of this process that `pycomm top --json` shows with some filters."""
    part = group.split(0)
    assert part is not None
    found = []
    for words in (
        (),
        ("--group", "world/*"),
        ("--program", "no such program"),
        ("--program", "py"),
    ):
        command = [sys.executable, "-m", "pycomm", "top", "--once", "--json", *words]
        shown = json.loads(subprocess.check_output(command, timeout=LIMIT_S))
        names = [
            one["name"]
            for one in shown["groups"]
            if one["ranks"][0]["pid"] == os.getpid() and one["size"] == 1
        ]
        found.append((" ".join(words), " ".join(sorted(set(names)))))
    part.close()
    return found


def test_groups_are_shown_by_name_and_by_program() -> None:
    shown = dict(run_ranks(1, named)[0])
    assert shown == {
        "": "world world/0.0",
        "--group world/*": "world/0.0",
        "--program no such program": "",
        "--program py": "world world/0.0",
    }


STOPS = "import os, signal, pycomm; pycomm.init(); os.kill(os.getpid(), signal.SIGSTOP)"


def test_stopped_process_is_shown_and_a_dead_one_is_not() -> None:
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM_", "RANK", "WORLD"))}
    process = subprocess.Popen([sys.executable, "-c", STOPS], env=alone)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        done = subprocess.run(
            [sys.executable, "-m", "pycomm", "top", "--once"],
            *(), env={**alone, "COLUMNS": "200"}, capture_output=True, text=True, check=True,
            timeout=LIMIT_S,
        )  # fmt: skip
        row = next(line for line in done.stdout.splitlines() if f" {process.pid} " in line)
        assert "stopped" in row
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    assert all(one.pid != process.pid for one in flight_recorder.running())


def test_a_closed_group_is_not_shown() -> None:
    kept: list[pycomm.Group] = []

    def ids(group: pycomm.Group) -> set[int]:
        kept.append(group)
        return {one.id for one in ours(top.Sample())}

    (own,) = run_ranks(2, ids)[0]
    assert len(kept) == 2
    assert own not in {one.id for one in flight_recorder.running()}


def test_calls_that_are_overwritten_during_the_read_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = os.pread

    def during_calls(group: pycomm.Group) -> int:
        def pread(file: int, count: int, at: int) -> bytes:
            if count == flight_recorder.HEAD_BYTES:  # the second read, of the head alone
                pycomm.barrier(group=group)
            return read(file, count, at)

        for _ in range(300):
            pycomm.barrier(group=group)
        monkeypatch.setattr(os, "pread", pread)
        (found,) = ours(top.Sample())
        monkeypatch.undo()
        return len(found.records)

    # Of the last 256 one is overwritten, and the next one may be.
    assert run_ranks(1, during_calls) == [254]


def test_many_groups_share_descriptors_and_a_place_is_used_again() -> None:
    """A memory has 64 places."""

    def ids() -> set[int]:
        return {one.id for one in flight_recorder.running() if one.pid == os.getpid()}

    def ids_of_splits(group: pycomm.Group) -> list[set[int]]:
        found = []
        for _ in range(2):
            before = ids()
            parts = [group.split(0) for _ in range(66)]
            found.append(ids() - before)
            links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists()]
            assert sum("flight-recorder" in str(link) for link in links) == 2
            while parts:
                parts.pop().close()
        return found

    first, second = run_ranks(1, ids_of_splits)[0]
    assert len(first) == len(second) == 66
    assert not first & second


def read_in_part(group: pycomm.Group, name: str) -> str:
    """Beside a group whose name looks like markup: reads a memory of 8 GiB with the flight
    recorder's name, and returns the first line of the view."""
    fd = os.memfd_create("pycomm-flight-recorder")
    try:
        os.ftruncate(fd, 8 << 30)
        sample = top.Sample()
        one = ours(sample)[0]
        own = Path(one.source).read_bytes()
        os.pwrite(fd, own, 0)
        (same,) = flight_recorder._records_of(Path(f"/proc/self/fd/{fd}"))
        assert len(same.records) == len(one.records)
        sample.flight_records = [dataclasses.replace(one, name=name)]
        console = Console(width=200, no_color=True)
        with console.capture() as capture:
            console.print(top.view(sample))
        return capture.get().splitlines()[0]
    finally:
        os.close(fd)


def test_large_memory_is_read_partially_and_names_are_escaped() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), limit[1]))  # 8 GiB do not fit
    try:
        title = run_ranks(1, read_in_part, "[/b] [red]x")[0]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert title.startswith('group "[/b] [red]x", 1 ranks')
