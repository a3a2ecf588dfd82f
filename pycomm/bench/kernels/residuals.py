"""The recording of `pycomm bench residuals`: see recording.py."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch.nn import functional as F

from pycomm import kernels
from pycomm.bench.support import text
from pycomm.bench.support.model import CharGPT, Shape

WORKERS, FIRST, WINDOWS, STEPS = 8, 500, 18, 6
MOMENTUM, LEARNING_RATE, SPARSITY = 0.9, 0.1, 0.999
ROWS = 2  # of 64 characters, for each worker and step

Array = Any  # of NumPy


@dataclass(frozen=True)
class Residuals:
    """The recording: WORKERS * WINDOWS windows, each of one worker."""

    u: Array  # float32 [windows, parameters], when the window begins
    v: Array
    gradients: Array  # float32 [steps, windows, parameters]
    packets: Array  # int32 [steps, windows, k]: which were sent

    @property
    def digest(self) -> str:
        """SHA-256 of the arrays, 16 hexadecimal digits of it."""
        found = hashlib.sha256()
        for array in (self.u, self.v, self.gradients, self.packets):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:16]


def store(found: Residuals, path: Path) -> None:
    """Writes them to a .npz file."""
    np.savez(path, u=found.u, v=found.v, gradients=found.gradients, packets=found.packets)


def load(path: Path) -> Residuals:
    """Reads the file of store()."""
    with np.load(path) as file:
        return Residuals(**{name: file[name] for name in ("u", "v", "gradients", "packets")})


def record(first: int = FIRST, windows: int = WINDOWS) -> Residuals:
    """Trains `first` steps, then records `windows` of STEPS steps each."""
    training = _Training()
    for _ in track(range(first), "training"):
        training.step()
    shape = (windows, WORKERS, training.count)
    u, v = np.empty(shape, np.float32), np.empty(shape, np.float32)
    gradients = np.empty((STEPS, *shape), np.float32)
    packets = np.empty((STEPS, *shape[:2], training.k), np.int32)
    for window in track(range(windows), "recording"):
        u[window], v[window] = training.u, training.v
        for step in range(STEPS):
            training.step()
            gradients[step, window] = training.gradients
            packets[step, window] = training.indices
    flat = windows * WORKERS
    return Residuals(
        u.reshape(flat, -1),
        v.reshape(flat, -1),
        gradients.reshape(STEPS, flat, -1),
        packets.reshape(STEPS, flat, -1),
    )


class _Training:
    """All workers of a job, one after another in this process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the model is too small for more
        self._random = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self._model = CharGPT(Shape(width=64, layers=2))
        self._tokens, _ = text.load()
        self._parameters = list(self._model.parameters())
        self._weights = torch.cat([p.detach().reshape(-1) for p in self._parameters]).numpy()
        self._alias_parameters()
        self.count = self._weights.size
        self.k = round(self.count * (1 - SPARSITY))
        self.u, self.v, self.gradients = np.zeros((3, WORKERS, self.count), np.float32)
        self.indices = np.zeros((WORKERS, self.k), np.int32)
        self._values = np.zeros((WORKERS, self.k), np.float32)

    def step(self) -> None:
        """One step of every worker and the update of the model that they share."""
        for w in range(WORKERS):
            self.gradients[w] = self._gradient()
            kernels.dgc_step(
                self.gradients[w],
                self.u[w],
                self.v[w],
                self.k,
                momentum=MOMENTUM,
                indices=self.indices[w],
                values=self._values[w],
            )
        packets = list(zip(self.indices, self._values, strict=True))
        kernels.decode_update(self._weights, packets, LEARNING_RATE, 1 / WORKERS)

    def _alias_parameters(self) -> None:
        """Makes the parameters views of the weights."""
        whole, begin = torch.from_numpy(self._weights), 0
        for p in self._parameters:
            p.data = whole[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()

    def _gradient(self) -> Array:
        shape = self._model.shape
        seen, next_ones = text.batch(self._tokens, ROWS, shape.context, self._random)
        scores = self._model(seen).reshape(-1, shape.alphabet)
        gradients = torch.autograd.grad(
            F.cross_entropy(scores, next_ones.reshape(-1)), self._parameters
        )
        return torch.cat([g.reshape(-1) for g in gradients]).numpy()
