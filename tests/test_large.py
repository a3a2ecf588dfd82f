"""Arrays that 32 bits cannot count."""

import numpy as np

import pycomm
from pycomm.testing import run_ranks

COUNT = 2**31 + 17


def largest(group: pycomm.Group) -> list[int]:
    x = np.zeros(COUNT, dtype=np.uint8)
    x[[0, 2**31 - 1, 2**31, COUNT - 1]] = 1 + group.rank
    pycomm.all_reduce(x, op="max", group=group)
    return [int(x[0]), int(x[2**31 - 1]), int(x[2**31]), int(x[-1]), int(x.sum(dtype=np.int64))]


def test_more_than_2_to_the_31_elements() -> None:
    assert run_ranks(2, largest) == [[2, 2, 2, 2, 8]] * 2
