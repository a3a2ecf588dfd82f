"""Lean packets: fewer bytes for the same (index, value). The layout stands in
csrc/kernels/lean.h, the meaning in pycomm/reference_lean.py.

They are written and read by the processor. What a call was given has been validated by packets.py,
which calls this file and no other does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pycomm import _core, arrays
from pycomm.arrays import Located
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.kernels import inputs

CODECS = ("auto", "list", "bitmap", "rice")
VALUES = ("float32", "bfloat16", "int8", "2bit", "1bit")


def most_bytes(k: int, count: int, value_dtype: str, codec: str) -> int:
    """The most that a packet takes.

    Raises:
        InvalidArgument: an unknown codec or value_dtype.
    """
    if codec not in CODECS:
        raise InvalidArgument(f"codec {codec!r}: one of raw, {', '.join(CODECS)}")
    if value_dtype not in VALUES:
        raise InvalidArgument(
            f"value_dtype {value_dtype!r}: with codec={codec!r} one of {', '.join(VALUES)}"
        )
    return _core.most_lean_bytes(k, count, codec, value_dtype)


def on_the_host(found: Located) -> None:
    """Raises Unsupported where the array is not in host memory."""
    if found.device.kind != "cpu":
        raise Unsupported(
            f"lean packets are written by the processor, and the arrays lie on {found.device}: "
            "use codec='raw', or copy the indices and values to the host (.cpu())"
        )


def encode(
    pair: list[Located], count: int, value_dtype: str, codec: str, residual: Located | None,
    out: Located,
) -> int:  # fmt: skip
    """Writes a packet into `out`, of most_bytes; how many bytes it took."""
    return _core.encode_lean(
        pair[0].pointer,
        pair[1].pointer,
        pair[0].count,
        count,
        pair[1].dtype,
        codec,
        value_dtype,
        residual.pointer if residual is not None else 0,
        out.pointer,
    )


def decode(packet: Located, k: int, like: Located | None = None) -> tuple[Any, Any]:
    """(indices int32 [k], values float32 [k]), new arrays of the kind of `like`, or of NumPy.

    Raises:
        InvalidArgument: the bytes are no packet.
    """
    if like is None:
        indices, values = np.empty(k, np.int32), np.empty(k, np.float32)
    else:
        indices, values = (arrays.new(like, (k,), dtype) for dtype in ("int32", "float32"))
    places = inputs.array(indices, "indices", ("int32",))
    numbers = inputs.array(values, "values", ("float32",))
    _core.decode_lean(packet.pointer, packet.nbytes, places.pointer, numbers.pointer)
    return indices, values
