"""What a group holds beside the caller's arrays, whatever the message: docs/architecture.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pycomm
from pycomm import testing

MOST = 16 << 20  # bytes of a rank, as documented
LARGE = 48 << 20


def resident(what: str) -> int:
    """Bytes of this process in memory, shared ones too: VmRSS now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


def held(group: pycomm.Group, dtype: str) -> dict[str, int]:
    """By verb: bytes that a group and its calls added at most, from before it stood."""
    size, count = group.size, LARGE // np.dtype(dtype).itemsize
    whole = np.ones(count // size * size, dtype)
    rows = whole.reshape(size, -1)
    part, others = rows[group.rank].copy(), np.ones_like(whole).reshape(size, -1)
    verbs: dict[str, Callable[[pycomm.Group], object]] = {
        "all_reduce": lambda g: pycomm.all_reduce(whole, group=g),
        "broadcast": lambda g: pycomm.broadcast(whole, 0, group=g),
        "reduce": lambda g: pycomm.reduce(whole, 0, group=g),
        "all_gather": lambda g: pycomm.all_gather(part, others, group=g),
        "reduce_scatter": lambda g: pycomm.reduce_scatter(rows, out=part, group=g),
        "all_to_all": lambda g: pycomm.all_to_all(rows, others, group=g),
    }
    found = {}
    for name, verb in verbs.items():
        pycomm.all_reduce(part[:1].copy(), group=group)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        own = group.split(0)
        assert own is not None
        whole.fill(1)
        verb(own)
        found[name] = resident("VmHWM") - before
        own.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "transport", "dtype"),
    [(2, "", "float32"), (3, "shm", "float32"), (3, "tcp", "float32"), (3, "tcp", "float16")],
)
def test_a_group_stays_small_whatever_the_message(ranks: int, transport: str, dtype: str) -> None:
    for by_verb in testing.run_ranks(ranks, held, dtype, transport=transport, processes=True):
        assert max(by_verb.values()) <= MOST, by_verb
        assert LARGE > 2 * MOST  # a copy of the message would not pass
