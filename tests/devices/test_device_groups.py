"""Collectives of device arrays, from Python: emulated devices and a fake NCCL, and GPUs.

Ranks are threads or processes with a device each (tests/support/group_devices.py).
"""

import gc
import logging
import os
import re
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import (
    EMULATED,
    LackOfNccl,
    machine_fixture,  # noqa: F401 - fixture
    numbers,
    odd,
    on,
    on_devices,
    raise_failure_in_graph,
    summed_once,
)

import pycomm
from pycomm import errors
from pycomm._training.communicators import CommunicatorPool
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(300)


def three_verbs(group: pycomm.Group, device: Any, algorithm: str | None) -> Any:
    x = device.put(numbers(group.rank))
    assert pycomm.all_reduce(x, algorithm=algorithm) is x
    y = device.put(numbers(group.rank))
    pycomm.broadcast(y, src=1, algorithm=algorithm)
    z = device.empty((group.size, 100), "float32")
    pycomm.all_gather(device.put(numbers(group.rank)), z, algorithm=algorithm)
    return device.get(x), device.get(y), device.get(z)


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("algorithm", [None, "own", "ring", "tree"])
def test_device_arrays_are_sent(machine, algorithm, processes):
    algorithm = machine.own if algorithm == "own" else algorithm
    options = {"processes": True, "transport": ""} if processes else {}
    whole = [numbers(rank) for rank in range(3)]
    for x, y, z in machine.run(3, three_verbs, algorithm, **options):
        np.testing.assert_array_equal(x, sum(whole))
        np.testing.assert_array_equal(y, whole[1])
        np.testing.assert_array_equal(z, whole)


def log_and_stats(group: pycomm.Group, device: Any) -> str:
    pycomm.all_reduce(device.put(numbers(group.rank)))
    return str(group._devices[device.index].stats().algorithm)


def test_log_and_stats_report_the_device_transport(machine, caplog):
    caplog.set_level(logging.INFO, "pycomm")
    assert machine.run(3, log_and_stats) == [machine.own] * 3
    warnings = [text for text in caplog.messages if "share a GPU" in text]
    threads = machine.emulated  # the messages of processes are not here
    assert len(warnings) == (1 if machine.shared and threads else 0)
    if threads:
        line = r'group "world": rank (\d) of 3 is on device (\d): emulated on the CPU, '
        line += r"0000:0\2:00\.0, capability 0\.0, driver 12\.8, runtime \d+\.\d, NCCL 2\.32\.3"
        found = [re.fullmatch(line, text) for text in caplog.messages if "is on device" in text]
        devices = ["0", "0", "1"] if machine.shared else ["0", "1", "2"]
        assert sorted(one.groups() for one in found) == [*zip("012", devices, strict=True)]
        how = "through host memory" if machine.shared else "with NCCL"
        assert sum(text.endswith(how) for text in caplog.messages) == 3


def every_verb(group: pycomm.Group, device: Any, async_op: bool) -> None:
    rank, size = group.rank, group.size
    tables = [numbers(r, (size, 5), "int64") for r in range(size)]
    mine, rows = device.put(numbers(rank, 5, "int64")), device.put(tables[rank])
    whole = [numbers(r, 5, "int64") for r in range(size)]

    def out(*shape: int) -> Any:
        return device.empty(shape, "int64")

    def is_(found: Any, wanted: Any) -> None:
        found = found.result() if async_op else found
        np.testing.assert_array_equal(device.get(found), wanted)

    for root in range(size):
        got = pycomm.reduce(device.put(whole[rank]), root, "max", async_op=async_op)
        is_(got, np.max(whole, axis=0) if rank == root else whole[rank])
        into = out(size, 5) if rank == root else None
        got = pycomm.gather(mine, root, into, async_op=async_op)
        if rank == root:
            is_(got, whole)
        elif async_op:
            got.wait()
        x = rows if rank == root else None
        is_(pycomm.scatter(x, root, out(5), async_op=async_op), tables[root][rank])
    is_(pycomm.all_to_all(rows, out(size, 5), async_op=async_op), [t[rank] for t in tables])
    is_(pycomm.reduce_scatter(rows, "sum", out(5), async_op=async_op), sum(tables)[rank])
    is_(pycomm.all_gather(mine, out(size, 5), async_op=async_op), whole)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_verb(machine, async_op):
    machine.run(3, every_verb, async_op)


