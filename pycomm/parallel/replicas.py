"""Compares replicas: tensors of all ranks, by SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pycomm import collectives
from pycomm.errors import Mismatch
from pycomm.group import Group


def check_layout(named: Sequence[tuple[str, Tensor]], group: Group) -> None:
    """Raises Mismatch, on every rank, if names, shapes, dtypes or kinds of device differ."""
    layouts = [f"{name} {tuple(x.shape)} {x.dtype} {x.device.type}" for name, x in named]
    _compare(named, [text.encode() for text in layouts], "name, shape, dtype or device", group)


def check_equal(named: Sequence[tuple[str, Tensor]], group: Group) -> None:
    """Raises Mismatch, on every rank, naming the first tensor whose bytes differ."""
    contents = [
        x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for _, x in named
    ]
    _compare(named, contents, "values", group)


def _compare(
    named: Sequence[tuple[str, Tensor]], contents: list[bytes], what: str, group: Group
) -> None:
    """Compares SHA-256 of `contents`, one per tensor, with those of rank 0."""
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    mine = torch.frombuffer(bytearray(digests or b"\0" * 32), dtype=torch.uint8).view(-1, 32)
    first, *others = collectives.all_gather_v(mine, group=group)
    for rank, theirs in enumerate(others, 1):
        if torch.equal(theirs, first):
            continue
        common = min(len(theirs), len(first))
        same = (theirs[:common] == first[:common]).all(1)
        place = common if bool(same.all()) else int(same.int().argmin())
        name = repr(named[place][0]) if place < len(named) else "a tensor that this rank lacks"
        raise Mismatch(
            f"the models differ: rank {rank} and rank 0 have different {what} for {name} "
            f"(number {place} of {len(first)} and {len(theirs)})",
            op="DataParallel",
            rank=group.rank,
            peer=rank,
        )
