"""Messages of device arrays, from Python: emulated devices and a fake NCCL, and GPUs.

Ranks are threads or processes with a device each, or share one (tests/support/group_devices.py).
"""

import re
import threading
import time
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import (
    EMULATED,
    Signal,
    machine_fixture,  # noqa: F401 - fixture
    numbers,
    on,
    on_devices,
    raise_failure_in_graph,
    summed_once,
)

import pycomm
from pycomm import errors

pytestmark = pytest.mark.timeout(300)


def round_trip(group: pycomm.Group, device: Any, async_op: bool) -> None:
    rank, size = group.rank, group.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype, shape in (("float32", 1000), ("int16", (3, 5)), ("bool", 7), ("float64", 0)):
        mine, got = device.put(numbers(rank, shape, dtype)), device.empty(shape, dtype)

        def give(x: Any = mine) -> Any:
            return pycomm.send(x, right, tag=5, async_op=async_op)

        def take(x: Any = got) -> Any:
            return pycomm.recv(x, left, tag=5, async_op=async_op)

        calls = [give, take] if rank else [take, give]  # one rank of the ring receives first
        works = [call() for call in calls]
        for work in works if async_op else ():
            work.wait()
        if not async_op:
            assert works[calls.index(take)] is got
        np.testing.assert_array_equal(device.get(got), numbers(left, shape, dtype))


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_arrays_on_devices_are_sent(machine, async_op, processes):
    options = {"processes": True, "transport": ""} if processes else {}
    machine.run(3, round_trip, async_op, **options)


