"""Builds the programs that the tests of a tier run, before the first of them.

    programs_of_tiers.py TIER     the Makefile calls it, with the folders of PYTHONPATH

So no time limit of a test contains a compilation, and all processors are busy. With the option
--built, which the Makefile passes, a test that needs another program fails and names it.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import fuzzers
import mutations
import programs
import test_aarch64
import test_cuda
import test_mutations
import test_native
import test_product
import test_sass

import build

Part = Callable[[], object]


def native(variant: str, names: list[str]) -> Part:
    """Suites of one variant."""
    return lambda: build.build(variant, names)


def emulator(*more: str) -> None:
    """What the tests of the emulator run, planted mistakes too, which share its objects."""
    kinds = sorted(programs.KINDS.keys() - {"coverage"})
    targets = [f"{name}.{kind}" for name in ("micro", "gpu_check", "streams") for kind in kinds]
    targets += [f"mutants/{m.name}/gpu_check" for m in test_cuda.mutants_of_the_day()]
    machine_code = {(unit, arch) for unit in programs.units() for arch in test_cuda.ARCHITECTURES}
    machine_code |= {(unit, arch) for unit in test_sass.UNITS for arch in test_sass.ARCHITECTURES}
    targets += [f"cubin/{unit}.{arch}.cubin" for unit, arch in sorted(machine_code)]
    programs.build(["gpu_check", *targets, *more], test_cuda.mutants())


def mutated() -> None:
    """The suites with the mutations of the day; each links objects of the product."""
    rows = test_mutations.ROWS_OF_THE_DAY
    more = {test_native.WEAK_MEMORY, test_native.SPARSE, *test_native.SINGLE_THREADED}
    more.add(test_native.SIMULATION)
    build.build("product", sorted({row.key for row in rows} | more))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(mutations.mutated, rows))


def quick() -> list[Part]:
    """What `make test` runs."""
    parts = [native("product", test_product.QUICK)]
    if programs.nvcc() is not None:
        torch = ["_emulated_torch.so"] if programs.torch_root() else []
        parts.append(lambda: programs.build(["_emulated.so", *torch]))
    return parts


def full() -> list[Part]:
    """What `make test-full` runs. The emulator's part uses objects of the first two."""
    parts: list[Part] = []
    for variant in ("asan", "tsan"):
        names = [name for kind, name in test_native.RUNS if kind == variant]
        parts.append(native(variant, names + [test_native.SIMULATION] * (variant == "asan")))
    if programs.nvcc() is not None:
        parts.append(emulator)
    return [*parts, mutated, lambda: fuzzers.build(fuzzers.targets())]


def nightly() -> list[Part]:
    """What `make test-nightly` runs; without SAMPLE all rows of the long tables."""
    parts = [*full()[:2], native("odr", ["core"]), mutated]
    if shutil.which(build.CROSS_COMPILER):
        parts.append(native("aarch64", sorted({suite for suite, _, _ in test_aarch64.CASES})))
    if programs.nvcc() is not None:
        parts.insert(2, lambda: emulator("gpu_check.coverage"))
    return parts


def main() -> None:
    """Runs two parts at once, each with a process for every processor: the end of one part, when
    few files are left, keeps no processor idle."""
    tier = sys.argv[1]
    parts = {"quick": quick, "full": full, "nightly": nightly}[tier]()
    begin = time.monotonic()
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(part) for part in parts]:
                done.result()
    except build.BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(str(error))
    print(f"programs of the {tier} tests: built in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
