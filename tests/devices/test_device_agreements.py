"""Calls that are enqueued before the ranks agree about them: cuda_agreement="after".

Emulated devices. A rank runs ahead only if its calls wait for no other host: in these tests the
other rank begins when the first one has made its calls.
"""

import contextlib
import os
import signal
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import Signal, machine_fixture, numbers, odd, on, on_devices  # noqa: F401 - fixture
from test_device_groups import MISTAKES, every_verb
from test_device_order import alternate

import pycomm
from pycomm import errors
from pycomm._core_api import device_groups

pytestmark = pytest.mark.timeout(300)

LIMIT_S = 60.0  # of the wait for another rank
PROCESSES = {"processes": True, "transport": "", "return_exceptions": True}


def after(group: pycomm.Group, device: Any, body: Any, *args: Any) -> Any:
    """Calls `body` in a group that agrees after it enqueues repeated calls."""
    if group.rank == 0:  # rank 0's option decides
        group.cuda_agreement = "after"
    return body(group, device, *args)


def agreed_array(group: pycomm.Group, device: Any, count: int = 100) -> Any:
    """An array of ones, about whose sum the ranks have agreed once."""
    x = device.put(np.ones(count, np.float32))
    pycomm.all_reduce(x)
    device.write(x, np.ones(count, np.float32))
    device.get(x)
    pycomm.barrier()
    return x


def runs_ahead(group: pycomm.Group, device: Any, made: Signal, async_op: bool) -> None:
    x = agreed_array(group, device)
    if group.rank == 1:
        assert made.wait(LIMIT_S), "rank 0 waits for this rank"
    works = [pycomm.all_reduce(x, async_op=async_op) for _ in range(5)]
    for work in works if async_op else ():
        work.wait()
        assert group.rank == 1 or not work.done()
    if group.rank == 0:
        made.set()
    np.testing.assert_array_equal(device.get(x), np.full(100, group.size**5))
    assert all(work.done() for work in (works if async_op else ()))


@on("emulated")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_rank_makes_calls_before_the_other_one(machine, tmp_path, async_op, processes):
    options = {"processes": True, "transport": ""} if processes else {}
    machine.run(2, after, runs_ahead, Signal(tmp_path), async_op, **options)


@on_devices(3)
@on("emulated")
def test_the_bits_are_those_of_calls_that_agree_before(group: pycomm.Group, device: Any) -> None:
    group.cuda_agreement = "after"
    other = group.split(0)
    assert other is not None
    assert other.cuda_agreement == "after"
    group.cuda_agreement = "before"
    for turn in range(3):
        for algorithm in ("nccl", "ring", "tree", "direct"):
            x = odd(group.rank + turn, 333, "float32")
            here, there = device.put(x), device.put(x)
            pycomm.all_reduce(here, algorithm=algorithm, group=group)
            pycomm.all_reduce(there, algorithm=algorithm, group=other)
            assert device.get(there).tobytes() == device.get(here).tobytes()


def twice(group: pycomm.Group, device: Any, async_op: bool) -> None:
    for _ in range(2):
        every_verb(group, device, async_op)


@on("emulated", "emulated, shared")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_verb_can_be_repeated(machine, async_op):
    machine.run(3, after, twice, async_op)


def behind_another_group(group: pycomm.Group, device: Any, made: Signal) -> None:
    """A call waits for an earlier one of another group that waits for its agreement."""
    x, y = agreed_array(group, device), device.put(np.ones(100, np.float32))
    other = group.split(0)
    pycomm.all_reduce(y, group=other)
    if group.rank == 1:
        assert made.wait(LIMIT_S)
    works = [pycomm.all_reduce(y, "max", group=other, async_op=True)]
    works.append(pycomm.all_reduce(x, async_op=True))
    if group.rank == 0:
        for work in works:
            with pytest.raises(errors.Timeout, match="still under way"):
                work.wait(timeout_s=0.1)
        made.set()
    for work in works:
        work.wait()
    np.testing.assert_array_equal(device.get(x), np.full(100, group.size))


