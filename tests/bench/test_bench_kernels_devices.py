"""`pycomm bench kernels --device cuda` without a GPU: the whole command with emulated kernels,
whose times are meaningless, and with a stand-in for torch.cuda.
"""

import contextlib
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from bench_runs import stored
from test_bench_kernels import ALONE, TRAINING, write_residuals
from without_gpus import python

from pycomm import _core
from pycomm._core_api import devices
from pycomm.bench.kernels import benchmark as kernels
from pycomm.bench.kernels import device_timing
from pycomm.bench.kernels.command import main
from pycomm.bench.kernels.residuals import WORKERS
from pycomm.bench.kernels.table import Row

PARAMETERS = 1200  # of a window
needs_nvcc = pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc")


class Graph:
    """A torch graph that has captured nothing. Its bound method keeps it alive, as torch's does."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def replay(self) -> None:
        self._notes.append("replay")


class TorchCuda:
    """The part of torch.cuda that device_timing.Cuda uses, of a device that finishes everything
    immediately. `notes` has the order of the calls."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._used: dict[int, Any] = {}  # pools
        self.current_device = lambda: 0
        self.mem_get_info = lambda: (1 << 30, 1 << 30)
        self.graph_pool_handle = weakref.WeakSet  # of its graphs
        self.synchronize = lambda: self.notes.append("synchronize")
        self.empty_cache = lambda: self.notes.append("empty_cache")

    def get_device_properties(self, index: int) -> Any:
        assert index == 0
        return SimpleNamespace(name="none", L2_cache_size=4_000, total_memory=1 << 30)

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        assert enable_timing
        event = SimpleNamespace(synchronize=lambda: None)

        def record() -> None:
            self.notes.append("event")
            event.at = time.perf_counter()

        event.record, event.elapsed_time = record, lambda end: (end.at - event.at) * 1e3
        return event

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


class Fake(device_timing.Cuda):
    """A GPU that supports only what torch.cuda is used for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.cuda = TorchCuda()
        super().__init__(self.cuda)
        self.cuda.notes.clear()


class Emulated(Fake):
    """CUDA kernels on the CPU. Nothing is captured: each of `replays_each` replays is a call, whose
    result must be that of the first."""

    name = "emulated"
    replays_each = 1

    def captured(self, call: Any, step: int) -> Any:
        result: list[Any] = []

        def replay() -> None:
            for _ in range(self.replays_each):
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


@pytest.fixture
def words(tmp_path: Path) -> str:
    """The command line of a small run."""
    residuals = write_residuals(tmp_path / "residuals.npz", PARAMETERS)
    small = f"--rounds 1 --threads 1 --sizes {WORKERS * PARAMETERS}"
    return f"kernels --device cuda --residuals {residuals} {small}"


@needs_nvcc
def test_whole_command_with_emulated_kernels(
    words: str,
    tmp_path: Path,
    emulated: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "TOLERANCE", float("inf"))
    emulated.take_traffic()
    content = stored(tmp_path, f"{words} --peers eager,Triton,CuPy", plot=True)
    assert emulated.take_traffic()[2] > 100  # launches
    output = capsys.readouterr().out
    assert content["settings"]["device"] == "emulated"
    rows = [Row(**row) for row in content["rows"]]
    ours = {row.kernel: row for row in rows if row.peer == "pycomm"}
    assert ours.keys() == (TRAINING | ALONE) - {"DGC"}
    waiting = {row.kernel for row in rows if not row.replayed}
    assert waiting == {"unpack", "update_step", "read_groups"}  # for the length of a packet
    assert ours["dgc_step"].limit_bytes == 20 * WORKERS * PARAMETERS
    missing = {(one["kernel"], one["peer"]): one["why"] for one in content["missing"]}
    assert "host memory" in missing["DGC", "pycomm"]
    for name in ("Triton", "CuPy"):
        assert f"{name} is left out: {missing['dgc_step', name]}" in output


@needs_nvcc
def test_a_graph_that_gives_another_result_fails_the_command(
    words: str, emulated: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that runs the call twice, for example: the call itself is correct."""
    monkeypatch.setattr(Emulated, "replays_each", 2)
    assert main([*words.split()[1:], "--peers", ""]) == 1
    assert "9600 elements: dgc_step: pycomm and the reference differ" in capsys.readouterr().out


def test_a_call_is_captured_once_for_each_step_and_replayed() -> None:
    place, calls = Fake(), []
    timer = place.timer(calls.append)
    for step in (0, 1, 0, 1):
        timer(step)
    assert calls == [0, 1]
    captured, replayed = (
        ["begin capture", "end capture"],
        ["synchronize", "event", "replay", "event"],
    )
    assert place.cuda.notes == [*captured, *replayed, *captured, *3 * replayed]


def test_the_graphs_share_a_pool_that_outlives_them() -> None:
    """torch refuses a pool whose graphs are all gone."""
    place = Fake()
    for _ in range(2):
        for step in range(2):
            assert place.result(lambda step: step + 1) == 1, step
        place.forget()


def test_the_cache_is_emptied_before_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads four times its bytes; writing would leave dirty lines to write back."""
    place = Fake()
    assert place._flushed.nbytes == 4 * 4_000
    noted = SimpleNamespace(sum=lambda: place.cuda.notes.append("read"))
    monkeypatch.setattr(place, "_flushed", noted)
    place.timer(lambda _: place.cuda.notes.append("call"), waits=True)(0)
    assert place.cuda.notes == ["synchronize", "read", "event", "call", "event"]


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


def test_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    done = python("-m", "benchmarks", "kernels", "--device", "cuda")
    assert done.returncode == 2
    assert "--device cuda: no GPU can be used here: " in done.stderr
    with pytest.raises(SystemExit):
        main(["--peers", "CuPy"])
    assert "'CuPy' is not among eager, torch.compile, DGC authors" in capsys.readouterr().err
