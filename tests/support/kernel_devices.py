"""Devices for the tests of the kernels: each takes NumPy arrays and returns them.

A new device needs a class here, a line in DEVICES and a name in the fixture `device` of
conftest.py; every test with the fixture then runs on it. Also contains helpers of those tests.
"""

import contextlib
from typing import Any

import numpy as np
import programs
import pytest
import torch

from pycomm import _core, reference
from pycomm._core_api import devices
from pycomm.errors import Unsupported

FLOATS = ("float16", "bfloat16", "float32", "float64")
TILE = 4096  # tile size of the kernels; sizes around its multiples matter
KINDS = ("plain", "ties", "equal", "zero", "tiny", "huge", "odd ones")


def _instruction_sets() -> list[str]:
    before, found = _core.kernel_isa(), []
    for name in ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_fp16"):
        with contextlib.suppress(Unsupported):  # this processor lacks it
            _core.set_kernel_isa(name)
            found.append(name)
    _core.set_kernel_isa(before)
    return found


INSTRUCTION_SETS = _instruction_sets()  # of this processor; no other can run here


class Cpu:
    """Host memory. bfloat16, which NumPy lacks, is stored in torch tensors, as all dtypes with
    `torch`."""

    name = "cpu"
    # Elements, and how often they must give the same bits.
    replays = ((20_000, 1000), (1_200_000, 50))
    indices_are_checked = True  # InvalidArgument if indices do not ascend within the array

    def __enter__(self) -> "Cpu":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def put(self, x: np.ndarray, dtype: str = "", *, torch_too: bool = False) -> Any:
        """A copy of x on the device; converted to `dtype`, which represents all its values, if
        given."""
        dtype = dtype or x.dtype.name
        if dtype != "bfloat16" and not torch_too:
            return x.astype(dtype)
        if dtype == "bfloat16":
            bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x.astype(dtype))

    def get(self, x: Any) -> np.ndarray:
        """The elements of x; bfloat16 as float32."""
        if isinstance(x, torch.Tensor):
            if x.dtype == torch.bfloat16:
                bits = x.view(torch.int16).cpu().numpy().view(np.uint16)
                return (bits.astype(np.uint32) << 16).view(np.float32)
            return x.cpu().numpy()
        return x


class Emulated(Cpu):
    """CUDA kernels on the CPU, one fiber for each CUDA thread (tests/emulator)."""

    name = "emulated"
    replays = ((4_500, 200), (20_000, 30))
    indices_are_checked = False

    def __enter__(self) -> "Emulated":
        if programs.nvcc() is None:
            pytest.skip("needs nvcc, for the headers of CUDA")
        self.module = programs.emulated()
        self.module.set_order("random", 1, 3)
        self._replaced = devices.override_kernels("cpu", self.module.kernels)
        self._replaced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._replaced.__exit__(*error)


class Cuda(Cpu):
    """A GPU, through torch tensors."""

    name = "cuda"
    indices_are_checked = False

    def __enter__(self) -> "Cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        return self

    def put(self, x: np.ndarray, dtype: str = "", *, torch_too: bool = False) -> Any:
        del torch_too
        there = super().put(x, dtype, torch_too=True)
        return there.cuda()


DEVICES = {"cpu": Cpu, "emulated": Emulated, "cuda": Cuda}


def same(found, wanted):
    """Fails unless both have the same bits; reports the first difference."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    assert found.size == wanted.size
    unsigned = f"u{found.dtype.itemsize}"
    a, b = (np.ascontiguousarray(x).reshape(-1).view(unsigned) for x in (found, wanted))
    wrong = np.flatnonzero(a != b)
    if wrong.size:
        i = wrong[0]
        x, y = found.reshape(-1)[i], wanted.reshape(-1)[i]
        pytest.fail(f"{wrong.size} differ, first at {i}: {x!r} ({a[i]:#x}) for {y!r} ({b[i]:#x})")


def made(kind, count, seed, dtype="float32"):
    """`count` values of a kind that caused errors before."""
    rng = np.random.default_rng(seed)
    x = rng.laplace(size=count)
    if kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "equal":
        x = np.full(count, -0.75)
    elif kind == "zero":
        x = np.zeros(count) * rng.choice([-1, 1], count)
    elif kind == "tiny":  # mostly subnormal in float32
        x = x * 1e-39
    elif kind == "huge":
        x = x * 1e38
    elif kind == "odd ones":
        odd = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -3e38])
        x = np.where(rng.random(count) < 0.2, rng.choice(odd, count), x)
    with np.errstate(all="ignore"):
        return reference.cast(x.astype("float32" if dtype != "float64" else dtype), dtype)
