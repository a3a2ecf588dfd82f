"""Groups that split() made: who hears of a loss in them, in their parent, and who goes on.

Four processes in two parts, ranks 0 and 2 and ranks 1 and 3; the victim is rank 3.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks

VICTIM = 3
HEARTBEAT_S = 1.0
TRANSPORTS = ["shm", "tcp"]
ENDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def ones(group: Group) -> float:
    """What an element of ones comes to."""
    return float(pycomm.all_reduce(np.ones(100), group=group)[7])


def loss_in(group: Group) -> tuple[int | None, str]:
    """Calls until somebody is lost; gives whom the error names."""
    with pytest.raises(errors.PeerLost) as caught:
        while True:
            ones(group)
    return caught.value.peer, str(caught.value)


def lose_one(group: Group, action: str, folder: str) -> Any:
    """The victim ends; the others tell what their part and the whole group made of it."""
    part = group.split(group.rank % 2)
    assert part is not None
    pair = group.split(0 if group.rank in (0, VICTIM) else None)
    struck, pid = Path(folder, "struck"), group.members[VICTIM].pid
    pycomm.barrier(group=group)
    if group.rank == VICTIM:
        struck.write_text(str(time.monotonic()))
        os.kill(os.getpid(), ENDS[action])
    found: dict[str, Any] = {"pid": pid}
    if group.rank == 1:  # waits in the part that has the victim
        found["part"] = loss_in(part)
        found["after_s"] = time.monotonic() - float(struck.read_text())
        found["group"] = loss_in(group)
    else:  # whoever is in no group with it hears nothing, before and after it hears of the loss
        found["sums"] = [ones(part) for _ in range(50)]
        found["group"] = loss_in(group)
        found["sums"] += [ones(part) for _ in range(50)]
    found["left"] = group.shrink().ranks
    if group.rank != 1:
        found["sums"] += [ones(part) for _ in range(50)]
        if pair is not None:  # another group that has the victim
            found["pair"] = loss_in(pair)
    Path(folder, f"told{group.rank}").touch()
    if action == "stop" and len(list(Path(folder).glob("told*"))) == group.size - 1:
        with contextlib.suppress(ProcessLookupError):  # two may see that all have told
            os.kill(pid, signal.SIGKILL)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", ENDS)
def test_a_loss_is_heard_in_the_groups_that_have_the_rank_and_in_no_other(
    action: str, transport: str, tmp_path: Path
) -> None:
    seen = run_ranks(
        4, lose_one, action, str(tmp_path), transport=transport, processes=True,
        heartbeat_s=HEARTBEAT_S, return_exceptions=True,
    )  # fmt: skip
    for rank in (0, 1, 2):
        assert isinstance(seen[rank], dict), seen[rank]
        peer, text = seen[rank]["group"]
        assert peer == VICTIM
        assert seen[rank]["left"] == [0, 1, 2]
        assert f"rank {VICTIM} " in text
    pid = f"pid {seen[1]['pid']})"
    peer, text = seen[1]["part"]
    assert (peer, pid in text) == (1, True), text  # as the part counts
    assert seen[1]["after_s"] < 1.0 + (HEARTBEAT_S if action == "stop" else 0.0)
    assert seen[0]["sums"] == seen[2]["sums"] == [2.0] * 150
    peer, text = seen[0]["pair"]
    assert (peer, pid in text) == (1, True), text


def fail_while_others_wait(group: Group) -> Any:
    """The victim raises while the other of its part waits there for it."""
    part = group.split(group.rank % 2)
    of_part = part.split(0) if part is not None else None  # a part of a part
    assert part is not None
    assert of_part is not None
    pycomm.barrier(group=group)
    if group.rank == VICTIM:
        raise ValueError("of its own")
    if group.rank != 1:
        return [ones(part) for _ in range(20)]
    with pytest.raises(errors.GroupBroken) as caught:
        ones(of_part)
    return str(caught.value)


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_an_exception_ends_the_calls_in_parts_with_its_text(processes: bool) -> None:
    seen = run_ranks(
        4, fail_while_others_wait, transport="shm", processes=processes, return_exceptions=True
    )
    assert isinstance(seen[VICTIM], ValueError)
    assert "rank 3 failed: ValueError: of its own" in str(seen[1])
    assert not isinstance(seen[1], BaseException), seen[1]
    if processes:  # as threads all are ended, whether they are in a group with it or not
        assert seen[0] == seen[2] == [2.0] * 20
