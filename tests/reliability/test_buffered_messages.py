"""Messages without a matching receive: the limit of the buffer, and that senders wait then."""

import time
from typing import Any

import numpy as np
import pytest
from test_memory import resident

import pycomm
from pycomm import errors, testing

COUNT, MESSAGE = 40, 4 << 20  # 160 MiB together
KEPT = 64 << 20  # csrc/engine/mailbox.h, kMaxBufferedBytes
# Rings, a socket's buffers, the receiving array, and the allocator.
MARGIN = 32 << 20

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def message(i: int) -> Any:
    return np.full(MESSAGE // 4, i, np.float32)


def send_all(group: pycomm.Group, dst: int) -> list[Any]:
    return [pycomm.send(message(i), dst, tag=1, group=group, async_op=True) for i in range(COUNT)]


def receive_all(group: pycomm.Group, src: int) -> bool:
    into = np.zeros(MESSAGE // 4, np.float32)
    for i in range(COUNT):
        pycomm.recv(into, src, tag=1, group=group)
        if not np.array_equal(into, message(i)):
            return False
    return True


def receives_another(group: pycomm.Group) -> tuple[str, int, bool]:
    if group.rank == 0:
        works = send_all(group, 1)
        pycomm.send(np.ones(1, np.float32), 1, tag=2, group=group)
        for work in works:
            work.wait()
        return "", 0, True
    one = np.zeros(1, np.float32)
    before = resident("VmRSS")
    with pytest.raises(errors.Mismatch) as caught:
        pycomm.recv(one, 0, tag=2, group=group)
    grown = resident("VmHWM") - before
    right = receive_all(group, 0)
    pycomm.recv(one, 0, tag=2, group=group)
    return str(caught.value), grown, right and one[0] == 1


@both
def test_receive_behind_too_many_messages_names_the_first_ones(transport: str) -> None:
    text, grown, right = _run(receives_another, transport, 2)[1]
    assert "receive those first" in text
    assert "64 MiB" in text
    assert "tag 1" in text
    assert right
    assert grown <= KEPT + MESSAGE + MARGIN < COUNT * MESSAGE


def receives_from_another(group: pycomm.Group) -> Any:
    side = group.split(0)
    assert side is not None
    one = np.zeros(1, np.float32)
    if group.rank == 0:
        works = send_all(group, 1)
        done, since = 0, time.monotonic()
        while done < COUNT and time.monotonic() - since < 1:
            now = sum(work.done() for work in works)
            if now > done:
                done, since = now, time.monotonic()
        pycomm.send(one, 2, group=side)
        for work in works:
            work.wait()
        return done
    if group.rank == 2:
        pycomm.recv(one, 0, group=side)
        pycomm.send(one, 1, tag=2, group=group)
        return 0
    pycomm.recv(one, 2, tag=2, group=group)
    return receive_all(group, 0)


@both
def test_sender_waits_when_the_receive_buffer_is_full(transport: str) -> None:
    done, right, _ = _run(receives_from_another, transport, 3)
    assert right
    assert KEPT // MESSAGE <= done <= (KEPT + MESSAGE + MARGIN) // MESSAGE < COUNT


def reduces_before_it_receives(group: pycomm.Group) -> bool:
    x = np.ones(1, np.float32)
    if group.rank == 0:
        for i in range(COUNT):
            pycomm.send(message(i), 1, tag=1, group=group)
    pycomm.all_reduce(x, group=group)
    return x[0] == 2 and (group.rank == 0 or receive_all(group, 0))


def sends_before_it_receives(group: pycomm.Group) -> bool:
    for i in range(COUNT):
        pycomm.send(message(i), 1 - group.rank, tag=1, group=group)
    return receive_all(group, 1 - group.rank)


@both
@pytest.mark.parametrize("calls", [reduces_before_it_receives, sends_before_it_receives])
def test_rank_that_waits_for_the_peer_keeps_reading(calls: Any, transport: str) -> None:
    assert _run(calls, transport, 2) == [True, True]


def _run(calls: Any, transport: str, ranks: int) -> list[Any]:
    return testing.run_ranks(ranks, calls, transport=transport, processes=True, timeout_s=60)
