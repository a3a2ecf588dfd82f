"""Failures of groups on devices: calls that hang, ranks that die, are late or abort the group, from
Python, with emulated devices and a fake NCCL, and GPUs.

Ranks are threads or processes with a device each (tests/support/group_devices.py).
"""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import (
    EMULATED,
    KINDS,
    Signal,
    machine_fixture,  # noqa: F401 - fixture
    numbers,
    on,
    on_devices,
    summed_once,
)
from thread_limit import no_new_threads

import pycomm
from pycomm import errors

pytestmark = pytest.mark.timeout(300)
DELAYED = EMULATED  # until the test releases it: a GPU's delay ends by itself
AT_ITS_DEATH = pytest.mark.parametrize(
    ("machine", "moment"),
    [(kind, "before") for kind in KINDS] + [(kind, "on the device") for kind in DELAYED],
    indirect=["machine"],
)


def stuck(group: pycomm.Group, device: Any) -> tuple[str, str]:
    x = summed_once(group, device)
    go_on = device.delay() if group.rank else None
    pycomm.all_reduce(x, timeout_s=1)
    began = time.monotonic()
    if group.rank == 0:
        device.get(x)  # until the communicator is aborted
        went_on.set()
    with pytest.raises(errors.GroupBroken) as caught:
        while time.monotonic() - began < 60:
            pycomm.barrier()
    with pytest.raises(errors.GroupBroken) as again:
        pycomm.all_reduce(x)
    if go_on:
        assert went_on.wait(60), "the other rank's stream still waits"
        go_on()
    return str(caught.value), str(again.value)


went_on = threading.Event()


@on(*EMULATED)  # a kernel that waits without a limit cannot be ended on a GPU
def test_a_call_that_hangs_on_a_device_is_named_and_ended(machine):
    went_on.clear()
    ranks = machine.run(2, stuck)
    for text in (text for messages in ranks for text in messages):
        assert f"all_reduce(float32, count 100, sum, {machine.own}, on CUDA devices)" in text
    # The first rank past the limit aborts the communicator, which may be what the other rank sees.
    late = "did not complete on the device within 1"
    assert any(all(late in text for text in messages) for messages in ranks), ranks


def killed(group: pycomm.Group, device: Any, moment: str) -> list[str]:
    x = summed_once(group, device)
    if group.rank == 2 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:
        device.delay()
        pycomm.all_reduce(x)
        os.kill(os.getpid(), signal.SIGKILL)
    messages = []
    for _ in range(2):
        with pytest.raises((errors.PeerLost, errors.GroupBroken)) as caught:
            for _ in range(1000):
                pycomm.all_reduce(x)
                device.get(x)
        messages.append(str(caught.value))
    return messages


@AT_ITS_DEATH
def test_a_rank_failure_is_reported_to_the_others(machine, moment):
    options = {"processes": True, "transport": "", "return_exceptions": True}
    *living, dead = machine.run(3, killed, moment, **options)
    assert isinstance(dead, errors.PeerLost)
    for messages in living:
        assert isinstance(messages, list), messages
        assert all("rank 2" in text or "gone" in text for text in messages), messages


def shrunk(group: pycomm.Group, device: Any) -> np.ndarray:
    x = summed_once(group, device)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((errors.PeerLost, errors.GroupBroken)):
        for _ in range(1000):
            pycomm.all_reduce(x)
            device.get(x)
    group.cuda_internode_transport = "tcp"
    rest = group.shrink(timeout_s=60)
    assert (rest.size, rest.cuda_internode_transport) == (2, "tcp")
    y = device.put(numbers(group.rank))
    pycomm.all_reduce(y, group=rest)
    return device.get(y)


def test_the_survivors_continue_without_the_failed_rank(machine):
    options = {"processes": True, "transport": "", "return_exceptions": True}
    zero, dead, two = machine.run(3, shrunk, **options)
    assert isinstance(dead, errors.PeerLost)
    for got in (zero, two):
        assert isinstance(got, np.ndarray), got
        np.testing.assert_array_equal(got, numbers(0) + numbers(2))


