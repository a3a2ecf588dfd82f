"""The lifetime of groups, handles and errors of the backend "pycomm", in real processes.

The functions `_...` run in the processes of torch_ranks.py; test_c10d.py has the verbs.
"""

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from finished import finished, finished_together
from paths import ROOT
from torch.nn.parallel import DistributedDataParallel

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import CALL_S, LIMIT_S, SIZES, Ranks, Run, in_processes, run_fixture, same  # noqa: F401 - a fixture

import pycomm
from pycomm import torch_backend
from pycomm.errors import InvalidArgument, Mismatch, PeerLost, Timeout


@in_processes(2, 3)
def test_async_handles_and_futures() -> None:
    size = dist.get_world_size()
    tensors = [torch.full((n,), float(n)) for n in (1, 1000, 100_000)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    seen: list[str] = []
    chained = works[-1].get_future().then(lambda f: seen.append("then") or f.value()[0] * 2)
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for n, x, work in zip((1, 1000, 100_000), tensors, works, strict=True):
        assert (x == n * size).all()
        assert torch.equal(work.result()[0], x)
        value = work.get_future().value()  # requested after the end
        assert isinstance(value, list)
        assert value[0].data_ptr() == x.data_ptr()
    assert (chained.wait() == 200_000 * size).all()
    assert seen == ["then"]
    view = torch.ones(6, 2)[:, 0]
    work = dist.all_reduce(view, async_op=True)
    assert (work.get_future().wait()[0] == size).all()
    assert (view == size).all()
    assert dist.all_reduce(torch.ones(1)) is None
    dist.barrier(async_op=True).wait()


@in_processes(2)
def test_wait_has_its_own_limit() -> None:
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        start = time.monotonic()
        with pytest.raises(Timeout, match=" timeout "):
            work.wait(timedelta(milliseconds=200))
        assert 0.15 < time.monotonic() - start < 2
        dist.distributed_c10d._get_default_store().set("waited", "yes")
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["waited"])
        dist.all_reduce(torch.ones(1))


@in_processes(2)
def test_profiler_sees_calls_made_without_torch_distributed() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pycomm.all_reduce(torch.ones(3))
        pycomm.broadcast(np.ones(3))
        pycomm.all_gather(torch.ones(3), async_op=True).wait()
    pycomm.all_reduce(torch.ones(3))
    names = [event.name for event in profiler.events() if "pycomm:" in event.name]
    assert names == ["pycomm:all_reduce", "pycomm:broadcast", "pycomm:all_gather"]


IMPORTS = """
import {first}
import {second}
from pycomm import _core
pycomm.init()
pycomm.broadcast(torch.ones(1))  # a program's first tensor loads the module that reads tensors
left = []
_core.set_call_fallback(lambda group, call, *others: left.append(call.operation))
with torch.autograd.profiler.profile():
    pycomm.all_reduce(torch.ones(1))
pycomm.broadcast(torch.ones(1))
assert left == ["all_reduce"], left
"""


@pytest.mark.parametrize(
    "order", [("torch", "pycomm.collectives"), ("pycomm.collectives", "torch")]
)
def test_the_profiler_is_found_whichever_is_imported_first(order: tuple[str, str]) -> None:
    code = IMPORTS.format(first=order[0], second=order[1])
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S)
    assert done.returncode == 0


@in_processes(2)
def test_options_numbers_and_stats() -> None:
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert dist.get_backend() == "pycomm"
    assert backend.name() == "pycomm"
    options = backend.options
    assert options._timeout == timedelta(seconds=CALL_S)
    assert copy.deepcopy(options)._timeout == options._timeout
    group.set_timeout(timedelta(seconds=30))
    assert options._timeout == timedelta(seconds=30)
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    backend._set_sequence_number_for_group()
    first = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert backend._get_sequence_number_for_group() == first + 1
    group.monitored_barrier()
    before = torch_backend.stats()
    x = torch.ones(1 << 18)
    dist.all_reduce(x)
    after = torch_backend.stats()
    assert after["calls"] == before["calls"] + 1
    sent = after["bytes_sent"] - before["bytes_sent"]
    assert sent == x.nbytes  # two ranks: half of it reduced, half gathered
    assert sent <= after["bytes_written"] - before["bytes_written"] < sent + 65536
    assert after["seconds"] >= before["seconds"]
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(InvalidArgument, match="gloo"):
        torch_backend.stats(gloo)
    dist.barrier()  # an early exit closes connections that the peer's gloo still needs


def _shares_the_engine() -> None:
    group = pycomm.init()
    assert (group.rank, group.size) == (dist.get_rank(), dist.get_world_size())
    calls = torch_backend.stats()["calls"]
    assert pycomm.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]
    assert torch_backend.stats()["calls"] == calls + 1


@in_processes(2)
def test_different_calls_raise_mismatch_and_the_group_continues() -> None:
    x = torch.full((8,), 5.0)
    with pytest.raises(Mismatch, match="float32") as caught:
        dist.all_reduce(x if dist.get_rank() == 0 else x.int())
    assert caught.value.op == "all_reduce"
    assert caught.value.rank == dist.get_rank()
    assert (x == 5).all()
    work = dist.all_reduce(x[: 4 + dist.get_rank()], async_op=True)
    with pytest.raises(Mismatch):
        work.wait()
    with pytest.raises(Mismatch):
        work.get_future().wait()
    with pytest.raises(Mismatch):
        work.wait()
    assert not work.is_success()
    dist.all_reduce(x)
    assert (x == 10).all()


