"""All-reduce over symmetric memory: the bits of the host in rank order, its choice, and failures.

Ranks are threads or processes with a device each (tests/support/group_devices.py).
"""

import os
import signal
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture, numbers, odd, on  # noqa: F401 - fixture

import pycomm
from pycomm import errors

pytestmark = pytest.mark.timeout(300)

SYMMETRIC = "symmetric_memory"
LARGE = (4 << 20) // 4 + 1  # float32: above what uses it by default
TWO_SHOT = (256 << 10) // 4 + 3  # float32: above what is sent whole
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def options_of(processes: bool) -> dict[str, Any]:
    return {"processes": True, "transport": ""} if processes else {}


def turned_on(group: pycomm.Group, device: Any, body: Any, *args: Any) -> Any:
    """Calls `body` in a group that may use it."""
    assert not group.cuda_symmetric_memory
    group.cuda_symmetric_memory = True
    return body(group, device, *args)


def same_bits(group: pycomm.Group, device: Any) -> None:
    """In a group whose sums in host memory are in rank order."""

    def compare(x: Any, op: str) -> None:
        there = pycomm.all_reduce(device.put(x), op, algorithm=SYMMETRIC)
        here = pycomm.all_reduce(x.copy(), op)
        assert device.get(there).tobytes() == here.tobytes(), (x.dtype, x.size, op)

    floats = "sum", "avg", "product", "min", "max"
    integers = "sum", "product", "min", "max", "band", "bor", "bxor"
    for dtype in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"):
        for op in floats if "float" in dtype else integers:
            compare(odd(group.rank, 333, dtype), op)
    for op in ("sum", "product", "bxor"):
        compare(numbers(group.rank, 77) % 2 == 0, op)
    for count in (0, 1, TWO_SHOT):
        compare(odd(group.rank, count, "float32"), "sum")
    whole = device.put(odd(group.rank, 1001, "float32"))
    pycomm.all_reduce(whole[3:900], algorithm=SYMMETRIC)  # not aligned to 16 bytes
    want = pycomm.all_reduce(odd(group.rank, 1001, "float32")[3:900].copy())
    assert device.get(whole[3:900]).tobytes() == want.tobytes()


@BOTH
@on("emulated", "cuda")
def test_the_bits_are_those_of_the_host_in_rank_order(machine, processes):
    machine.run(3, turned_on, same_bits, reproducible=True, **options_of(processes))


def choices(group: pycomm.Group, device: Any, enabled: bool) -> list[tuple[str, int, int]]:
    """By size: the algorithm in the text of a mismatch, collectives of NCCL, and messages."""
    if group.rank == 0:  # rank 0's option decides
        group.cuda_symmetric_memory = enabled
    found = []
    for count in (100, LARGE):
        x = device.put(numbers(group.rank, count))
        device.counts()
        pycomm.all_reduce(x)
        wanted = sum(numbers(rank, count) for rank in range(group.size))
        np.testing.assert_array_equal(device.get(x), wanted)
        counts = device.counts()
        with pytest.raises(errors.Mismatch) as caught:
            pycomm.all_reduce(x, "max" if group.rank else "sum")
        found.append((str(caught.value), counts["collectives"], counts["sends"]))
    return found


@on("emulated")  # the real NCCL does not count
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("reproducible", [True, False])
def test_small_arrays_and_sums_in_rank_order_use_it(machine, enabled, reproducible):
    for small, large in machine.run(3, choices, enabled, reproducible=reproducible):
        for (text, collectives, sends), by_default in ((small, True), (large, reproducible)):
            symmetric = enabled and by_default
            assert (f"{SYMMETRIC}, on CUDA devices" in text) == symmetric, text
            assert collectives == (not symmetric and not reproducible)
            assert (sends == 0) == (symmetric or not reproducible)