def killed_among_messages(group: pycomm.Group, device: Any, moment: str) -> str:
    x = summed_once(group, device)
    if group.rank == 2:
        if moment == "on the device":
            device.delay()
            pycomm.send(x, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((errors.PeerLost, errors.GroupBroken)) as caught:
        for _ in range(1000):
            if group.rank == 0:
                pycomm.recv(x, 2)
            else:
                pycomm.send(x, 2)
            device.get(x)
    return str(caught.value)


@AT_ITS_DEATH
def test_a_rank_failure_among_messages_is_reported_to_both_sides(machine, moment):
    options = {"processes": True, "transport": "", "return_exceptions": True}
    *living, dead = machine.run(3, killed_among_messages, moment, **options)
    assert isinstance(dead, errors.PeerLost)
    assert all(isinstance(message, str) and "rank 2" in message for message in living), living


def dies_with_a_call(group: pycomm.Group, device: Any) -> str:
    x = summed_once(group, device)
    if group.rank == 2:
        device.delay()
    work = pycomm.all_reduce(x, async_op=True)
    work.wait()
    pycomm.barrier()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    device.get(x)  # until the stream continues without that rank
    while not work.done():
        pass
    with pytest.raises(errors.Error, match=r"all_reduce\(float32, count 100") as caught:
        work.wait()
    return str(caught.value)


@on(*DELAYED)
def test_call_with_a_dead_rank_never_succeeds(machine):
    options = {"processes": True, "transport": "", "return_exceptions": True}
    *living, dead = machine.run(3, dies_with_a_call, **options)
    assert isinstance(dead, errors.PeerLost)
    assert all(isinstance(message, str) for message in living), living


def lacks_memory(group: pycomm.Group, device: Any, cached: bool) -> str:
    """A ring, which needs scratch, where rank 1 has no memory, or what torch keeps."""
    x, many = summed_once(group, device), device.put(np.ones(10_000, np.float32))
    if group.rank == 1:
        device.runtime.set_most_memory(1000)
        if cached:
            torch = pytest.importorskip("torch").cuda
            torch.is_initialized = lambda: True
            torch.empty_cache = lambda: device.runtime.set_most_memory(1 << 20)
    try:
        pycomm.all_reduce(many, algorithm="ring", timeout_s=60)
    except errors.Error as error:  # the test reads its text
        with pytest.raises(errors.GroupBroken):
            pycomm.all_reduce(x)
        return str(error)
    assert (device.get(many) == 2).all()
    return ""


@on(*EMULATED)
def test_all_ranks_learn_that_one_has_no_memory(machine):
    for text in machine.run(2, lacks_memory, False, processes=True, transport=""):
        assert re.search("has no memory for [0-9]+ bytes of scratch|cudaHostAlloc: ", text)


@on("emulated")
def test_memory_that_torch_keeps_is_freed_for_scratch(machine):
    assert machine.run(2, lacks_memory, True, processes=True, transport="") == ["", ""]


def late(group: pycomm.Group, device: Any, over: Signal) -> str:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    if group.rank == 1:
        over.wait(60)
        return ""
    try:
        with pytest.raises(errors.Timeout, match="missing from this call: rank 1") as caught:
            pycomm.all_reduce(x, timeout_s=0.5)
    finally:
        over.set()
    return str(caught.value)


def test_missing_rank_is_named(machine, tmp_path):
    message, _ = machine.run(2, late, Signal(tmp_path))
    assert "all_reduce" in message


def aborts(group: pycomm.Group, device: Any) -> str:
    x = summed_once(group, device)
    if group.rank:
        device.delay()
    pycomm.all_reduce(x)
    pycomm.barrier()  # both have enqueued the call
    if group.rank:
        group.abort("enough")
        assert went_on.wait(60), "the other rank's stream still waits"
    else:
        device.get(x)
        went_on.set()
    with pytest.raises(errors.GroupBroken) as caught:
        for _ in range(1000):
            pycomm.barrier()
    return str(caught.value)


@on(*DELAYED)
def test_abort_ends_running_calls(machine):
    went_on.clear()
    messages = machine.run(2, aborts)
    known = ("enough", "closed its connection", "closed unexpectedly")
    assert [text for text in messages if not any(word in text for word in known)] == []


@on_devices(2)
@on(*EMULATED)  # another thread has another current stream on a GPU
def test_two_threads_take_turns(group: pycomm.Group, device: Any) -> None:
    """A call from each of two threads, and the same from one thread of the other rank."""
    x = [device.put(numbers(group.rank)) for _ in range(2)]
    pycomm.all_reduce(device.put(numbers(group.rank)))
    if group.rank:
        time.sleep(0.3)  # until both threads of the other rank are inside; later is right, too
        for each in x:
            pycomm.all_reduce(each)
    else:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: pycomm.all_reduce(each, group=group), x))
    results = [device.get(each) for each in x]
    for x in results:
        np.testing.assert_array_equal(x, numbers(0) + numbers(1))


