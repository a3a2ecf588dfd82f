"""The training text of the demo: the source of Python's standard library on this machine.

One character is one token.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Newline and printable ASCII; every other byte becomes "?"."""

_TABLE = bytes(ALPHABET.index(chr(b)) if chr(b) in ALPHABET else ALPHABET.index("?")
               for b in range(256))  # fmt: skip


def encode(source: bytes) -> torch.Tensor:
    """The tokens of `source`: uint8 [len(source)], each below len(ALPHABET)."""
    return torch.frombuffer(bytearray(source.translate(_TABLE)), dtype=torch.uint8)


def decode(tokens: torch.Tensor) -> str:
    """The characters of int or uint8 [n]."""
    return "".join(ALPHABET[i] for i in tokens.tolist())


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Training tokens and the last 5 % for evaluation: uint8 [n] and [m].

    The order of files is fixed, so every rank reads the same text.

    Raises:
        FileNotFoundError: the standard library is installed without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(source) < 100_000:
        raise FileNotFoundError(
            f"too little Python source in {folder} ({len(source)} bytes): install Python's "
            "standard library as text (Debian: libpython3-stdlib)"
        )
    tokens = encode(source)
    cut = len(tokens) * 95 // 100
    return tokens[:cut], tokens[cut:]


def batch(
    tokens: torch.Tensor, rows: int, context: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` random windows, and the same windows one character later: int64 [rows, context]."""
    starts = torch.randint(len(tokens) - context, (rows, 1), generator=random)
    window = tokens[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]