def launches(group: pycomm.Group, device: Any, algorithm: str) -> Any:
    x = device.put(numbers(group.rank, 4096))
    pycomm.all_reduce(x, algorithm=algorithm)
    device.get(x)
    device.counts()
    pycomm.all_reduce(x, algorithm=algorithm)
    device.get(x)
    return device.counts(), group._devices[device.index].stats()


@on(*EMULATED)  # the real NCCL does not count
def test_ring_follows_its_plan_and_native_nccl_is_one_call(machine):
    if machine.shared:
        for counts, stats in machine.run(4, launches, "ring", transport="local"):
            assert not any(counts.values())
            assert (stats.calls, stats.frames_sent, stats.bytes_sent) == (2, 12, 12 * 4096)
        return
    for counts, stats in machine.run(4, launches, "ring"):
        assert counts == {
            "groups": 6, "sends": 6, "receives": 6, "bytes_sent": 6 * 4096, "collectives": 0
        }  # fmt: skip
        assert (stats.calls, stats.frames_sent, stats.bytes_sent) == (2, 12, 12 * 4096)
    for counts, _ in machine.run(4, launches, "nccl"):
        assert counts["collectives"] == counts["groups"] == 1
        assert counts["sends"] == 0


def same_bits(group: pycomm.Group, device: Any) -> None:
    for dtype in ("float16", "float32", "float64", "int16", "int32", "uint8"):
        for op in ("sum", "product", "avg") if "float" in dtype else ("sum", "bxor", "min"):
            for algorithm in ("ring", "tree", "direct_two_phase", "direct"):
                x = odd(group.rank, 333, dtype)
                there = pycomm.all_reduce(device.put(x), op, algorithm=algorithm)
                here = pycomm.all_reduce(x.copy(), op, algorithm=algorithm)
                assert device.get(there).tobytes() == here.tobytes(), (dtype, op, algorithm)


def test_a_named_algorithm_gives_the_bits_of_the_host(machine):
    machine.run(3, same_bits)


@on_devices(3, reproducible=True)
def test_reproducible_sums_equal_those_of_the_host(group: pycomm.Group, device: Any) -> None:
    x = odd(group.rank, 4000, "float32")
    there = device.get(pycomm.all_reduce(device.put(x)))
    assert there.tobytes() == pycomm.all_reduce(x.copy()).tobytes()
    if device.name == "emulated":
        assert device.counts()["collectives"] == 0  # NCCL promises no order


@on_devices(2)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_call_is_ordered_with_its_stream(group: pycomm.Group, device: Any, async_op: bool) -> None:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    for turn in range(20):
        device.write(x, numbers(group.rank + turn))
        done = pycomm.all_reduce(x, algorithm="ring", async_op=async_op)
        if async_op:
            done.wait()
        copy = x.clone() if device.name == "cuda" else x.copy()
        device.write(x, numbers(0))  # not before the copy has the sum
        wanted = sum(numbers(rank + turn) for rank in range(group.size))
        np.testing.assert_array_equal(device.get(copy), wanted)


def waits_for_no_device(group: pycomm.Group, device: Any, async_op: bool, own: str) -> None:
    x = device.put(numbers(group.rank))
    for by in ("ring", own):  # the first call of each connects the ranks, which may wait
        pycomm.all_reduce(x, algorithm=by)
    device.get(x)
    device.write(x, numbers(group.rank))
    go_on = device.delay()
    works = [pycomm.all_reduce(x, algorithm=by, async_op=async_op) for by in ("ring", own)]
    for work in works if async_op else ():
        work.wait()
        assert not work.done()
    assert not device.idle()
    pycomm.barrier()
    go_on()
    twice = 2 * sum(numbers(rank) for rank in range(group.size))
    np.testing.assert_array_equal(device.get(x), twice)
    assert all(work.done() for work in (works if async_op else ()))


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_no_call_waits_for_the_device(machine, async_op):
    machine.run(2, waits_for_no_device, async_op, machine.own)


