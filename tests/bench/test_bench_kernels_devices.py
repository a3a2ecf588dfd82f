"""`pycomm bench kernels --device cuda` without a GPU: the whole command with emulated kernels,
whose times are meaningless, and with a stand-in for torch.cuda.
"""

import contextlib
import ctypes
import re
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from test_bench_kernels import ALONE, TRAINING, write_residuals
from without_gpus import python

from pycomm import _core
from pycomm._core_api import devices
from pycomm.bench.kernels import benchmark as kernels
from pycomm.bench.kernels import device_timing, libraries
from pycomm.bench.kernels.residuals import WORKERS
from pycomm.bench.kernels.table import Row
from pycomm.bench.support import summaries

PARAMETERS = 1200  # of a window
needs_nvcc = pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc")


class Event:
    """A torch event of a device that finishes everything immediately."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


class Graph:
    """A torch graph that has captured nothing."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def replay(self) -> None:
        self._notes.append("replay")


class TorchCuda:
    """The part of torch.cuda that places.Cuda uses. Records the order of events."""

    Event = Event

    def __init__(self, l2_bytes: int = 1 << 10) -> None:
        self.notes: list[str] = []
        self._gpu = SimpleNamespace(name="none", L2_cache_size=l2_bytes, total_memory=1 << 30)
        self.free = 1 << 30
        self._used: dict[int, Any] = {}  # pools

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, index: int) -> Any:
        assert index == 0
        return self._gpu

    def graph_pool_handle(self) -> Any:
        return weakref.WeakSet()  # of its graphs

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, 1 << 30

    def synchronize(self) -> None:
        self.notes.append("synchronize")

    def empty_cache(self) -> None:
        self.notes.append("empty_cache")

    def CUDAGraph(self) -> Any:  # noqa: N802 - torch's name
        return Graph(self.notes)

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any) -> Iterator[None]:
        if id(pool) in self._used and not pool:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # as torch 2.11 does
        self._used[id(pool)] = pool
        pool.add(graph)
        self.notes.append("begin capture")
        yield
        self.notes.append("end capture")


class Emulated(device_timing.Cuda):
    """CUDA kernels on the CPU. Nothing is captured: each replay is a call, whose result must be
    that of the first."""

    name = "emulated"
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__(TorchCuda())

    def captured(self, call: Any, step: int) -> Any:
        result: list[Any] = []

        def replay() -> None:
            given = call(step)
            result[:] = given if isinstance(given, list) else ()  # the loops have no result

        return result, replay


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = programs.emulated()
    module.set_order("forward", 1, 4)
    monkeypatch.setitem(device_timing.DEVICES, "cuda", Emulated)
    before = torch.get_num_threads(), _core.kernel_threads()
    with devices.override_kernels("cpu", module.kernels):
        yield module
    torch.set_num_threads(before[0])
    _core.set_kernel_threads(before[1])


def run(tmp_path: Path, *arguments: str) -> int:
    recorded = write_residuals(tmp_path / "residuals.npz", PARAMETERS)
    given = ["--device", "cuda", "--residuals", str(recorded), "--rounds", "1", "--threads", "1"]
    return kernels.main([*given, "--sizes", str(WORKERS * PARAMETERS), *arguments])


