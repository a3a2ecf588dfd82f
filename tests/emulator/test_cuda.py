"""CUDA kernels without a GPU: under sanitizers, with injected bugs, and through nvcc.

tests/unit/test_kernels.py compares the results with the reference, bit by bit. Here: no data race
and no access out of bounds in any order of blocks; every injected bug is found; bytes and launches
of a step; the output of nvcc for every architecture.
"""

import ctypes
import re

import numpy as np
import programs
import pytest
from mistakes import MISTAKES
from sample import of_the_day
from test_emulator import run

from pycomm import kernels
from pycomm._core_api import devices
from pycomm.errors import InvalidArgument

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.timeout(900),
]

SHORT = ["topk", "step", "step_dtypes", "brief", "infinity", "packets", "packet_dtypes", "dense"]
SHORT += ["quantize", "changed", "compact_brief"]
LONG = ["compact_batch", "groups", "graph", "compact"]  # up to a minute under a sanitizer
CASES = [*SHORT, *LONG, "compact_bits", "compact_graph"]
RUNS = [("plain", case) for case in CASES]
# Each day one of LONG under each sanitizer, and each of SHORT under one. compact_bits takes minutes
# under the thread sanitizer; the other cases cover the same code.
RUNS += of_the_day([("tsan", case) for case in [*LONG, "compact_graph"]], 5)
RUNS += of_the_day([("asan", case) for case in [*LONG, "compact_bits"]], 5)
BOTH = [(kind, case) for i, case in enumerate(SHORT) for kind in ("asan", "tsan")[:: (-1) ** i]]
RUNS += [("asan", "compact_graph"), *of_the_day(BOTH, 2)]
# Machine code of the wheels, and what the driver makes of PTX: each day for one GPU.
ARCHITECTURES = of_the_day(programs.ARCHITECTURES, len(programs.ARCHITECTURES))
MOST_REGISTERS = 128  # of a hot kernel in float32: 2 blocks of 256 threads on every architecture
HOT = ("update", "collect", "select", "pack", "decode")


def arguments(case, order, seed="1", blocks="4"):
    """Of gpu_check, for one case."""
    return ["--bits", case, "--order", order, "--seed", seed, "--blocks", blocks]


@pytest.mark.parametrize(("kind", "case"), RUNS)
def test_kernels_are_correct_under_sanitizers(kind, case):
    (program,) = programs.build([f"gpu_check.{kind}"])
    orders = [["forward"], ["reverse"]]
    if kind != "plain":
        orders = [["random", "5", "3"], ["random", "6", "1"], ["random", "7", "9"]]
    for order in of_the_day(orders, len(orders)):
        done = run(program, *arguments(case, *order), limit_s=300)
        assert done.stdout.endswith("right\n"), done.stdout[-4000:]
        assert done.returncode == 0


def test_gpu_check_is_built_for_a_gpu_and_refuses_unknown_arguments():
    program, emulated = programs.build(["gpu_check", "gpu_check.plain"])
    for words in (["--bit"], ["--bits", "no_case"], ["--order", "forward", "--bits"], []):
        assert run(program, *words).returncode == 2
    for words in (["--time"], ["--bits", "--order", "sideways"], ["--bits", "--seed"]):
        assert run(emulated, *words).returncode == 2


def mutants():
    """All planted mistakes."""
    return [mutant for mutant, _, _ in MISTAKES.values()]


def mutants_of_the_day():
    """A quarter of them, another one each day."""
    return of_the_day(mutants(), 4)


@pytest.mark.parametrize("mutant", mutants_of_the_day(), ids=lambda mutant: mutant.name)
def test_injected_bug_is_found(mutant):
    _, case, message = MISTAKES[mutant.name]
    (program,) = programs.build([f"mutants/{mutant.name}/gpu_check"], mutants())
    output = ""
    for seed in ("1", "2", "3"):
        done = run(program, *arguments(case, "random", seed, "3"), limit_s=280)
        output = done.stdout
        if done.returncode != 0 and re.search(message, output):
            return
    pytest.fail(f"not found by {mutant.kind} in {case}:\n{output[-3000:]}")


def test_at_least_twenty_bugs_are_injected():
    assert len(MISTAKES) >= 20


