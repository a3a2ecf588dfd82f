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
    "test_streams.py::test_plans_run_on_streams[tsan]",
    "test_bench_collectives.py::test_collectives_run[all]",
    "test_launch_replace.py::test_a_spare_host_takes_the_place_of_a_lost_one",
    "test_hosts.py::test_training_on_two_hosts_equals_one_host",
    "test_bench_kernels_devices.py::test_whole_command_with_emulated_kernels",
    "test_device_groups.py::test_events_are_reused[emulated]",
    "test_combinations.py::test_threads",
    "test_c10d_forms.py::test_collectives_compiled_by_inductor",
)


def longest_first(names: Sequence[str], workers: int) -> list[int]:
    """The indices of `names` in their new order: each worker's share begins with some of LONGEST.

    The others keep their order, since tests of one file share what they set up."""
    ranks = [[i for i, name in enumerate(names) if part in name] for part in LONGEST]
    early = [i for found in ranks for i in found]
    others = iter(sorted(set(range(len(names))) - set(early)))
    order: list[int] = []
    for worker in range(workers):
        share = early[worker::workers]
        size = (len(names) - len(order)) // (workers - worker)
        order += share
        order += islice(others, max(size - len(share), 0))
    return [*order, *others]
