"""Groups created by split() or torch's new_group(): the ranks that learn of a failure in them and
in their parent, and the groups that continue.

Four processes in two subgroups, ranks 0 and 2 and ranks 1 and 3; the victim is rank 3.
"""

import contextlib
import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import Group, errors
from pycomm.testing import FaultPlan, run_ranks

VICTIM = 3
HEARTBEAT_S = 1.0
TRANSPORTS = ["shm", "tcp"]
ENDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def ones(group: Group) -> float:
    """The value of an element of a sum of ones."""
    return float(pycomm.all_reduce(np.ones(100), group=group)[7])


def lost_rank_in(group: Group) -> tuple[int | None, str]:
    """Calls until a rank is lost; returns the ranks that the error names."""
    with pytest.raises(errors.PeerLost) as caught:
        while True:
            ones(group)
    return caught.value.peer, str(caught.value)


def lose_one(group: Group, action: str, folder: str) -> Any:
    """The victim ends; the others return the errors in their subgroup and in the whole group."""
    part = group.split(group.rank % 2)
    assert part is not None
    pair = group.split(0 if group.rank in (0, VICTIM) else None)
    struck, pid = Path(folder, "struck"), group.peer_info()[VICTIM].pid
    pycomm.barrier(group=group)
    if group.rank == VICTIM:
        struck.write_text(str(time.monotonic()))
        os.kill(os.getpid(), ENDS[action])
    found: dict[str, Any] = {"pid": pid}
    if group.rank == 1:  # waits in the subgroup that has the victim
        found["part"] = lost_rank_in(part)
        found["after_s"] = time.monotonic() - float(struck.read_text())
        found["group"] = lost_rank_in(group)
    else:  # ranks without a common group with the victim notice nothing, at any time
        found["sums"] = [ones(part) for _ in range(50)]
        found["group"] = lost_rank_in(group)
        found["sums"] += [ones(part) for _ in range(50)]
    found["left"] = group.shrink().ranks
    if group.rank != 1:
        found["sums"] += [ones(part) for _ in range(50)]
        if pair is not None:  # another group that has the victim
            found["pair"] = lost_rank_in(pair)
    Path(folder, f"reported{group.rank}").touch()
    if action == "stop" and len(list(Path(folder).glob("reported*"))) == group.size - 1:
        with contextlib.suppress(ProcessLookupError):  # two ranks may both see that all reported
            os.kill(pid, signal.SIGKILL)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", ENDS)