# ---- bytes and launches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "decay", "most"), [("float32", 0.0, 21), ("float32", 0.1, 25), ("float16", 0.0, 19)]
)
def test_bytes_and_launches_of_a_step(dtype, decay, most):
    """Steady residuals, 0.1 %: only the pass over the tensors matters."""
    emulated = programs.emulated()
    emulated.set_order("forward", 1, 4)
    rng = np.random.default_rng(3)
    count, k = 400_000, 400
    u, v = np.zeros(count, np.float32), np.zeros(count, np.float32)
    weight = rng.standard_normal(count).astype(dtype)
    with devices.override_kernels("cpu", emulated.kernels):
        workspace = kernels.dgc_workspace(u, v, k)
        for _ in range(16):
            grad = rng.standard_normal(count).astype(dtype)
            emulated.take_traffic()
            kernels.dgc_step(
                grad, u, v, k, momentum=0.9, weight=weight, weight_decay=decay, workspace=workspace
            )
            loaded, stored, launches = emulated.take_traffic()
    assert (loaded + stored) / count <= most
    assert launches <= 4


def test_many_tensors_take_the_same_launches():
    emulated = programs.emulated()
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 3000, 161).tolist()
    grads, us, vs = ([rng.standard_normal(n).astype(np.float32) for n in sizes] for _ in range(3))
    emulated.take_traffic()
    with devices.override_kernels("cpu", emulated.kernels):
        kernels.dgc_step(grads, us, vs, [1 + n // 100 for n in sizes], momentum=0.9)
    assert emulated.take_traffic()[2] <= 4


def test_many_packets_take_the_launches_of_one():
    """Packets without elements among them; one after the other they took 7 launches each."""
    emulated = programs.emulated()
    rng = np.random.default_rng(5)
    count, lengths = 900, [40, 1, 900, 0, 65, 128, 7, 300, 11, 2]
    indices = [np.sort(rng.choice(count, k, replace=False)).astype(np.int32) for k in lengths]
    batch = kernels.PacketBatch(
        np.concatenate(indices), rng.standard_normal(sum(lengths)).astype(np.float32), lengths
    )
    counts = [count]
    packets = kernels.encode_batch(batch, counts, "2bit")
    message, sizes = np.concatenate(packets), [len(packet) for packet in packets]
    want = kernels.decode_batch(message, sizes, lengths, counts)
    emulated.take_traffic()
    with devices.override_kernels("cpu", emulated.kernels):
        found = kernels.encode_batch(batch, counts, "2bit")
        assert emulated.take_traffic()[2] == 5
        assert np.concatenate(found).tobytes() == message.tobytes()
        found = kernels.decode_batch(message, sizes, lengths, counts)
        assert emulated.take_traffic()[2] == 7
        message[sizes[0] + 3] ^= 0x80
        with pytest.raises(InvalidArgument, match=r"got invalid content in \[1\], expected"):
            kernels.decode_batch(message, sizes, lengths, counts)
    assert found.indices.tobytes() == want.indices.tobytes()
    assert found.values.tobytes() == want.values.tobytes()


# ---- nvcc ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resources():
    """(unit, architecture) -> rows of (kernel, registers, spilled bytes, shared bytes)."""
    pairs = [(unit, arch) for unit in programs.units() for arch in ARCHITECTURES]
    programs.build([f"cubin/{unit}.{arch}.cubin" for unit, arch in pairs])
    found = {}
    for unit, arch in pairs:
        log = (programs.OUT / "cubin" / f"{unit}.{arch}.log").read_text()
        rows = re.findall(
            r"Compiling entry function '(\w+)'(?s:.*?)(\d+) bytes spill stores, (\d+) bytes spill"
            r"(?s:.*?)Used (\d+) registers",
            log,
        )
        found[unit, arch] = [(plain(n), int(r), int(a) + int(b)) for n, a, b, r in rows]
    return found


def plain(symbol):
    """A kernel's name and template arguments, from its mangled symbol."""
    libstdcpp = ctypes.CDLL("libstdc++.so.6")
    libstdcpp.__cxa_demangle.restype = ctypes.c_char_p
    text = libstdcpp.__cxa_demangle(symbol.encode(), None, None, None) or symbol.encode()
    name = text.decode().replace("(anonymous namespace)::", "")
    return name.partition("(")[0].replace("pycomm::cuda::", "")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvcc_compiles_without_spills(resources, arch):
    rows = [row for unit in programs.units() for row in resources[unit, arch]]
    assert len(rows) > 50
    assert [(name, n) for name, _, n in rows if n > 0] == []
    hot = [row for row in rows if re.search(rf"\b({'|'.join(HOT)})<", row[0])]
    wide = [(n, r) for n, r, _ in hot if r > MOST_REGISTERS and "double" not in n]
    assert hot
    assert wide == []
