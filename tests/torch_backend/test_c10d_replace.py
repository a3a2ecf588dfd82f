"""pycomm in place of torch's gloo: torch_backend.replace(), in processes whose default group is
made as one of gloo.

test_replace_programs.py has the variable, the launcher and whole programs.
"""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import CALL_S, POOLS, REPLACED, Run, in_processes

import pycomm
from pycomm import _c10d, torch_backend
from pycomm._c10d import gloo
from pycomm.errors import InvalidArgument, Mismatch, Timeout, Unsupported

CPU = torch.device("cpu")
LIMIT = timedelta(seconds=CALL_S)
TORCHS = torch._C._distributed_c10d.ProcessGroupGloo


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, no_leaks: Any) -> Run:
    """As that of torch_ranks.py."""
    return lambda size, fn, *args: POOLS.of(size, no_leaks).run(tmp_path, REPLACED, fn, *args)


def _store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _everyone() -> list[int]:
    return list(range(dist.get_world_size()))


def _is_pycomms(group: dist.ProcessGroup) -> bool:
    backend = group._get_backend(CPU)
    assert isinstance(backend, dist.ProcessGroupGloo)
    ours = isinstance(backend, _c10d.load().Backend)
    assert (backend.name() == "pycomm") == ours
    return ours


def _constructed(name: str, *args: Any, **given: Any) -> dist.ProcessGroup:
    """A bare group, as of programs that do not use torch's default group."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _store(name)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(CPU, kind, dist.ProcessGroupGloo(store, rank, size, *args, **given))
    group._set_group_name(name)
    return group


def _with_options() -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    return _constructed("options", options)


def _of_dist2() -> dist.ProcessGroup:
    from torch.distributed import _dist2

    size = dist.get_world_size()
    made = _dist2._gloo_factory(_store("dist2"), dist.get_rank(), size, LIMIT, CPU)
    made._set_group_name("dist2")
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "world": lambda: dist.group.WORLD,
    "new": dist.new_group,
    "named": lambda: dist.new_group(backend="gloo", group_desc="named"),
    "by device": lambda: dist.new_group(backend="cpu:gloo"),
    "local": lambda: dist.new_group(_everyone(), use_local_synchronization=True),
    "split": lambda: dist.group.WORLD.split_group(_everyone(), timeout=LIMIT),
    "timeout": lambda: _constructed("timeout", LIMIT),
    "timeout by name": lambda: _constructed("by name", timeout=LIMIT),
    "default timeout": lambda: _constructed("default"),
    "options": _with_options,
}
if find_spec("torch.distributed._dist2"):  # until torch 2.13
    KINDS["dist2"] = _of_dist2


@in_processes(2, 3)
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_way_to_make_a_group(kind: str) -> None:
    before = gloo.made()
    group = KINDS[kind]()
    assert _is_pycomms(group)
    # torch's logger of DDP casts the backend of a group of the type GLOO to its own class.
    assert group._get_backend_name() != "gloo"
    if kind != "by device":  # torch gives such a group no default type
        with pytest.raises(RuntimeError, match="pycomm"):  # the backend is found, and lacks it
            group._wait_for_pending_works()
    x = torch.full((100,), dist.get_rank() + 1.0)
    group.allreduce([x]).wait()
    assert (x == sum(range(1, group.size() + 1))).all()
    assert gloo.made() - before == (0 if kind in ("world", "split") else 1)
    dist.barrier()


@in_processes(3)
def test_shrink() -> None:
    part = dist.new_group()
    if dist.get_rank() < 2:
        group = dist.shrink_group([2], group=part)
        assert _is_pycomms(group)
        assert group._get_backend_name() == "custom"
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert (x == 2).all()
    dist.barrier()


def _reconfigured(path: Path) -> None:
    rank, store = dist.get_rank(), dist.FileStore(str(path))
    dist.destroy_process_group()
    given: Any = {"enable_reconfigure": True}  # an argument from torch 2.14 on
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT, **given)
    assert _is_pycomms(dist.group.WORLD)
    store.set(f"handle {rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle {one}").decode() for one in (1, 0)]
    dist._reconfigure(1, handles).wait()
    assert dist.get_rank() == 1 - rank
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (x == 2).all()


if hasattr(dist, "_reconfigure"):

    def test_reconfigure(run: Run, tmp_path: Path) -> None:
        run(2, _reconfigured, tmp_path / "again")


@in_processes(2)
@pytest.mark.parametrize("other", ["fake", "pycomm"])
def test_beside_another_backend(other: str) -> None:
    """A group has one backend of the type CUSTOM: the second one would be ignored."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers a backend

    group = dist.new_group(backend=f"cpu:gloo,cuda:{other}")
    assert _is_pycomms(group)
    assert group._get_backend_name() != "gloo"
    devices = group._get_backend(torch.device("cuda"))
    assert devices is not group._get_backend(CPU)
    assert devices.name() == other
    assert not isinstance(devices, dist.ProcessGroupGloo)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert (x == 2).all()
    dist.barrier()


