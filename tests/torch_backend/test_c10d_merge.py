"""`ProcessGroup.merge_remote_group` on the backend "pycomm": merges groups and independent runs."""

import os
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from finished import finished_together
from paths import ROOT

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import CALL_S, LIMIT_S, Run, in_processes, run_fixture  # noqa: F401 - a fixture

from pycomm.errors import InvalidArgument, Timeout

CPU = torch.device("cpu")


def _store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _halves(way: str) -> dist.ProcessGroup:
    """Rank 0 alone, and all other ranks together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [0] if rank == 0 else list(range(1, size))
    if way == "split":
        part = dist.group.WORLD.split_group(members, timeout=timedelta(seconds=30))
    else:
        part = dist.new_group(members, timedelta(seconds=30), use_local_synchronization=True)
    assert part.size() == len(members)
    return part


@in_processes(3)
@pytest.mark.parametrize("way", ["split", "new"])
def test_groups_are_merged(way: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = _halves(way)
    limit = timedelta(seconds=40)
    merged = part.merge_remote_group(_store("merge"), size, limit, "merged", "of both")
    assert (merged.size(), merged.group_name, merged.group_desc) == (size, "merged", "of both")
    backend = merged._get_backend(CPU)
    assert backend.name() == "pycomm"
    assert backend.options._timeout == limit
    for group, seconds in ((part, 30), (dist.group.WORLD, CALL_S)):
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=seconds)

    x = torch.full((1000,), float(rank))
    merged.allreduce([x]).wait()
    assert (x == sum(range(size))).all()
    places = torch.empty(size, dtype=torch.int64)
    merged._allgather_base(places, torch.tensor([rank])).wait()
    assert places[merged.rank()] == rank
    assert sorted(places.tolist()) == list(range(size))

    y = torch.ones(3)
    part.allreduce([y]).wait()  # the merged groups still work
    assert (y == part.size()).all()
    again = merged.merge_remote_group(_store("again"), size, limit)
    again.barrier().wait()
    for group in (again, merged):
        group._get_backend(CPU).shutdown()
    dist.all_reduce(y)


@in_processes(2)
def test_a_merge_with_other_numbers_of_ranks_is_an_error() -> None:
    part = _halves("split")
    with pytest.raises(Timeout, match="of 3 ranks these did not join: 2"):
        part.merge_remote_group(_store("late"), 3, timedelta(seconds=1), "late")
    with pytest.raises(InvalidArgument, match="the group has 1: use a separate store"):
        part.merge_remote_group(_store("late"), 1, timedelta(seconds=1), "late")
    dist.barrier()


RUN = """
    import sys, torch, torch.distributed as dist
    from datetime import timedelta
    dist.init_process_group("pycomm", rank=0, world_size=1, store=dist.HashStore())
    store = dist.FileStore(sys.argv[1], 2)
    merged = dist.group.WORLD.merge_remote_group(store, 2, timedelta(seconds=60), "merged")
    x = torch.ones(4)
    merged.allreduce([x]).wait()
    print(merged.size(), x.tolist())
    dist.destroy_process_group()
"""


def test_independent_runs_are_merged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path / "store")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for done in finished_together([(command, env)] * 2, timeout=LIMIT_S):
        assert (done.stdout, done.returncode) == ("2 [2.0, 2.0, 2.0, 2.0]\n", 0), done.stderr
