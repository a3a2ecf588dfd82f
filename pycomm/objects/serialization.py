"""Serialization of plain values that ranks exchange, without pickle.

Plain values are None, bool, int, float, str, bytes and NumPy arrays of numbers, and lists, tuples
and dicts of them. A NumPy scalar becomes a Python number, a torch.Size a tuple. The
decoder checks every length against the available bytes: any bytes give a value or InvalidArgument,
in time and memory proportional to their number.

An attacker can choose numbers, or tuples of them, with equal hashes; a dict of them would take
quadratic time. Both ends refuse a dict with more than MAX_EQUAL_HASHES keys of one hash.

A value is one byte that gives its kind, followed by

    N T F    nothing: None, True, False
    i s b    the number of bytes (8, little-endian) and the bytes: an int (two's complement,
             little-endian), a str (UTF-8), bytes
    f        a float (8 bytes, IEEE 754, little-endian)
    l t d    the number of elements (8) and: the values of a list or tuple; of a dict key, value,
             key, ...
    a        a tuple that describes an array: the dtype, such as "<f4", the shape, and the elements
             in row-major order
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter
from typing import Any

import numpy as np

from pycomm.errors import InvalidArgument

MAX_DEPTH = 100  # nesting; also ends the encoding of a list that contains itself
MAX_EQUAL_HASHES = 64  # up to 35 powers of two among floats share a hash
SHOWN = 60  # characters of a value in an error text

DTYPES = ("|b1", "|i1", "|u1", *(f"<{kind}" for kind in ("i2", "i4", "i8", "u2", "u4", "u8")))
DTYPES += ("<f2", "<f4", "<f8")
MAX_DIMENSIONS = 64  # NumPy's limit; the product of many large numbers would take long

_CONSTANTS = {None: b"N", True: b"T", False: b"F"}
_length = struct.Struct("<Q")
_float = struct.Struct("<d")


def encode(value: Any) -> bytes:
    """The bytes of a plain value.

    Raises:
        InvalidArgument: an element is not plain; the text names it, as in "value['a'][0]".
    """
    out = bytearray()
    _write(out, value, "value", MAX_DEPTH)
    return bytes(out)


def _write(out: bytearray, value: Any, place: str, depth: int) -> None:
    if isinstance(value, (np.number, np.bool_, np.character)):
        value = value.item()
    elif "torch" in sys.modules and type(value) is sys.modules["torch"].Size:
        value = tuple(value)
    kind = type(value)  # exact type: decoding would lose a subclass
    if value is None or kind is bool:
        out += _CONSTANTS[value]
    elif kind is float:
        out += b"f" + _float.pack(value)
    elif kind is int:
        _write_bytes(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is str:
        _write_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _write_bytes(out, b"b", value)
    elif kind is list or kind is tuple or kind is dict:
        if depth == 0:
            raise InvalidArgument(f"the value is nested more than {MAX_DEPTH} deep")
        _write_parts(out, value, place, depth - 1)
    elif kind is np.ndarray and (dtype := value.dtype.newbyteorder("<")).str in DTYPES:
        out += b"a"
        content = value.astype(dtype, copy=False).tobytes()
        _write(out, (dtype.str, value.shape, content), place, depth)
    else:
        found = f"{kind.__module__}.{kind.__qualname__}"
        raise InvalidArgument(
            f"{place} is a {found}{f' of {value.dtype}' if kind is np.ndarray else ''}, not a "
            "plain value: expected None, bool, int, float, str, bytes, a NumPy array of numbers, "
            "or lists, tuples and dicts of them"
        )


def _write_bytes(out: bytearray, kind: bytes, content: bytes) -> None:
    out += kind + _length.pack(len(content)) + content


def _write_parts(out: bytearray, value: Any, place: str, depth: int) -> None:
    if type(value) is dict:
        out += b"d" + _length.pack(len(value))
        if (most := max(Counter(map(hash, value)).values(), default=0)) > MAX_EQUAL_HASHES:
            raise InvalidArgument(
                f"{most} keys of {place} have the same hash: at most {MAX_EQUAL_HASHES} are allowed"
            )
        for key, one in value.items():
            _write(out, key, f"the key {_short(key)} of {place}", depth)
            _write(out, one, f"{place}[{_short(key)}]", depth)
        return
    out += (b"l" if type(value) is list else b"t") + _length.pack(len(value))
    for i, one in enumerate(value):
        _write(out, one, f"{place}[{i}]", depth)


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def decode(content: bytes) -> Any:
    """The value with these bytes. Raises InvalidArgument for bytes that encode() never produces."""
    reader = _Reader(content)
    value = reader.value(MAX_DEPTH)
    if reader.at != len(content):
        raise _broken(f"{len(content) - reader.at} bytes follow it")
    return value


def _broken(why: str) -> InvalidArgument:
    return InvalidArgument(f"these bytes are not a plain value of pycomm: {why}")


class _Reader:
    """Decodes values one after another."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def value(self, depth: int) -> Any:
        kind = self._take(1)
        if kind in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[kind]
        if kind == b"f":
            return _float.unpack(self._take(8))[0]
        if kind == b"a":
            return self._array(self.value(depth))
        if kind in b"isb":
            return self._text(kind, self._take(self._number()))
        if kind not in b"ltd":
            raise _broken(f"unknown kind {kind!r}")
        if depth == 0:
            raise _broken(f"it is nested more than {MAX_DEPTH} deep")
        count = self._number()
        if count > len(self.content) - self.at:  # each takes at least one byte
            raise _broken(f"it declares {count} values and is too short for them")
        if kind == b"d":
            return self._dict(count, depth - 1)
        values = [self.value(depth - 1) for _ in range(count)]
        return values if kind == b"l" else tuple(values)

    def _text(self, kind: bytes, content: bytes) -> Any:
        if kind == b"i":
            return int.from_bytes(content, "little", signed=True)
        if kind == b"b":
            return content
        try:
            return content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise _broken(f"a text in it is not UTF-8 ({error.reason})") from None

    def _array(self, described: Any) -> np.ndarray[Any, Any]:
        if type(described) is not tuple or len(described) != 3:
            raise _broken("an array in it is not three values")
        name, shape, content = described
        plain = type(name) is str and name in DTYPES and type(content) is bytes
        if not plain or type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            raise _broken("an array in it has no valid dtype, shape or content")
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
            raise _broken("an array in it has an invalid shape")
        if math.prod(shape) * int(name[2:]) != len(content):
            raise _broken(f"an array in it has {len(content)} bytes for shape {_short(shape)}")
        try:
            return np.frombuffer(content, name).reshape(shape).copy()
        except ValueError as error:  # too many dimensions, or a large one beside one of 0
            raise _broken(f"an array in it has an invalid shape ({error})") from None

    def _dict(self, count: int, depth: int) -> dict[Any, Any]:
        values = {}
        equal: Counter[int] = Counter()  # by hash: how many keys have it
        for _ in range(count):
            key = self.value(depth)
            try:
                hashed = hash(key)
            except TypeError:
                raise _broken(f"a {type(key).__name__} cannot be a key") from None
            equal[hashed] += 1
            if equal[hashed] > MAX_EQUAL_HASHES:
                raise _broken(f"more than {MAX_EQUAL_HASHES} keys of a dict have one hash")
            values[key] = self.value(depth)
        return values

    def _number(self) -> int:
        return int(_length.unpack(self._take(8))[0])

    def _take(self, count: int) -> bytes:
        if count > len(self.content) - self.at:
            raise _broken(f"it ends after {len(self.content)} bytes, in the middle of a value")
        self.at += count
        return self.content[self.at - count : self.at]