@in_processes(2)
def test_torch_sees_gloo() -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    assert dist.get_backend() == dist.Backend.GLOO
    assert issubclass(TORCHS, dist.ProcessGroupGloo)
    assert not isinstance(dist.group.WORLD, dist.ProcessGroupGloo)
    assert dist.ProcessGroupGloo.create_default_device() is not None
    assert pickle.loads(pickle.dumps(dist.ProcessGroupGloo)) is dist.ProcessGroupGloo
    assert (dist.ProcessGroupGloo | None) == (TORCHS | None)
    assert (None | dist.ProcessGroupGloo) == (None | TORCHS)

    class Derived(dist.ProcessGroupGloo):  # type: ignore[misc]  # no class, for the checker
        pass

    assert Derived.__mro__[1] is TORCHS
    assert (backend.options._devices, backend.options._threads) == ([], 2)
    assert backend.options._timeout == LIMIT
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50))
    assert backend.options._timeout == timedelta(seconds=50)
    pycomms = dist.new_group(backend="pycomm")
    assert not isinstance(pycomms._get_backend(CPU), dist.ProcessGroupGloo)
    assert torch_backend.stats()["groups_in_place_of_gloo"] == gloo.made() >= 1
    dist.monitored_barrier()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()}, group=pycomms)
    assert gathered == [{"rank": 0}, {"rank": 1}]


@in_processes(2)
def test_profiler_titles_name_gloo() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2), 0, async_op=True).wait()
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
        dist.barrier()
    names = [event.name for event in profiler.events() if event.name.startswith(("gloo", "pyco"))]
    assert sorted(names) == ["gloo:all_gather", "gloo:all_reduce", "gloo:barrier", "gloo:broadcast"]