@on_devices(2)
@on(*EMULATED)  # a GPU's delay ends by itself
def test_ranks_call_each_other_while_one_device_is_late(group: pycomm.Group, device: Any) -> None:
    x = summed_once(group, device)
    device.write(x, numbers(group.rank))
    go_on = device.delay() if group.rank == 0 else None
    work = pycomm.all_reduce(x, async_op=True)
    work.wait()
    for _ in range(100):  # this rank's device continues meanwhile
        assert not device.idle()
        pycomm.barrier()
    if go_on:
        go_on()
    np.testing.assert_array_equal(device.get(x), sum(numbers(r) for r in range(group.size)))


def started_and_forgotten(group: pycomm.Group, device: Any) -> bool:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    go_on = device.delay()
    work = pycomm.all_reduce(x, async_op=True)
    gone = weakref.ref(x)
    work.wait()
    del x, work
    # Releases the arrays of finished calls.
    pycomm.all_reduce(device.put(numbers(0)), async_op=True).wait()
    gc.collect()
    alive = gone() is not None
    go_on()
    device.get(device.put(np.zeros(1)))
    # Releases the arrays of finished calls.
    pycomm.all_reduce(device.put(numbers(0)), async_op=True).wait()
    gc.collect()
    return alive and gone() is None


def test_arrays_are_kept_until_the_stream_finishes(machine):
    assert machine.run(2, started_and_forgotten) == [True, True]


def replays(group: pycomm.Group, device: Any, own: str) -> None:
    x = device.put(numbers(group.rank))
    for by in ("ring", own):
        pycomm.all_reduce(x, algorithm=by)
    device.get(x)
    device.capture()
    pycomm.all_reduce(x, algorithm="ring")
    pycomm.all_reduce(x, algorithm=own, async_op=True).wait()
    launch = device.end_capture()
    found = []
    for turn in range(3):
        device.write(x, numbers(group.rank + turn))
        launch()
        found.append(device.get(x))
    raise_failure_in_graph(device, x)
    for turn in range(3):
        wanted = group.size * sum(numbers(rank + turn) for rank in range(group.size))
        np.testing.assert_array_equal(found[turn], wanted)


def test_calls_are_captured_in_a_graph(machine):
    machine.run(2, replays, machine.own)


def one_replays(group: pycomm.Group, device: Any) -> str:
    x = summed_once(group, device)
    device.capture()
    pycomm.all_reduce(x, timeout_s=1)
    launch = device.end_capture()
    if group.rank == 0:
        launch()
        device.get(x)  # until the limit
    with pytest.raises(errors.Error) as caught:
        for _ in range(3):  # the first call of rank 1 may meet the replay of rank 0
            raise_failure_in_graph(device, x)
    return str(caught.value)


@on("emulated, shared", "cuda, shared")  # NCCL has no limit inside a graph
def test_a_failed_replay_is_reported_by_a_later_call(machine):
    first, _ = machine.run(2, one_replays)
    assert "staged in host memory: " in first
    assert "rank 1" in first


@on_devices(2)
@on(*EMULATED)  # a GPU does not record when it was queried
def test_a_call_is_watched_while_another_is_captured(group: pycomm.Group, device: Any) -> None:
    x, y = device.put(numbers(group.rank)), device.put(numbers(group.rank))
    for each in (x, y):
        pycomm.all_reduce(each)
    device.get(x)
    go_on = device.delay()
    pycomm.all_reduce(y)  # runs while the graph is captured, so that its events are queried
    device.stream, before = device.runtime.make_stream(device.index), device.stream
    device.write(x, numbers(group.rank))
    device.capture()
    pycomm.all_reduce(x)
    queries = device.runtime.queries()
    while device.runtime.queries() == queries:
        pass
    pycomm.barrier()
    launch = device.end_capture()
    go_on()
    device.stream, captured = before, device.stream
    device.get(y)  # the caller orders replays and other calls
    device.stream = captured
    launch()
    wanted = sum(numbers(rank) for rank in range(group.size))
    np.testing.assert_array_equal(device.get(x), wanted)
    device.stream = before