@on("emulated")
def test_groups_enqueue_in_the_order_of_calls(machine, tmp_path):
    machine.run(2, after, alternate)
    machine.run(2, after, behind_another_group, Signal(tmp_path))


def disagrees(group: pycomm.Group, device: Any, how: str) -> str:
    x, y = (device.put(numbers(group.rank)) for _ in range(2))
    z = device.put(numbers(group.rank, 100, "int32"))
    for root in range(group.size):
        pycomm.broadcast(x, src=root)
    for array in (x, y[:50], z):
        pycomm.all_reduce(array)
    pycomm.all_reduce(x, "max")
    for algorithm in ("ring", "tree"):
        pycomm.all_reduce(x, algorithm=algorithm)
    device.get(x)
    pycomm.barrier()  # else a rank aborts the last of these calls on another one
    with pytest.raises(errors.Mismatch, match="disagree") as caught:
        MISTAKES[how](group, x, y, z)
        device.get(x)
        while True:
            pycomm.all_reduce(x)
            device.get(x)
    with pytest.raises((errors.Mismatch, errors.GroupBroken), match="disagree"):
        pycomm.all_reduce(x)
    with pytest.raises(errors.GroupBroken, match="disagree"):
        pycomm.all_reduce(x)
    with pytest.raises(errors.GroupBroken, match="disagree"):
        pycomm.barrier()
    return str(caught.value)


@on("emulated")
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize("how", sorted(MISTAKES.keys() - {"place"}))
def test_a_mismatch_is_raised_on_every_rank(machine, how, transport):
    for text in machine.run(3, after, disagrees, how, transport=transport):
        assert text.count("on CUDA devices") == 2
        assert "; arrays may have changed; " in text
        assert "no array was changed" not in text
        assert "cannot be used any more" in text


def peek(device: Any, x: Any, stream: Any) -> np.ndarray:
    """The elements now, although the stream of the device waits."""
    return np.frombuffer(device.runtime.get(x.at, x.nbytes, stream), x.dtype)


def used_too_early(group: pycomm.Group, device: Any, enqueued: Signal, agrees: bool) -> str:
    """Ranks 0 and 1 need nothing of rank 2 but its agreement, and a copy follows on rank 1."""
    x = device.put(numbers(group.rank))
    for verb in (pycomm.broadcast, pycomm.all_reduce):
        verb(x, algorithm="direct")
    device.write(x, numbers(group.rank))
    copy = device.put(np.zeros(100, np.float32))
    device.get(x)
    side = device.runtime.make_stream(device.index)
    pycomm.barrier()
    if group.rank == 2:
        assert enqueued.wait(LIMIT_S)
    verb = pycomm.broadcast if agrees or group.rank < 2 else pycomm.all_reduce
    work = verb(x, algorithm="direct", async_op=True)
    if agrees or group.rank < 2:  # rank 2 may already know that the calls differ
        work.wait()
    device.runtime.copy(copy.at, x.at, x.nbytes, device.stream)
    if group.rank == 1:
        while not np.array_equal(peek(device, x, side), numbers(0)):
            device.idle()  # until the message of rank 0 has arrived
        for _ in range(100):
            assert not device.idle()
        assert not work.done()
        assert not peek(device, copy, side).any(), "the copy did not wait for the agreement"
        enqueued.set()
    device.idle()
    while not peek(device, copy, side).any():
        device.idle()
    if agrees:
        work.wait()
        np.testing.assert_array_equal(peek(device, copy, side), numbers(0))
        return ""
    while group.rank == 2 and not work.done():  # its copy does not wait for the call
        device.idle()
    with pytest.raises(errors.Mismatch, match="arrays may have changed") as caught:
        work.wait()  # known before the copy was made
    return str(caught.value)


@on("emulated")
@pytest.mark.parametrize("agrees", [True, False], ids=["match", "mismatch"])
def test_later_work_waits_for_the_agreement(machine, tmp_path, agrees):
    texts = machine.run(3, after, used_too_early, Signal(tmp_path), agrees)
    assert [("broadcast" in text and "all_reduce" in text) for text in texts] == [not agrees] * 3


