"""The order of the tests in a run with several workers: the longest ones first.

xdist gives each worker an equal, contiguous share of the tests; an idle worker then takes half of
what another one has left, from its end. A long test in the middle of a share may start last, and
the other workers are idle meanwhile. So each share begins with some of the longest tests.
"""

from collections.abc import Sequence
from itertools import islice

# Parts of the names of tests that take half a minute or more: the longest first.
LONGEST = (
    "test_programs.py::test_runs_unchanged[ray_train]",
    "test_cuda.py::test_kernels_are_correct_under_sanitizers[tsan-compact_batch]",
    "test_cuda.py::test_kernels_are_correct_under_sanitizers[tsan-groups]",
    "test_native.py::test_every_order_of_events",
    "test_streams.py::test_plans_run_on_streams[tsan]",
    "test_cuda.py::test_kernels_are_correct_under_sanitizers[tsan-graph]",
    "test_device_calls.py::test_small_measurement",
)


def longest_first(names: Sequence[str], workers: int) -> list[int]:
    """The indices of `names` in their new order: each worker's share begins with some of LONGEST.

    The others keep their order, since tests of one file share what they set up."""
    ranks = [[i for i, name in enumerate(names) if name.endswith(part)] for part in LONGEST]
    early = [i for found in ranks for i in found]
    others = iter(sorted(set(range(len(names))) - set(early)))
    order: list[int] = []
    for worker in range(workers):
        share = early[worker::workers]
        size = (len(names) - len(order)) // (workers - worker)
        order += share
        order += islice(others, max(size - len(share), 0))
    return [*order, *others]