def refused(group: pycomm.Group, device: Any, shared: bool) -> None:
    x = device.put(numbers(group.rank))
    y = device.empty((group.size, 100), "float32")
    with pytest.raises(errors.Unsupported, match="shared|share" if shared else "all_reduce only"):
        pycomm.all_gather(x, y, algorithm=SYMMETRIC)
    with pytest.raises(errors.Error):
        pycomm.all_reduce(numbers(group.rank), algorithm=SYMMETRIC)
    part = group.split(0)
    assert part is not None
    assert part.cuda_symmetric_memory
    part.cuda_symmetric_memory = False
    with pytest.raises(errors.Unsupported, match="share" if shared else "cuda_symmetric_memory"):
        pycomm.all_reduce(x, algorithm=SYMMETRIC, group=part)
    pycomm.all_reduce(x)
    pycomm.all_reduce(x, group=part)


@on("emulated", "emulated, shared", "cuda")
def test_calls_that_cannot_use_it_raise(machine):
    machine.run(2, turned_on, refused, machine.shared)


def without_access(group: pycomm.Group, device: Any) -> str:
    device.runtime.refuse_peers(group.rank == 1)
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    device.get(x)
    with pytest.raises(errors.Unsupported) as caught:
        pycomm.all_reduce(x, algorithm=SYMMETRIC)
    assert device.counts()["collectives"] == 1
    return str(caught.value)


@on("emulated")
def test_a_rank_without_access_to_its_peers_is_named_and_nccl_used(machine):
    texts = machine.run(3, turned_on, without_access, processes=True, transport="")
    assert all("not available: rank 1: cudaIpcOpenMemHandle: " in text for text in texts), texts


def repeats(group: pycomm.Group, device: Any) -> None:
    x, y = (device.put(odd(group.rank + i, 3000, "float32")) for i in range(2))
    pycomm.all_reduce(x)  # connects the ranks
    device.write(x, odd(group.rank, 3000, "float32"))
    device.get(x)
    pycomm.barrier()  # no allocation while another thread captures
    device.capture()
    pycomm.all_reduce(x, algorithm=SYMMETRIC)
    launch = device.end_capture()
    here = odd(group.rank, 3000, "float32")
    for _ in range(3):  # between other calls of the group, which have other slots
        launch()
        here = pycomm.all_reduce(here)
        pycomm.all_reduce(y, algorithm=SYMMETRIC)
        assert device.get(x).tobytes() == here.tobytes()
        device.get(y)


@on("emulated", "cuda")
def test_a_graph_repeats_it_between_other_calls(machine):
    machine.run(3, turned_on, repeats, reproducible=True)


def killed(group: pycomm.Group, device: Any) -> tuple[str, bytes]:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x, algorithm=SYMMETRIC)
    before = device.get(x).tobytes()
    work = None
    if group.rank == 2:
        device.delay()  # enqueued here, and never run
    work = pycomm.all_reduce(x, algorithm=SYMMETRIC, async_op=True)
    work.wait()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    after = device.get(x).tobytes()  # the kernel has ended
    with pytest.raises((errors.PeerLost, errors.GroupBroken)) as caught:
        work.wait()
    return str(caught.value), after == before


@on("emulated")  # until the test releases it: a GPU's delay ends by itself
def test_a_kernel_that_waits_for_a_lost_rank_ends_without_a_result(machine):
    options = {**options_of(True), "return_exceptions": True, "exit_timeout_s": 60.0}
    *living, dead = machine.run(3, turned_on, killed, **options)
    assert isinstance(dead, errors.PeerLost)
    for found in living:
        assert isinstance(found, tuple), found
        text, unchanged = found
        assert "rank 2" in text, text
        assert unchanged


def many_groups(group: pycomm.Group, device: Any) -> None:
    x = device.put(numbers(group.rank))
    for turn in range(3):  # regions of closed groups are used again
        part = group.split(0)
        assert part is not None
        device.write(x, numbers(group.rank + turn))
        pycomm.all_reduce(x, algorithm=SYMMETRIC, group=part)
        wanted = sum(numbers(rank + turn) for rank in range(group.size))
        np.testing.assert_array_equal(device.get(x), wanted)
        part.close()


@BOTH
@on("emulated", "cuda")
def test_groups_share_a_pool_of_regions(machine, processes):
    machine.run(3, turned_on, many_groups, **options_of(processes))