def rank_1_decides(group: pycomm.Group, device: Any, made: Signal) -> None:
    group.cuda_agreement = "after" if group.rank else "before"
    x = agreed_array(group, device)
    if group.rank == 0:
        assert made.wait(LIMIT_S)
    work = pycomm.all_reduce(x, async_op=True)
    if group.rank == 1:
        with pytest.raises(errors.Timeout, match="still under way"):
            work.wait(timeout_s=0.1)
        made.set()
    work.wait()
    device.get(x)
    group.cuda_agreement = "late"
    part = group.split(0)
    assert part is not None
    with pytest.raises(errors.InvalidArgument, match="cuda_agreement: got 'late', expected one of"):
        pycomm.all_reduce(x, group=part)
    with pytest.raises(errors.InvalidArgument, match="one of before, after"):
        device_groups.Options(1, "nccl", "never").check()


@on("emulated")
def test_the_option_of_rank_0_applies_to_all(machine, tmp_path):
    machine.run(2, rank_1_decides, Signal(tmp_path))


def captured(group: pycomm.Group, device: Any) -> None:
    x = agreed_array(group, device)
    for _ in range(3):
        pycomm.all_reduce(x)
    device.capture()
    pycomm.all_reduce(x)
    launch = device.end_capture()
    for _ in range(3):
        pycomm.all_reduce(x)
        device.get(x)
        launch()
        device.get(x)
    np.testing.assert_array_equal(device.get(x), np.full(100, group.size**9))


def captured_mismatch(group: pycomm.Group, device: Any) -> None:
    x = agreed_array(group, device)
    pycomm.all_reduce(x, "max")
    device.capture()
    with pytest.raises(errors.Mismatch, match="no array was changed"):
        pycomm.all_reduce(x, "sum" if group.rank == 0 else "max")
    device.end_capture()
    pycomm.all_reduce(x)
    np.testing.assert_array_equal(device.get(x), np.full(100, group.size))


@on("emulated")
@pytest.mark.parametrize("body", [captured, captured_mismatch])
def test_a_capture_agrees_before(machine, body):
    machine.run(2, after, body)


def killed(group: pycomm.Group, device: Any, made: Signal) -> str:
    x = agreed_array(group, device)
    if group.rank == 1:
        assert made.wait(LIMIT_S)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [pycomm.all_reduce(x, async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    made.set()
    device.get(x)  # until the stream continues without that rank
    texts = []
    for work in works:
        with pytest.raises((errors.PeerLost, errors.GroupBroken)) as caught:
            work.wait()
        texts.append(str(caught.value))
    with pytest.raises(errors.GroupBroken, match="rank 1"):
        pycomm.all_reduce(x)
    group.close()
    return min(texts, key=lambda text: "rank 1" in text)


@on("emulated")
def test_a_rank_dies_before_its_call(machine, tmp_path):
    living, dead = machine.run(2, after, killed, Signal(tmp_path), **PROCESSES)
    assert isinstance(dead, errors.PeerLost)
    assert isinstance(living, str), living
    assert "rank 1" in living


def ends(group: pycomm.Group, device: Any, made: Signal, how: str) -> str:
    x = agreed_array(group, device)
    if group.rank == 1:
        assert made.wait(LIMIT_S)
    else:
        for _ in range(5):
            pycomm.all_reduce(x)
        made.set()
    if how == "close":
        if group.rank == 1:
            for _ in range(5):
                pycomm.all_reduce(x)
        group.close()
        np.testing.assert_array_equal(device.get(x), np.full(100, group.size**5))
        return ""
    if group.rank == 0:
        group.abort("enough")
        device.get(x)  # the stream continues
    with pytest.raises(errors.GroupBroken) as caught:
        while True:
            with contextlib.suppress(errors.Mismatch):  # with a pending call of rank 0
                pycomm.barrier()
    return str(caught.value)


@on("emulated")
@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_group_ends_with_calls_ahead(machine, tmp_path, how):
    for text in machine.run(2, after, ends, Signal(tmp_path), how):
        assert ("enough" in text) == (how == "abort"), text