def long_messages(group: pycomm.Group, device: Any) -> None:
    """Messages of each dtype that ranks without NCCL copy in several pieces."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool"):
        count = (5 << 20) // np.dtype(dtype).itemsize + 3
        mine, got = device.put(numbers(group.rank, count, dtype)), device.empty(count, dtype)
        if group.rank == 0:  # one rank of the ring receives first
            pycomm.recv(got, left)
        pycomm.send(mine, right)
        if group.rank > 0:
            pycomm.recv(got, left)
        np.testing.assert_array_equal(device.get(got), numbers(left, count, dtype))


def test_long_messages(machine):
    machine.run(2, long_messages)


def counted(group: pycomm.Group, device: Any) -> Any:
    x = summed_once(group, device)
    device.counts()
    before = group._devices[device.index].stats()
    for count in (100, 0):
        if group.rank == 0:
            pycomm.send(x[:count], 1)
        else:
            pycomm.recv(x[:count], 0)
    device.get(x)
    after = group._devices[device.index].stats()
    sent = after.bytes_sent - before.bytes_sent, after.frames_sent - before.frames_sent
    return device.counts(), after.calls - before.calls, sent


@on("emulated")  # the real NCCL does not count
def test_message_is_one_launch_and_empty_message_is_none(machine):
    (there, calls, sent), (here, _, got) = machine.run(2, counted)
    assert there == {
        "groups": 1, "sends": 1, "receives": 0, "bytes_sent": 400, "collectives": 0
    }  # fmt: skip
    assert here == {
        "groups": 1, "sends": 0, "receives": 1, "bytes_sent": 0, "collectives": 0
    }  # fmt: skip
    assert (calls, sent, got) == (2, (400, 1), (0, 1))


def from_any_source(group: pycomm.Group, device: Any) -> None:
    if group.rank:
        pycomm.send(device.put(numbers(group.rank)), 0)
        return
    got = [device.empty(100, "float32") for _ in range(2)]
    work = pycomm.recv(got[0], -1, async_op=True)
    pycomm.recv(got[1], -1)
    work.wait()
    sums = sum(device.get(x) for x in got)
    np.testing.assert_array_equal(sums, numbers(1) + numbers(2))
    while not work.done():
        pass
    first = work.source
    np.testing.assert_array_equal(device.get(got[0]), numbers(first))


def test_message_is_received_from_any_source(machine):
    machine.run(3, from_any_source)


@on_devices(2)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_message_is_ordered_with_its_stream(
    group: pycomm.Group, device: Any, async_op: bool
) -> None:
    x = device.put(numbers(0))
    # NCCL connects two ranks at their first message, which may wait for the device.
    pycomm.send(x, 1) if group.rank == 0 else pycomm.recv(x, 0)
    device.get(x)
    for turn in range(10):
        go_on = device.delay()
        if group.rank == 0:
            device.write(x, numbers(turn))  # the message starts after this
            call = pycomm.send
        else:
            device.write(x, numbers(99))
            call = pycomm.recv
        work = call(x, 1 - group.rank, async_op=async_op)
        if async_op:
            work.wait()
            assert not work.done()
        assert not device.idle()
        copy = x.clone() if device.name == "cuda" else x.copy()  # after the message
        device.write(x, numbers(99))  # after the copy
        pycomm.barrier()  # so neither rank waited for a device
        go_on()
        np.testing.assert_array_equal(device.get(copy), numbers(turn))


@on_devices(2)
def test_messages_are_captured_in_a_graph(group: pycomm.Group, device: Any) -> None:
    rank = group.rank
    x, y = device.put(numbers(rank)), device.empty(100, "float32")

    def there_and_back() -> None:
        if rank == 0:
            pycomm.send(x, 1)
            pycomm.recv(y, 1)
        else:
            pycomm.recv(y, -1)
            pycomm.send(x, 0, async_op=True).wait()

    there_and_back()
    device.get(y)
    device.capture()
    there_and_back()
    launch = device.end_capture()
    found = []
    for turn in range(3):
        device.write(x, numbers(rank + turn))
        launch()
        found.append(device.get(y))
    raise_failure_in_graph(device, x)
    for turn in range(3):
        np.testing.assert_array_equal(found[turn], numbers(1 - rank + turn))


def disagree(group: pycomm.Group, device: Any) -> list[str]:
    rank = group.rank
    x, y = device.put(numbers(7)), device.put(numbers(7, 100, "int32"))
    pycomm.all_reduce(device.put(numbers(rank)))  # the device group exists
    mistakes = [
        lambda: pycomm.recv(x[:50], 0),
        lambda: pycomm.recv(y, 0),
        lambda: pycomm.recv(np.zeros(100, np.float32), 0),
        lambda: pycomm.recv(x[:50], 0, async_op=True).wait(),
        lambda: pycomm.send(x, 0),  # while rank 0 sends as well
    ]
    messages = []
    for mistake in mistakes:
        with pytest.raises(errors.Mismatch, match="no data was sent") as caught:
            pycomm.send(x, 1) if rank == 0 else mistake()
        np.testing.assert_array_equal(device.get(x), numbers(7))
        np.testing.assert_array_equal(device.get(y), numbers(7, 100, "int32"))
        z = device.put(numbers(rank))
        pycomm.send(z, 1) if rank == 0 else pycomm.recv(z, 0)
        np.testing.assert_array_equal(device.get(z), numbers(0))
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_mismatch_is_reported_to_both_ranks_before_data_moves(machine, transport):
    for messages in machine.run(2, disagree, transport=transport):
        assert all("send(float32, count 100, tag 0, direct, on CUDA devices)" in text
                   for text in messages)  # fmt: skip
        assert "recv(float32, count 50, tag 0" in messages[0]
        assert "recv(int32, count 100, tag 0" in messages[1]
        assert "recv(float32, count 100, tag 0, direct)" in messages[2]
        assert "each waits for the other to receive" in messages[4]


def late(group: pycomm.Group, device: Any, over: Signal) -> str:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    for peer in (group.rank, 2):
        with pytest.raises(errors.InvalidArgument, match=f"rank {peer}"):
            pycomm.send(x, peer)
    if group.rank == 1:
        assert over.wait(60), "rank 0 still waits"
        return ""
    try:
        with pytest.raises(errors.Timeout, match="rank 1") as caught:
            pycomm.send(x, 1, timeout_s=0.3)
    finally:
        over.set()
    return str(caught.value)


def test_missing_receiver_is_named(machine, tmp_path):
    message, _ = machine.run(2, late, Signal(tmp_path))
    assert message.startswith("send: Timed out after 0.3")


def stuck(group: pycomm.Group, device: Any, received: Signal) -> str:
    x = summed_once(group, device)
    if group.rank == 0:
        device.delay()  # nothing is sent
        work = pycomm.send(x, 1, tag=4, async_op=True, timeout_s=1)
    else:
        work = pycomm.recv(x, -1, tag=4, async_op=True, timeout_s=1)
    work.wait()
    deadline = time.monotonic() + 60
    while not work.done():
        assert time.monotonic() < deadline, "the hanging device work was not aborted"
    if group.rank == 1:
        received.set()
    with pytest.raises(errors.Error) as caught:
        work.wait()
    with pytest.raises(errors.GroupBroken):
        while time.monotonic() < deadline:
            pycomm.barrier()
    # The end of this rank opens its stream, while the abort of its communicator is under way.
    assert received.wait(60), "rank 1 still waits"
    return str(caught.value)


@on(*EMULATED)  # a GPU's delay ends by itself
def test_a_message_that_hangs_on_a_device_is_named_and_ended(machine, tmp_path):
    sender, receiver = machine.run(2, stuck, Signal(tmp_path))
    of_both = f"(float32, count 100, tag 4, {machine.own}, on CUDA devices)"
    assert f"send{of_both} to rank 1" in sender
    assert f"recv{of_both} from rank 0" in receiver
    assert any("did not complete on the device within 1" in text for text in (sender, receiver))


def first_call_disagrees(group: pycomm.Group, device: Any, sends: bool) -> str:
    """The first call with arrays on devices is one end of a message, the other is on the host."""
    x, y = device.put(numbers(group.rank)), np.zeros(100, np.float32)
    if group.rank == 0:
        with pytest.raises(errors.Mismatch) as caught:
            pycomm.send(x, 1) if sends else pycomm.recv(x, 1)
    elif sends:
        with pytest.raises(errors.Mismatch) as caught:
            pycomm.recv(y, 0)
    else:
        pycomm.send(y, 0)  # returns before the peer receives
        caught = None
    np.testing.assert_array_equal(device.get(x), numbers(group.rank))
    pycomm.all_reduce(x)  # the first that both make on devices
    np.testing.assert_array_equal(device.get(x), numbers(0) + numbers(1))
    return "" if caught is None else str(caught.value)


@on(*EMULATED)
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize("sends", [True, False], ids=["send", "recv"])
def test_first_message_against_an_end_on_the_host_is_a_mismatch(machine, sends, transport):
    texts = machine.run(2, first_call_disagrees, sends, transport=transport)
    on_device = f"{'send' if sends else 'recv'}(float32, count 100, tag 0, direct, on CUDA devices)"
    on_host = f"{'recv' if sends else 'send'}(float32, count 100, tag 0, direct)"
    for text in texts[: 2 if sends else 1]:
        assert on_device in text
        assert on_host in text
        assert ("no data was sent" if sends else "the message is dropped") in text


def reduces_from_the_host(group: pycomm.Group, device: Any) -> str:
    """The root passes an array on a device, the others pass arrays in host memory."""
    x, y = device.put(numbers(group.rank)), np.zeros(100, np.float32)
    pycomm.all_reduce(x)
    if group.rank != 0:
        pycomm.reduce(y, 0)  # returns: this rank only sends
    with pytest.raises(errors.Mismatch) as caught:
        pycomm.reduce(x, 0) if group.rank == 0 else pycomm.barrier()
    np.testing.assert_array_equal(device.get(x), sum(numbers(r) for r in range(group.size)))
    return str(caught.value)


@on(*EMULATED)
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_rank_that_only_sends_from_the_host_raises_at_its_next_call(machine, transport):
    for text in machine.run(3, reduces_from_the_host, transport=transport):
        assert re.search(r"reduce\(float32, count 100, sum, root 0, \w+, on CUDA devices\)", text)


def two_of_four(group: pycomm.Group, device: Any, talkers: tuple[int, int], reverse: bool) -> Any:
    """Two ranks talk while the others make no call; then all ranks make a collective one."""
    x = device.put(numbers(group.rank))
    talks, peer = group.rank in talkers, sum(talkers) - group.rank
    if talks:
        first = (group.rank == talkers[0]) != reverse
        for sends in first, not first:
            (pycomm.send if sends else pycomm.recv)(x, peer)
        work = (pycomm.send if first else pycomm.recv)(x, peer, async_op=True)
        work.wait()
        device.get(x)
        assert not group._devices[device.index].formed
    both_talked.wait(60)  # before the first call of the others
    y = device.put(numbers(group.rank))
    pycomm.all_reduce(y)
    device.get(y)
    before = group._devices[device.index].stats()
    if talks:
        (pycomm.send if first else pycomm.recv)(y, peer)
    after = group._devices[device.index].stats()
    return device.get(x), device.get(y), after.frames_sent - before.frames_sent


both_talked = threading.Barrier(4)


@on(*EMULATED)
@pytest.mark.parametrize("reverse", [False, True])
def test_first_messages_connect_their_two_ranks_only(machine, reverse):
    both_talked.reset()
    talkers = (0, 1) if machine.shared else (1, 3)
    found = machine.run(4, two_of_four, talkers, reverse, transport="local")
    for rank, (x, y, groups) in enumerate(found):
        wanted = talkers[reverse] if rank in talkers else rank
        np.testing.assert_array_equal(x, numbers(wanted))
        np.testing.assert_array_equal(y, sum(numbers(r) for r in range(4)))
        assert groups == (rank in talkers) or machine.shared  # with the group's communicator
