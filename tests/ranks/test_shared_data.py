"""DataLoader(shared=True): one decoded copy of a data set per host."""

import itertools
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from torch.utils.data import Dataset, get_worker_info

import pycomm
from pycomm import Group
from pycomm.data import DataLoader
from pycomm.errors import Error, InvalidArgument, Mismatch
from pycomm.testing import run_ranks

COUNT = 11

Pair = namedtuple("Pair", "first second")


class Decoded(Dataset):
    """Samples of all types that can be shared. Writes a line for each sample that it decodes."""

    def __init__(self, log: Path, rank: int = 0) -> None:
        self.log, self.rank = log, rank

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{i} {self.rank} {get_worker_info() is not None}\n")
        return {
            "image": torch.full((3, 5), i, dtype=torch.uint8),
            "half": torch.tensor([i, -i], dtype=torch.bfloat16).t(),
            "flag": torch.tensor(i % 2 == 0),
            "none": torch.empty(0, 4),
            "arrays": [np.full((2, 3), i, np.float32, "F"), np.int16(i)],
            "numbers": (i, i / 4, i % 3 == 0),
            "pair": Pair(torch.tensor(i), "x" * 0 or i),
        }


def check(sample: Any, i: int) -> None:
    wanted = Decoded(Path(os.devnull))[i]
    assert list(sample) == list(wanted)
    for name in ("image", "half", "flag", "none"):
        assert sample[name].dtype == wanted[name].dtype
        assert torch.equal(sample[name], wanted[name])
    assert type(sample["arrays"]) is list
    for one, other in zip(sample["arrays"], wanted["arrays"], strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert sample["numbers"] == wanted["numbers"]
    assert [type(x) for x in sample["numbers"]] == [int, float, bool]
    assert type(sample["pair"]) is Pair
    assert sample["pair"] == wanted["pair"]


def double(sample: Any) -> Any:
    sample["image"] *= 2  # a copy, which the next epoch does not see
    return sample


def own(sample: Any) -> Any:
    return sample


def shared(group: Group, log: Path, workers: int) -> Any:
    loader = DataLoader(
        Decoded(log, group.rank), batch_size=None, shuffle=True, shared=True, transform=double,
        num_workers=workers, collate_fn=own,
    )  # fmt: skip
    before = log.read_text()
    seen = []
    for _ in range(3):
        for sample in loader:
            i = sample["numbers"][0]
            assert torch.equal(sample["image"], torch.full((3, 5), 2 * i, dtype=torch.uint8))
            sample["image"] //= 2
            check(sample, i)
            seen.append(i)
    pycomm.barrier()
    assert log.read_text() == before  # nothing was decoded after the constructor
    maps = Path("/proc/self/maps").read_text().splitlines()
    return seen, {line.split()[4] for line in maps if "memfd:pycomm_share" in line}


def decoded(log: Path) -> list[tuple[int, int, bool]]:
    """Sample, rank, and whether a worker decoded it; sorted."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return sorted((int(i), int(rank), worker == "True") for i, rank, worker in lines)


def test_ranks_decode_a_share_each_into_one_copy(tmp_path: Path) -> None:
    log = tmp_path / "log"
    results = run_ranks(2, shared, log, 0, transport="", processes=True)
    (_, ours), (_, theirs) = results
    assert ours & theirs  # the same memory
    everything = itertools.chain(*(seen for seen, _ in results))
    assert sorted(everything) == sorted(3 * list(range(COUNT)))
    assert any(i % 2 != rank for rank, (seen, _) in enumerate(results) for i in seen)
    # Once each, and sample 0 on each rank, for the layout.
    layouts = [(0, rank, False) for rank in range(2)]
    assert decoded(log) == sorted([(i, i % 2, False) for i in range(COUNT)] + layouts)


def test_workers_decode_and_read_the_copy(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_ranks(1, shared, log, 2)
    assert decoded(log) == [(0, 0, False)] + [(i, 0, True) for i in range(COUNT)]


def spawning(group: Group, log: Path) -> None:
    """The worker does not inherit the memory: it opens the file."""
    loader = DataLoader(
        Decoded(log), batch_size=None, shared=True, num_workers=1, collate_fn=own,
        multiprocessing_context="spawn",
    )  # fmt: skip
    for i, sample in enumerate(loader):
        check(sample, i)
    assert decoded(log) == [(0, 0, False)] + [(i, 0, True) for i in range(COUNT)]


def test_spawned_workers_map_the_copy(tmp_path: Path) -> None:
    run_ranks(1, spawning, tmp_path / "log")


def hosts(group: Group, log: Path) -> list[int]:
    loader = DataLoader(Decoded(log, group.rank), batch_size=None, shared=True, collate_fn=own)
    return [sample["numbers"][0] for sample in loader]


def test_each_host_has_a_copy(tmp_path: Path) -> None:
    names = ["one", "one", "two"]
    log = tmp_path / "log"
    found = run_ranks(3, hosts, log, host_names=names, transport="")
    assert sorted(itertools.chain(*found)) == list(range(COUNT))
    assert len(decoded(log)) == 3 + 2 * COUNT  # every host decodes all


class Samples(Dataset):
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        if self.values[i] is OSError:
            raise OSError("cannot decode")
        return self.values[i]


ONE = torch.ones(2)
WRONG: list[tuple[list[Any], type[Exception], str]] = [
    ([ONE, ONE[:1]], InvalidArgument, r"sample 1 has .*sample 0 has"),
    ([ONE, ONE.double()], InvalidArgument, r"sample 1 has .*sample 0 has"),
    ([ONE, (ONE,)], InvalidArgument, r"sample 1 has .*sample 0 has"),
    ([ONE, "text"], InvalidArgument, "sample 1 has a str, expected"),
    ([1, ONE.to("meta")], InvalidArgument, "sample 1 has a tensor on meta, expected"),
    ([1, np.array([None])], InvalidArgument, "sample 1 has a ndarray, expected"),
    ([ONE, OSError], OSError, "cannot decode"),
]


@on_ranks(2)
@pytest.mark.parametrize(("values", "kind", "text"), WRONG)
def test_an_invalid_sample_raises_on_every_rank(
    group: Group, values: list[Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind if group.rank == 1 else Error, match=text) as caught:
        DataLoader(Samples(values), shared=True)
    assert group.rank == 1 or "rank 1 failed: " in str(caught.value)
    assert len(DataLoader(Samples([]), shared=True)) == 0  # the group is usable


@on_ranks(2)
def test_different_data_sets_are_a_mismatch(group: Group) -> None:
    for values in ([ONE] * (3 + group.rank), [ONE[: 1 + group.rank]] * 3):
        with pytest.raises(Mismatch, match=r"rank 0 has 3 samples .*, rank 1 \d samples"):
            DataLoader(Samples(values), shared=True)
