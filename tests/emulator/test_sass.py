"""Machine code of the kernels, compiled as setup.py does: accesses in flight and memory order.

No GPU is needed. For an architecture with machine code in the wheels, and one that is older.
"""

import re

import programs
import pytest
import sass
import test_cuda
from sample import of_the_day

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(sass.nvdisasm() is None, reason=f"needs {sass.PACKAGE}"),
    pytest.mark.timeout(300),
]

UNITS = ("dense", "host_word", "packets", "step", "topk")
# A part of the symbol of each kernel: the modifiers of its loads, and how many are in flight
# before the first is used.
IN_FLIGHT = {
    r"6updateILb0Efff": ("128", 8),
    r"6updateILb1Efff": ("128", 8),
    r"7collectIf": ("128", 4),
    r"10begin_topkIf": ("128", 4),
    r"6selectIf": ("128", 4),
    r"10reduce_allIf": ("128", 1),
    r"8cast_allIf13__nv_bfloat16": ("128", 1),
    r"8cast_allI13__nv_bfloat16f": ("64", 1),  # four elements
    r"4packIfLb[01]": ("", 8),
    r"6decodeILb[01]Eff": ("", 8),
}
# Vector accesses to global memory, by opcode and width.
ACCESSES = {
    r"6updateILb0Efff": {"LDG.128": 12, "STG.128": 8},  # four rows of g, u, v and of u, v
    r"6updateILb1Efff": {"LDG.128": 16, "STG.128": 8},  # the weights, too
    r"6decodeILb0Eff": {"STG.128": 1},
    r"10reduce_allIf": {"LDG.128": 1, "STG.128": 1},
    r"8cast_allIf13__nv_bfloat16": {"LDG.128": 1, "STG.64": 1},
    r"8cast_allI13__nv_bfloat16f": {"LDG.64": 1, "STG.128": 1},
}


# One of them each day, that of test_cuda.py if this has one.
CHECKED = ("80", "90")
ARCHITECTURES = [a for a in CHECKED if a in test_cuda.ARCHITECTURES] or of_the_day(CHECKED, 2)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request):
    """The instructions of each kernel, by its symbol."""
    paths = programs.build([f"cubin/{unit}.{request.param}.cubin" for unit in UNITS])
    return {name: code for path in paths for name, code in sass.functions(path).items()}


def matching(kernels, pattern):
    found = [code for name, code in kernels.items() if re.search(pattern, name)]
    assert found, pattern
    return found


def test_loads_are_in_flight_together(kernels):
    found = {
        pattern: min(sass.loads_in_flight(code, width) for code in matching(kernels, pattern))
        for pattern, (width, _) in IN_FLIGHT.items()
    }
    print(found)
    assert {k: n for k, n in found.items() if n < IN_FLIGHT[k][1]} == {}


def test_hot_kernels_move_sixteen_bytes_at_a_time(kernels):
    for pattern, accesses in ACCESSES.items():
        for code in matching(kernels, pattern):
            for access, least in accesses.items():
                opcode, width = access.split(".")
                found = sum(one.accesses(opcode, width) for one in code)
                assert found >= least, (pattern, access)


def test_nothing_is_read_through_the_read_only_cache(kernels):
    """Other blocks write the tables: a load marked as constant could return an old value."""
    constant = [n for n, code in kernels.items() if any(".CONSTANT" in i.opcode for i in code)]
    assert constant == []


def test_hot_kernels_have_no_local_memory(kernels):
    for pattern in IN_FLIGHT:
        for code in matching(kernels, pattern):
            assert [i.opcode for i in code if i.opcode.startswith(("LDL", "STL"))] == []


def test_blocks_publish_behind_a_fence_and_read_past_the_cache(kernels):
    """`select`: add_release, store_release, load_acquire and load_fresh of gpu.hpp."""
    for code in matching(kernels, r"6selectI"):
        order = sass.order(code)
        assert (order.release_atomics, order.release_stores, order.relaxed_stores) == (1, 1, 0)
        assert order.acquire_loads >= 1
        assert order.fresh_loads >= 4 + 8  # of a digit's result, and of the bins
    for code in matching(kernels, r"4packI"):
        order = sass.order(code)
        assert order.relaxed_stores == 1
        assert order.fresh_loads >= 1


def test_wait_for_the_host_polls_with_acquire_order_and_sleeps(kernels):
    """Each poll invalidates the L1 cache: later work reads what the host wrote before the word."""
    for code in matching(kernels, r"13wait_for_word"):
        order = sass.order(code, "SYS")
        assert order.acquire_loads >= 1
        assert order.fresh_loads == 0
        assert any(one.opcode == "NANOSLEEP" for one in code)
        assert [i.opcode for i in code if i.opcode.startswith(("LDL", "STL"))] == []
