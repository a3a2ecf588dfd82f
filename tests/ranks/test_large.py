"""Arrays with more than 2^31 elements or bytes."""

import numpy as np
from on_ranks import on_ranks

import pycomm
from pycomm.testing import run_ranks

COUNT = 2**31 + 17
HALF = (COUNT + 1) // 2  # of each of two ranks: together more than 31 bits count


@on_ranks(2)
def test_more_than_2_to_the_31_elements(group: pycomm.Group) -> None:
    x = np.zeros(COUNT, dtype=np.uint8)
    x[[0, 2**31 - 1, 2**31, COUNT - 1]] = 1 + group.rank
    pycomm.all_reduce(x, op="max", group=group)
    assert [
        int(x[0]),
        int(x[2**31 - 1]),
        int(x[2**31]),
        int(x[-1]),
        int(x.sum(dtype=np.int64)),
    ] == [2, 2, 2, 2, 8]


@on_ranks(2)
def test_an_output_of_more_than_2_to_the_31_elements(group: pycomm.Group) -> None:
    x = np.zeros(HALF, dtype=np.int8)
    x[[0, -1]] = 1 + group.rank
    out = pycomm.all_gather(x, group=group)
    assert [int(out[i, j]) for i in range(2) for j in (0, 1, -2, -1)] == [1, 0, 0, 1, 2, 0, 0, 2]


def scattered(group: pycomm.Group) -> list[int]:
    x = np.zeros((2, HALF), dtype=np.int8)
    x[:, [0, -1]] = [[1, 2], [3, 4]]
    row = pycomm.reduce_scatter(x, group=group)
    return [int(row[j]) for j in (0, 1, -2, -1)]


def test_an_input_of_more_than_2_to_the_31_elements() -> None:
    assert run_ranks(2, scattered) == [[2, 0, 0, 4], [6, 0, 0, 8]]