def many(group: pycomm.Group, device: Any) -> int:
    x = device.put(np.ones(10, np.float32))
    before: int = device.runtime.events_made()
    for turn in range(300):
        pycomm.all_reduce(x, algorithm="ring", async_op=turn % 2 == 1)
        device.get(x)
    return int(device.runtime.events_made()) - before


@on(*EMULATED)  # CUDA does not count events
def test_events_are_reused(machine):
    # Two of each call of either rank, whose counts include both. They are reused when a call is
    # found to have finished, which is checked ten times a second.
    assert max(machine.run(2, many)) < 900


MISTAKES = {
    "count": lambda group, x, y, z: pycomm.all_reduce(x if group.rank else y[:50]),
    "dtype": lambda group, x, y, z: pycomm.all_reduce(z if group.rank else x),
    "op": lambda group, x, y, z: pycomm.all_reduce(x, "max" if group.rank else "sum"),
    "root": lambda group, x, y, z: pycomm.broadcast(x, src=group.rank),
    "verb": lambda group, x, y, z: pycomm.all_reduce(x) if group.rank else pycomm.broadcast(x),
    "algorithm": lambda group, x, y, z: pycomm.all_reduce(
        x, algorithm="ring" if group.rank else "tree"
    ),
    "place": lambda group, x, y, z: pycomm.all_reduce(
        x if group.rank else np.zeros(100, np.float32), algorithm="ring"
    ),
}


def disagrees(group: pycomm.Group, device: Any, how: str) -> str:
    x, y = device.put(numbers(group.rank)), device.put(numbers(group.rank))
    z = device.put(numbers(group.rank, 100, "int32"))
    pycomm.all_reduce(device.put(numbers(group.rank)))
    with pytest.raises(errors.Mismatch, match="disagree") as caught:
        MISTAKES[how](group, x, y, z)
    np.testing.assert_array_equal(device.get(x), numbers(group.rank))
    np.testing.assert_array_equal(device.get(y), numbers(group.rank))
    pycomm.all_reduce(x)
    np.testing.assert_array_equal(device.get(x), sum(numbers(r) for r in range(group.size)))
    return str(caught.value)


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize("how", MISTAKES)
def test_mismatch_changes_no_array(machine, how, transport):
    for text in machine.run(3, disagrees, how, transport=transport):
        assert "on CUDA devices" in text
        assert "no array was changed" in text


def refused(group: pycomm.Group, device: Any, shared: bool) -> None:
    x = device.put(numbers(group.rank))
    flags = device.put(np.zeros(4, bool))
    cases = [
        (errors.Unsupported, "shared_memory is for",
         lambda: pycomm.all_reduce(x, algorithm="shared_memory")),
        (errors.Unsupported, "NCCL refuses ranks that share" if shared else "NCCL does not support",
         lambda: pycomm.all_reduce(flags, "bor", algorithm="nccl")),
        (errors.Unsupported, "no algorithm" if shared else "ranks that share a GPU",
         lambda: pycomm.broadcast(x, algorithm="halving" if shared else "host_staged")),
        (errors.Unsupported, "no algorithm", lambda: pycomm.broadcast(x, algorithm="halving")),
        (errors.Unsupported, "symmetric_memory was removed: omit",
         lambda: pycomm.all_reduce(x, algorithm="symmetric_memory")),
        (errors.Unsupported, "symmetric memory was removed: omit",
         lambda: setattr(group, "cuda_symmetric_memory", True)),
        (errors.InvalidArgument, "invalid rank 2", lambda: pycomm.broadcast(x, src=2)),
        (errors.InvalidArgument, r"x is on cuda:\d, but out is on cpu",
         lambda: pycomm.all_gather(x, np.zeros((2, 100), np.float32))),
    ]  # fmt: skip
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    pycomm.all_reduce(flags, "bor")
    pycomm.all_reduce(x)