@in_processes(2)
@pytest.mark.parametrize("kind", sorted(KINDS.keys() & {"world", "timeout", "dist2"}))
def test_ddp(kind: str) -> None:
    model = torch.nn.Linear(4, 4)
    trained = DistributedDataParallel(model, process_group=KINDS[kind]())
    trained(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
    assert (model.weight.grad == 3).all()
    logged = trained._get_ddp_logging_data()
    assert "gloo_num_threads" not in logged
    assert logged["backend_name"] == "custom"


def _compressed(name: str) -> list[torch.Tensor]:
    """The parameters after steps of DDP with a hook of pycomm."""
    torch.manual_seed(0)
    module = torch.nn.Linear(200, 50)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    states: dict[str, Callable[[], Any]] = {
        "dgc": lambda: pycomm.DGC(optimizer, sparsity=[0.9], min_count=1),
        "quantize": lambda: pycomm.QuantizedGradients(module.named_parameters()),
    }
    model, state = DistributedDataParallel(module), states[name]()
    model.register_comm_hook(state, getattr(pycomm, f"{name}_hook"))
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
    assert state.stats()["sent_bytes"] < 4 * 4 * 200 * 50 / 2  # of the gradients of 4 steps
    return list(module.parameters())


@pytest.mark.parametrize("name", ["dgc", "quantize"])
def test_compression_hooks(name: str, tmp_path: Path, no_leaks: Any) -> None:
    ours, named = (
        POOLS.of(2, no_leaks).run(tmp_path, backend, _compressed, name)
        for backend in (REPLACED, "pycomm")
    )
    assert all(torch.equal(a, b) for a, b in zip(ours[0], ours[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours[0], named[0], strict=True))


@in_processes(2)
def test_pycomm_init_uses_the_engine() -> None:
    group = pycomm.init()
    assert (group.rank, group.size) == (dist.get_rank(), dist.get_world_size())
    calls = torch_backend.stats()["calls"]
    assert (pycomm.all_reduce(torch.ones(3)) == 2).all()
    assert torch_backend.stats()["calls"] == calls + 1


@in_processes(2)
def test_two_threads() -> None:
    rank, both = dist.get_rank(), threading.Barrier(2)

    def sums() -> float:
        both.wait()
        x = torch.zeros(1)
        for i in range(50):
            y = torch.full((1,), float(i))
            dist.all_reduce(y)
            x += y
        return x.item()

    def messages() -> list[int]:
        both.wait()
        got = []
        for i in range(50):
            mine, theirs = torch.tensor([i + 100 * rank]), torch.zeros(1, dtype=torch.int64)
            works = [dist.isend(mine, 1 - rank, tag=7), dist.irecv(theirs, 1 - rank, tag=7)]
            for work in works:
                work.wait()
            got.append(int(theirs))
        return got

    with ThreadPoolExecutor(2) as pool:
        total, got = pool.submit(sums), pool.submit(messages)
        assert total.result() == 2 * sum(range(50))
        assert got.result() == [i + 100 * (1 - rank) for i in range(50)]


@in_processes(2)
def test_groups_that_stay_torchs() -> None:
    torch_backend.replace("gloo", except_="kept-*")
    devices = dist.ProcessGroupGloo._Options()
    devices._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    devices._timeout = LIMIT
    ours = dist.new_group(group_desc="another")
    before = gloo.made()
    kept = [
        dist.new_group(group_desc="kept-1"),
        _constructed("devices", devices),
        _constructed("derived"),
    ]
    assert [_is_pycomms(group) for group in kept] == [False, False, True]
    assert gloo.made() == before + 1
    for group in (*kept, ours):
        x = torch.ones(2)
        group.allreduce([x]).wait()
        assert (x == 2).all()
    dist.barrier()


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    torch_backend.replace("gloo", except_="kept*")
    try:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        with caplog.at_level("INFO", "pycomm"):
            for _ in range(2):
                dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    finally:
        torch_backend.restore("gloo")
    text = "a group stays with torch's gloo: its options name gloo's devices"
    assert [record.message for record in caplog.records] == [text]


@in_processes(2)
def test_restore_affects_later_groups() -> None:
    earlier = dist.new_group()
    torch_backend.restore("gloo")
    later = dist.new_group(backend="gloo")
    assert dist.ProcessGroupGloo is TORCHS
    assert type(later._get_backend(CPU)) is TORCHS
    for group in (earlier, later, dist.group.WORLD):
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert (x == 2).all()
    assert isinstance(earlier._get_backend(CPU), _c10d.load().Backend)
    dist.barrier()


@in_processes(2, 3)
@pytest.mark.parametrize("way", ["new", "constructor"])
def test_a_rank_that_uses_torchs_gloo_is_named(way: str) -> None:
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        torch_backend.restore("gloo")
    limit = timedelta(seconds=3) if dist.get_rank() == last else LIMIT

    def make() -> None:
        if way == "new":
            dist.new_group(timeout=limit, backend="gloo")
        else:
            _constructed("mixed", limit)

    if dist.get_rank() == last:
        with pytest.raises(RuntimeError):
            make()
    else:
        text = (
            f"rank {last} makes this group with torch's gloo, and rank {dist.get_rank()} with pyc"
        )
        with pytest.raises(Mismatch, match=text):
            make()
    dist.barrier()


def test_keys_of_other_ranks() -> None:
    """Also that those of an earlier group of gloo in the store, which has this rank's key too, are
    no reason."""
    store = dist.HashStore()
    watch = gloo.Watch(1, 100)
    watch(store)
    store.set("0/99", "address")
    with pytest.raises(Mismatch, match="rank 99 makes this group with torch's gloo, and rank 1 "):
        for _ in range(100 // gloo.MOST_LOOKS + 1):
            watch(store)
    store.set("0/98", "address")
    with pytest.raises(Mismatch, match="ranks 98, 99 make"):
        for _ in range(100 // gloo.MOST_LOOKS + 1):
            watch(store)
    store.set("0/1", "address")
    watch = gloo.Watch(1, 100)
    for _ in range(100 // gloo.MOST_LOOKS + 1):
        watch(store)


@in_processes(2)
def test_a_group_forms_where_one_of_gloo_was() -> None:
    """Both in one prefix of the store."""
    torch_backend.restore("gloo")
    first = _constructed("place", LIMIT)
    first.barrier().wait()
    torch_backend.replace("gloo")
    group = _constructed("place", LIMIT)
    assert _is_pycomms(group)
    x = torch.ones(2)
    group.allreduce([x]).wait()
    assert (x == 2).all()
    dist.barrier()


@in_processes(2)
def test_monitored_barrier_names_the_absent_rank() -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        with pytest.raises(Timeout, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timedelta(seconds=0.3))
    dist.barrier()


def test_invalid_arguments() -> None:
    for call in (torch_backend.replace, torch_backend.restore):
        with pytest.raises(InvalidArgument, match="invalid name: got 'nccl', expected one of gloo"):
            call("nccl")
    with pytest.raises(InvalidArgument, match="invalid except_: got 3"):
        torch_backend.replace("gloo", except_=3)  # type: ignore[arg-type]  # the fault
    torch_backend.restore("gloo")  # without replace(): no effect
    assert dist.ProcessGroupGloo is TORCHS


def test_arguments_that_only_torch_knows() -> None:
    torch_backend.replace("gloo")
    try:
        for arguments in ((3,), (dist.HashStore(), 0, 1, "a")):
            with pytest.raises(TypeError, match="incompatible constructor arguments"):
                dist.ProcessGroupGloo(*arguments)
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            dist.ProcessGroupGloo(dist.HashStore(), 0, 1, unknown=1)
    finally:
        torch_backend.restore("gloo")


def test_another_torch_keeps_its_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(group_size: int, backend: str) -> None:
        """Of a torch that takes other arguments."""

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)
    with pytest.raises(Unsupported, match="in a way that is unknown"):
        torch_backend.replace("gloo")
    assert dist.ProcessGroupGloo is TORCHS
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(Unsupported, match="is too old"):
        torch_backend.replace("gloo")
    assert dist.ProcessGroupGloo is TORCHS