def test_rank_failure_is_reported_only_in_groups_with_the_rank(
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
    assert (peer, pid in text) == (1, True), text  # the subgroup's numbering
    assert seen[1]["after_s"] < 1.0 + (HEARTBEAT_S if action == "stop" else 0.0)
    assert seen[0]["sums"] == seen[2]["sums"] == [2.0] * 150
    peer, text = seen[0]["pair"]
    assert (peer, pid in text) == (1, True), text


def fail_while_others_wait(group: Group) -> Any:
    """The victim raises while the other rank of its subgroup waits there for it."""
    part = group.split(group.rank % 2)
    of_part = part.split(0) if part is not None else None  # a subgroup of a subgroup
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
def test_an_exception_ends_the_calls_in_subgroups_with_its_text(processes: bool) -> None:
    seen = run_ranks(
        4, fail_while_others_wait, transport="shm", processes=processes, return_exceptions=True
    )
    assert isinstance(seen[VICTIM], ValueError)
    assert "rank 3 failed: ValueError: of its own" in str(seen[1])
    assert not isinstance(seen[1], BaseException), seen[1]
    if processes:  # threads are all aborted, whether they share a group with it or not
        assert seen[0] == seen[2] == [2.0] * 20


def made_by_torch(way: str, rank: int) -> Any:
    """A group of this rank and the other even one, or the other odd one."""
    if way == "new_group":
        return [dist.new_group([0, 2]), dist.new_group([1, VICTIM])][rank % 2]
    world = dist.group.WORLD
    assert world is not None
    options = copy.deepcopy(world._get_backend(torch.device("cpu")).options)
    halves = [[0, 2], [1, VICTIM]]
    return world.split_group(halves[rank % 2], opts=options, group_name=f"half {rank % 2}")


def end_in_a_group_of_torch(group: Group, way: str, action: str, folder: str) -> Any:
    """The same in groups of torch's new_group() or split_group(): the error and the delay."""
    store = dist.FileStore(f"{folder}/store", group.size)
    dist.init_process_group("pycomm", store=store, rank=group.rank, world_size=group.size)
    mine = made_by_torch(way, group.rank)
    gone = dist.new_group([1, VICTIM])
    dist.destroy_process_group(gone)  # aborted once, and not again
    struck, x = Path(folder, "struck"), torch.ones(100)
    dist.barrier()
    if group.rank == VICTIM:
        struck.write_text(str(time.monotonic()))
        if action == "exception":
            raise ValueError("of its own")
        os.kill(os.getpid(), ENDS[action])
    if group.rank != 1:
        for _ in range(20):
            mine.allreduce([x]).wait()
        return x[7].item()
    with pytest.raises(errors.Error) as caught:
        while True:
            mine.allreduce([x]).wait()
    late_s = time.monotonic() - float(struck.read_text())
    return type(caught.value).__name__, str(caught.value), late_s


@pytest.mark.parametrize("action", ["exception", "kill"])
@pytest.mark.parametrize("way", ["new_group", "split_group"])
def test_calls_in_groups_of_torch_end_with_the_reason(
    way: str, action: str, tmp_path: Path
) -> None:
    seen = run_ranks(
        4, end_in_a_group_of_torch, way, action, str(tmp_path), transport="shm", processes=True,
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(seen[1], tuple), seen[1]
    kind, text, late_s = seen[1]
    assert late_s < 1.0
    if action == "exception":
        assert (kind, "rank 3 failed: ValueError: of its own" in text) == ("GroupBroken", True), (
            text
        )
    else:
        assert (kind, "rank 1 (" in text) == ("PeerLost", True), text  # the group's numbering
    assert seen[0] == seen[2] == 2.0**20


def continue_without_the_parent(group: Group) -> float:
    part = group.split(group.rank % 2)
    assert part is not None
    pycomm.barrier(group=group)
    group.close()
    with pytest.raises(errors.GroupBroken):
        pycomm.barrier(group=group)
    x = np.full(100, float(group.rank), np.float32)
    pycomm.all_reduce(x, group=part)
    part.close()
    return float(x[7])


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_subgroups_continue_when_their_parent_is_closed(processes: bool) -> None:
    seen = run_ranks(4, continue_without_the_parent, transport="shm", processes=processes)
    assert seen == [2.0, 4.0, 2.0, 4.0]


def split_until_failure(group: Group) -> tuple[str, str] | None:
    try:
        pycomm.barrier(group=group)
        group.split(0)
    except errors.Error as error:
        return type(error).__name__, str(error)
    return None


def test_rank_failure_during_split_is_reported() -> None:
    """Also for a rank that learns of it in the parent's call that split() makes."""
    failures = []
    for after in range(0, 1200, 20):  # bytes of the calls that exchange the rank infos
        cut = FaultPlan(2, "disconnect", "all_gather", after)
        failures += [
            failure
            for failure in run_ranks(3, split_until_failure, transport="tcp", faults=[cut])
            if failure is not None
        ]
    assert {kind for kind, _ in failures} == {"PeerLost"}
    assert sum(text.startswith("all_gather: ") for _, text in failures) > 10


def test_abort_during_subgroup_creation_is_reported():
    """One of them learns of it before the others connect to it, and does not take part."""

    def program(group: Group) -> str:
        with pytest.raises(errors.GroupBroken) as caught:
            group.split(min(group.rank, 1))
            if group.rank == 0:  # its own subgroup is ready immediately
                group.abort("one of us has had enough")
            ones(group)
        return str(caught.value)

    for _ in range(20):  # in more than one of them the race occurs
        for message in run_ranks(4, program, transport="tcp", timeout_s=60):
            assert "one of us has had enough" in message