@needs_nvcc
def test_whole_command_with_emulated_kernels(
    tmp_path: Path, emulated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, drawn = tmp_path / "out.json", tmp_path / "out.png"
    emulated.take_traffic()
    status = run(
        tmp_path, "--peers", "eager,CUB,Triton,CuPy", "--json", str(stored), "--plot", str(drawn)
    )
    assert emulated.take_traffic()[2] > 100  # launches
    output = capsys.readouterr().out
    content: dict[str, Any] = summaries.read(stored)
    assert content["settings"]["device"] == "emulated"
    assert ", on emulated\n" in output
    rows = [Row(**row) for row in content["rows"]]
    ours = {row.kernel: row for row in rows if row.peer == "pycomm"}
    assert ours.keys() == (TRAINING | ALONE.keys()) - {"DGC"}
    assert {row.kernel for row in rows if not row.replayed} == {"unpack"}
    assert ours["dgc_step"].limit_bytes == 20 * WORKERS * PARAMETERS
    missing = {(one["kernel"], one["peer"]): one["why"] for one in content["missing"]}
    assert "host memory" in missing["DGC", "pycomm"]
    for name in ("CUB", "Triton", "CuPy"):
        assert missing["dgc_step", name]
        assert f"{name}   left out: {missing['dgc_step', name]}" in output
    assert drawn.stat().st_size > 10_000
    assert status == (1 if any(row.limit_percent > 103 for row in rows) else 0)


@needs_nvcc
def test_wrong_bit_on_the_device_fails_the_run(
    tmp_path: Path,
    emulated: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU kernels are correct: the device kernels are checked."""

    def wrong(*arguments: Any) -> None:
        emulated.kernels.norm(*arguments)
        out = arguments[2]
        ctypes.c_uint8.from_address(out).value ^= 1

    module = SimpleNamespace(**{**vars(emulated.kernels), "norm": wrong})
    with devices.override_kernels("cpu", module):
        assert run(tmp_path, "--peers", "") == 1
    assert "9600 elements: norm: pycomm and the reference differ" in capsys.readouterr().out


@needs_nvcc
def test_a_graph_that_gives_another_result_fails_the_command(
    tmp_path: Path,
    emulated: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that runs the call twice, for example: the call itself is correct."""

    class Twice(Emulated):
        def captured(self, call: Any, step: int) -> Any:
            result, replay = super().captured(call, step)
            return result, lambda: (replay(), replay())

    monkeypatch.setitem(device_timing.DEVICES, "cuda", Twice)
    assert run(tmp_path, "--peers", "") == 1
    assert "9600 elements: dgc_step: pycomm and the reference differ" in capsys.readouterr().out


@needs_nvcc
def test_bandwidth_loops_move_the_stated_bytes(emulated: Any) -> None:
    place = Emulated()
    for count in (1, 4_096, 9_001):
        emulated.take_traffic()
        for name, call in place.streams(count).items():
            call(0)
            loaded, stored, launches = emulated.take_traffic()
            if launches:
                whole = count // 4_096 * 4_096  # elements of the tiles; the rest is not counted
                assert [loaded, stored] == [each * whole for each in device_timing.STREAMS[name]]


# ---- timing by events and graphs -----------------------------------------------------------------


class Fake(device_timing.Cuda):
    """A GPU that supports only what torch.cuda is used for."""

    device = torch.device("cpu")


def test_a_call_is_captured_once_for_each_step_and_replayed() -> None:
    cuda = TorchCuda()
    calls: list[int] = []
    place = Fake(cuda)
    cuda.notes.clear()
    timer = place.timer(calls.append)
    for step in (0, 1, 0, 1):
        timer(step)
    assert calls == [0, 1]
    captured = ["begin capture", "end capture"]
    replayed = ["synchronize", "replay"]
    assert cuda.notes == [*captured, *replayed, *captured, *replayed, *replayed, *replayed]


def test_the_graphs_share_a_pool_that_outlives_them() -> None:
    """torch refuses a pool whose graphs are all gone."""
    place = Fake(TorchCuda())
    for _ in range(2):
        for step in range(2):
            assert place.result(lambda step: step + 1) == 1, step
        place.forget()


def test_the_cache_is_emptied_before_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads four times its bytes; writing would leave dirty lines to write back."""
    cuda = TorchCuda(l2_bytes=4_000)
    place = Fake(cuda)
    cuda.notes.clear()
    assert place._flushed.nbytes == 4 * 4_000
    flushed = place._flushed

    class Noted:
        def sum(self) -> torch.Tensor:
            cuda.notes.append("read")
            return flushed.sum()

    class NotedEvent(Event):
        def record(self) -> None:
            cuda.notes.append("event")
            super().record()

    monkeypatch.setattr(place, "_flushed", Noted())
    monkeypatch.setattr(cuda, "Event", NotedEvent, raising=False)
    place.timer(lambda _: cuda.notes.append("call"), waits=True)(0)
    assert cuda.notes == ["synchronize", "read", "event", "call", "event"]


# ---- others --------------------------------------------------------------------------------------


def test_unavailable_comparators_are_named_and_pycomm_is_required() -> None:
    """A comparator whose library raises, at its first call or when it is loaded."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    one = kernels.Comparison("topk", kernels.Traffic(4, 0), list, {"pycomm": abs, "CuPy": fails})
    (left,), (missing,) = kernels.able([one])
    assert left.calls.keys() == {"pycomm"}
    assert (missing.peer, missing.why) == ("CuPy", "RuntimeError: no such instruction")
    with pytest.raises(RuntimeError, match="no such instruction"):
        kernels.able([kernels.Comparison("topk", kernels.Traffic(4, 0), list, {"pycomm": fails})])


@needs_nvcc
def test_cub_compiles_and_reports_that_there_is_no_gpu() -> None:
    """It queries its workspace size, which needs a device."""
    assert libraries.cub("sm_90").cub_topk_name().startswith(b"Device")
    script = """
import ctypes
from pycomm.bench.kernels import libraries
library = libraries.cub("sm_90")
size = ctypes.c_size_t(0)
error = library.cub_topk(None, ctypes.byref(size), None, None, None, 1000, 10, None)
print(library.cub_error(error).decode())
"""
    done = python("-c", script)
    assert re.search(r"driver|device", done.stdout), done


def test_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    done = python("-m", "benchmarks", "kernels", "--device", "cuda")
    assert done.returncode == 2
    assert "--device cuda: no GPU can be used here: " in done.stderr
    with pytest.raises(SystemExit):
        kernels.main(["--peers", "CUB"])
    assert "'CUB' is not among eager, torch.compile, DGC authors" in capsys.readouterr().err