def test_unsupported_calls_raise_before_data_is_sent(machine):
    machine.run(2, refused, machine.shared)


def without_gpu(group: pycomm.Group) -> str:
    with pytest.raises(errors.Unsupported) as caught:
        pycomm.all_reduce(MissingDevice())
    return str(caught.value)


def test_missing_gpu_is_reported(monkeypatch):
    """In processes without a visible GPU, also where there is one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for message in run_ranks(2, without_gpu, processes=True, transport=""):
        assert re.search(r"NVIDIA's driver|not built", message), message


def one_is_taken(group: pycomm.Group, device: Any) -> str:
    x = device.put(numbers(group.rank))
    with pytest.raises(errors.Unsupported) as caught:
        pycomm.all_reduce(x)
    return str(caught.value)


@on("emulated, shared")  # `make gpu` shows the behaviour of the real NCCL
def test_nccl_is_used_when_it_allows_shared_gpus(machine, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert any("Duplicate GPU" in text for text in machine.run(2, one_is_taken))


def with_host_id(group: pycomm.Group, device: Any, name: str) -> str:
    """A message between ranks that share a GPU, before all ranks connect, and a sum."""
    os.environ["NCCL_HOSTID"] = name or f"host {group.rank}"
    if not name:
        return one_is_taken(group, device)
    x = device.put(numbers(group.rank))
    if group.rank < 2:
        (pycomm.recv if group.rank else pycomm.send)(x, 1 - group.rank)
    pycomm.all_reduce(x)
    return str(group._devices[device.index].stats().algorithm)


@on("emulated, shared")  # whose NCCL ignores the id
@pytest.mark.parametrize("name", ["node", ""], ids=["equal", "different"])
def test_ranks_with_one_host_id_do_not_share_a_gpu_under_nccl(machine, name):
    found = machine.run(3, with_host_id, name, processes=True, transport="")
    assert found == ["host_staged"] * 3 if name else any("Duplicate GPU" in one for one in found)


def continues_without(group: pycomm.Group, device: Any) -> str:
    message = one_is_taken(group, device)
    assert pycomm.all_reduce(np.ones(3))[0] == group.size
    return message


@on("emulated", "cuda")
def test_rank_without_nccl_is_named_on_every_rank_and_the_group_continues(machine, monkeypatch):
    lack = LackOfNccl(monkeypatch, [1])
    first, second, third = machine.run(3, lack.run, continues_without)
    assert second == "no NCCL anywhere"
    assert first == third
    assert "rank 1 could not load NCCL" in first


@on("emulated, shared", "cuda, shared")
def test_ranks_that_share_a_gpu_need_no_nccl(machine, monkeypatch):
    lack = LackOfNccl(monkeypatch, [0, 2])
    assert machine.run(3, lack.run, log_and_stats) == ["host_staged"] * 3


class MissingDevice:
    """An array on a device that does not exist."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "shape": (3,), "typestr": "<f4", "data": (0x1000, False), "version": 3, "stream": None
    }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def subgroups(group: pycomm.Group, device: Any) -> Any:
    x = device.put(numbers(group.rank))
    part = group.split(group.rank % 2)
    pycomm.all_reduce(x, group=part)
    pycomm.all_reduce(x)
    return device.get(x)


def test_subgroups_have_devices_too(machine):
    wanted = 2 * sum(numbers(rank) for rank in range(4))
    for x in machine.run(4, subgroups):
        np.testing.assert_array_equal(x, wanted)


def ragged(group: pycomm.Group, device: Any) -> Any:
    x = device.put(numbers(group.rank, (group.rank + 1, 3)))
    whole = device.empty((6 * 3,), "float32")
    CommunicatorPool(group, 1).all_gather_v(x, whole, [3, 6, 9]).wait()
    return device.get(whole)


def test_lists_of_counts(machine):
    wanted = np.concatenate([numbers(rank, (rank + 1, 3)).reshape(-1) for rank in range(3)])
    for x in machine.run(3, ragged):
        np.testing.assert_array_equal(x, wanted)
