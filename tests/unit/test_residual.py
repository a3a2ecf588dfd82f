"""The transaction of a compressed step: undone, redone and committed."""

import pytest
import torch
from torch import Tensor

from pycomm.compress.residual import Elements, Entry, Transaction, Whole, cut

COUNTS = (7, 0, 5)


def arrays(seed: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=drawn) for count in COUNTS]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def copies(given: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in given]


def test_cut_gives_each_array_its_elements() -> None:
    indices = torch.tensor([0, 6, 7, 11, 12, 40], dtype=torch.int32)
    parts = list(cut(COUNTS, indices, indices.float()))
    assert [places.tolist() for places, _ in parts] == [[0, 6], [], [0, 4]]
    assert [values.tolist() for _, values in parts] == [[0.0, 6.0], [], [7.0, 11.0]]


@pytest.mark.parametrize("group", [1, 4])
def test_a_step_is_undone_and_redone(group: int) -> None:
    """Elements of a tensor that another change saved as a whole; groups that are shorter."""
    u, v, owned = arrays(0), arrays(1), {"a": torch.ones(2)}
    before = [*copies(u), *copies(v)]
    transaction = Transaction()
    transaction.record(Whole("first", [u[0], v[0]]))
    u[0].zero_()
    indices = torch.tensor([1, 3] if group == 4 else [1, 3, 7, 11], dtype=torch.int32)
    whole = [torch.cat(u), torch.cat(v)]
    groups = [list(range(4, 7)), list(range(11, 12))] if group == 4 else [[1], [3], [7], [11]]
    places = torch.tensor([place for one in groups for place in one])
    saved = [torch.full((len(indices) * group,), 7.0) for _ in whole]  # also behind the ends
    for x, to in zip(whole, saved, strict=True):
        for row, one in zip(to.view(-1, group), groups, strict=True):
            row[: len(one)] = x[one]
    for x in (u, v):
        for part, (at, _) in zip(x, cut(COUNTS, places, places), strict=True):
            part[at] = -1.0
    transaction.record(Elements([u, v], indices, saved, group))
    transaction.record(Entry(owned, "a", torch.zeros(2)))
    transaction.record(Entry(owned, "b", torch.zeros(3)))
    after = [*copies(u), *copies(v)]
    assert owned["a"].sum() == 0
    for _ in range(2):
        transaction.undo()
        transaction.undo()  # does nothing
        assert same(before, [*u, *v])
        assert list(owned) == ["a"]
        assert owned["a"].sum() == 2
        transaction.redo()
        assert same(after, [*u, *v])
        assert sorted(owned) == ["a", "b"]
    transaction.commit({"first"})
    assert same([before[0], before[3]], [u[0], v[0]])
    assert same([after[2], after[5]], [u[2], v[2]])
    transaction.undo()
    assert same([after[2], after[5]], [u[2], v[2]])