def test_pycomm_init_gives_the_engine_of_torch(run: Run) -> None:
    run(2, _shares_the_engine)
    run(2, _shares_the_engine)  # the first engine ended with torch's group


def _dies() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model = DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False, broadcast_buffers=False)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except PeerLost as error:
        return f"rank {error.peer}"
    return "nothing raised"


def test_ddp_names_a_dead_rank(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        for pipe in ranks.pipes:
            pipe.send((_dies, (), str(tmp_path / "store"), "pycomm"))
        assert ranks.pipes[0].poll(LIMIT_S)
        assert ranks.pipes[0].recv() == (True, "rank 1")
    finally:
        ranks.stop()


def _program(text: str, *args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}" if path else str(ROOT)}
    return finished(
        [sys.executable, "-c", textwrap.dedent(text), *args], env=env, cwd=path, timeout=180
    )


def _install_entry_point(folder: Path) -> None:
    """Makes a distribution in `folder` with pyproject.toml's entry point for torch. Its name hides
    an installed pycomm's."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."(torch\.backends)"\]\n(\w+) = "(.*)"', text)
    assert found is not None
    info = folder / "pycomm_collectives-1.0.dist-info"
    info.mkdir()
    name = "Metadata-Version: 2.1\nName: pycomm-collectives\nVersion: 1.0\n"
    (info / "METADATA").write_text(name)
    (info / "entry_points.txt").write_text(f"[{found[1]}]\n{found[2]} = {found[3]}\n")


def test_torch_finds_the_backend_without_an_import(tmp_path: Path) -> None:
    _install_entry_point(tmp_path)
    done = _program(
        """
        import sys, torch, torch.distributed as dist
        light = not any(name.startswith("pycomm._c10d.torch_") for name in sys.modules)
        dist.init_process_group("pycomm", rank=0, world_size=1, store=dist.HashStore())
        x = torch.ones(2)
        dist.all_reduce(x)
        print(light, dist.get_backend(), x.tolist())
        """,
        path=tmp_path,
    )
    assert (done.stdout, done.returncode) == ("True pycomm [1.0, 1.0]\n", 0), done.stderr


def test_torch_is_imported_beside_a_pycomm_of_another_python(tmp_path: Path) -> None:
    """The package is found before the one of the sources, and has no compiled module that fits."""
    _install_entry_point(tmp_path)
    (tmp_path / "pycomm").mkdir()
    shutil.copy(ROOT / "pycomm" / "__init__.py", tmp_path / "pycomm")
    (tmp_path / "pycomm" / "_core.cpython-39-x86_64-linux-gnu.so").touch()
    done = _program(
        """
        import sys  # an editable installation would find the compiled module of the sources
        sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
        import torch
        print(torch.ones(1).item())
        """,
        path=tmp_path,
    )
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr
    assert "pycomm is not compiled for this Python" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("cuda", "hip", "devices"),
    [("", "", "['cpu']"), ("12.8", "", "['cpu', 'cuda']"), ("", "6.4", "['cpu', 'cuda']")],
)
def test_cuda_is_registered_where_torch_was_built_for_it(
    cuda: str, hip: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch places ShardedTensor and others on the devices that the backend names."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    done = _program(
        """
        import sys, torch, torch.distributed as dist
        torch.version.cuda, torch.version.hip = (version or None for version in sys.argv[1:])
        import pycomm.torch_backend
        dist.init_process_group("pycomm", rank=0, world_size=1, store=dist.HashStore())
        print(sorted(device.type for device in dist.group.WORLD._device_types))
        """,
        cuda,
        hip,
    )
    assert (done.stdout, done.returncode) == (f"{devices}\n", 0), done.stderr


ALONE = """
    import sys, torch, torch.distributed as dist
    from torch.distributed import Backend
    from torch.nn.parallel import DistributedDataParallel
    import pycomm.torch_backend
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl", "fake"):
        if name in Backend.backend_list:
            Backend.backend_list.remove(name)
        Backend.backend_type_map.pop(name, None)
        Backend.backend_capability.pop(name, None)
        Backend._plugins.pop(name.upper(), None)
    Backend.default_device_backend_map.clear()
    def refuse(*args, **kwargs):
        raise AssertionError("another backend was made")
    for name in ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupMPI"):
        setattr(dist.distributed_c10d, name, refuse)
    rank = int(sys.argv[1])
    dist.init_process_group("pycomm", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    everyone = [None, None]
    dist.all_gather_object(everyone, rank)
    dist.barrier()
    print(everyone, dist.get_backend())
"""


def test_backend_works_without_other_backends(tmp_path: Path) -> None:
    """Without any other backend in torch's registry; the exit without a goodbye is clean."""
    command = [sys.executable, "-c", textwrap.dedent(ALONE)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for rank in finished_together(
        ([*command, str(r), str(tmp_path / "store")], env) for r in (0, 1)
    ):
        assert (rank.stdout, rank.returncode) == ("[0, 1] pycomm\n", 0), rank.stderr


def test_pg_options_of_another_backend_are_refused() -> None:
    done = _program(
        """
        import torch.distributed as dist, pycomm.torch_backend
        try:
            dist.init_process_group("pycomm", rank=0, world_size=1, store=dist.HashStore(),
                                    pg_options=object())
        except ValueError as error:
            print(error)
        """
    )
    assert "invalid pg_options: got object" in done.stdout, done.stderr