@on_devices(3)
def test_a_group_is_closed_when_its_calls_are_over(group: pycomm.Group, device: Any) -> None:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x, algorithm="ring")
    group.close()
    with pytest.raises(errors.GroupBroken, match="closed"):
        pycomm.all_reduce(x, group=group)
    x = device.get(x)
    np.testing.assert_array_equal(x, sum(numbers(rank) for rank in range(3)))


def closed_during_a_call(group: pycomm.Group, device: Any, closed: Signal) -> str:
    """Rank 1 lives, but its stream does not reach the call."""
    x = summed_once(group, device)
    if group.rank == 1:
        device.delay()
    work = pycomm.all_reduce(x, async_op=True, timeout_s=60)
    work.wait()
    if group.rank == 0:
        begun = time.monotonic()
        group._devices[device.index].close_after_peers(0.5)
        assert time.monotonic() - begun < 30, "closing the group waited for the limit of the call"
        closed.set()
    assert closed.wait(90)
    with pytest.raises(errors.Error) as caught:
        while True:
            pycomm.barrier(group=group)
    while not work.done():
        pass
    with pytest.raises(errors.Error):
        work.wait()
    return str(caught.value)


@on(*EMULATED)  # a GPU's delay ends by itself
def test_a_group_with_a_stuck_peer_is_closed_within_a_bound(machine, tmp_path):
    for text in machine.run(2, closed_during_a_call, Signal(tmp_path)):
        assert "rank 0 closed the group, whose calls did not complete within 0.5" in text


def aborted_by_the_host_group(group: pycomm.Group, device: Any) -> str:
    x = summed_once(group, device)
    if group.rank == 2:
        device.delay()
    work = pycomm.all_reduce(x, async_op=True, timeout_s=300)
    work.wait()
    pycomm.barrier()
    if group.rank == 2:
        group.core.abort("enough")  # of the host group only, so that NCCL does not see it
    with pytest.raises(errors.Error, match="enough"):
        while True:
            pycomm.barrier()
    deadline = time.monotonic() + 60
    while not work.done():
        assert time.monotonic() < deadline, "the waiting device work was not aborted"
    with pytest.raises(errors.Error, match=r"all_reduce\(float32, count 100") as caught:
        work.wait()  # completion implies that the failure is known, too
    group.close()
    assert time.monotonic() < deadline, "closing the group waited for the call"
    return str(caught.value)


@on(*DELAYED)
def test_device_waits_end_with_the_host_group(machine):
    found = machine.run(3, aborted_by_the_host_group)
    # The first rank aborts its communicator, which may be what the others see.
    assert any("waits on the device for rank" in message for message in found), found


def reduce_without_threads(group: pycomm.Group, device: Any) -> tuple[str, bool]:
    """A first call without threads: the error, and whether the next call succeeds."""
    x = device.put(numbers(group.rank))
    refused = ""
    with no_new_threads():
        try:
            pycomm.all_reduce(x, group=group, timeout_s=20)
        except errors.Unsupported as error:  # the result: its text is asserted
            refused = str(error)
        pycomm.barrier(group=group)
    pycomm.all_reduce(x, group=group, timeout_s=20)
    return refused, bool((device.get(x) == numbers(0) + numbers(1)).all())


@on("emulated, shared")  # the fake NCCL also needs threads
def test_first_device_call_without_threads_is_rejected(machine: Any) -> None:
    options = {"transport": "shm", "processes": True}
    for refused, right in machine.run(2, reduce_without_threads, **options):
        assert "the thread pycomm-timer cannot be created: Resource temporarily" in refused
        assert right
