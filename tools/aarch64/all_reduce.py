"""One of two ranks: each way of an all_reduce over shared memory, and over tcp; see run.py."""

import platform

import numpy as np

import pycomm

assert platform.machine() == "aarch64"
group = pycomm.init()
for count in (1, 12, 5_000, 100_000):  # in the flag's line, one exchange, two exchanges
    for dtype in ("float32", "float16", "int64"):
        mine = (np.arange(count) % 100 + group.rank).astype(dtype)
        out = pycomm.all_reduce(mine)
        assert np.array_equal(out, (2 * (np.arange(count) % 100) + 1).astype(dtype)), (count, dtype)
array = pycomm.empty(50_000, "float32")  # zero-copy
array[:] = group.rank + 1
pycomm.all_reduce(array)
assert np.all(array == 3)
pycomm.barrier()
