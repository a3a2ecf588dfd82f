"""Messages that go to the arrays of receives which wait for their turn."""

import collections
import random
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import Group
from pycomm.testing import run_ranks


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize("thread_multiple", [False, True])
def test_large_messages_reach_their_receives_in_any_order(
    transport: str, thread_multiple: bool
) -> None:
    """Messages arrive before, while and after their receives wait behind sends and sums."""

    def fn(group: Group, seed: int) -> None:
        me, chosen = group.rank, random.Random(seed + group.rank)
        peers, works = [rank for rank in range(group.size) if rank != group.rank], []
        sent, taken = collections.Counter[tuple[int, int]](), collections.Counter[tuple[int, int]]()
        arrays: list[tuple[Any, int]] = []
        for _ in range(3):
            steps = [(how, peer, tag) for how in "sr" for peer in peers for tag in (0, 1)] * 2
            chosen.shuffle(steps)
            for how, peer, tag in steps:
                key, count = (peer, tag), 17_000 + 9_000 * tag
                if how == "s":
                    x = np.full(count, 1000 * me + 100 * tag + sent[key])
                    works.append(pycomm.send(x, peer, tag, group=group, async_op=True))
                    sent[key] += 1
                    continue
                out = np.zeros(count, int)
                works.append(pycomm.recv(out, peer, tag, group=group, async_op=True))
                arrays.append((out, 1000 * peer + 100 * tag + taken[key]))
                taken[key] += 1
            total = pycomm.all_reduce(np.ones(30_000), group=group)
            assert set(total.tolist()) == {group.size}
        for work in works:
            work.wait()
        for out, wanted in arrays:
            assert set(out.tolist()) == {wanted}

    for seed in range(8):
        run_ranks(3, fn, seed, transport=transport, thread_multiple=thread_multiple)
