"""TopK: its arguments, and the number of groups that follows from a ratio."""

import dataclasses
import math
import re

import numpy as np
import pytest

from pycomm import TopK, kernels
from pycomm.compress.topk import FIXED_BYTES, index_bits, sent_bytes
from pycomm.errors import InvalidArgument


def test_it_is_a_value() -> None:
    assert TopK() == TopK(ratio=200)
    assert repr(TopK(ratio=50)) == (
        "TopK(ratio=50, density=None, group=16, value_dtype='1bit', error_feedback=True, "
        "exchange='auto', owner_k_factor=4)"
    )
    assert hash(TopK(density=0.1)) == hash(TopK(density=0.1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        TopK().ratio = 3.0  # type: ignore[misc]  # frozen
    with pytest.raises(TypeError):
        TopK(200)  # type: ignore[call-arg]  # keyword-only


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ratio": 10}, "expected at least 31.88, which value_dtype='1bit' has"),
        ({"ratio": math.nan}, "invalid ratio: got nan"),
        ({"ratio": 0.5, "value_dtype": "float32"}, "expected at least 1,"),
        ({"ratio": 10, "value_dtype": "3bit"}, "expected at least 10.64"),
        ({"density": 0}, "invalid density: got 0"),
        ({"density": 1.5}, "invalid density"),
        ({"ratio": 200, "density": 0.1}, "expected one of them"),
        ({"group": 12}, "invalid group: got 12"),
        ({"group": 2048}, "invalid group"),
        ({"exchange": "ring"}, "got 'ring', expected one of auto, gather, sharded"),
        ({"owner_k_factor": 0}, "invalid owner_k_factor: got 0"),
        ({"value_dtype": "float16"}, "expected one of float32, bfloat16, 2bit, 1bit, 3bit"),
    ],
)
def test_wrong_arguments(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        TopK(**wrong)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("ratio", [32, 33, 50, 200, 500, 2000])
@pytest.mark.parametrize("group", [1, 16, 64])
@pytest.mark.parametrize("counts", [[115_520], [40_000, 300, 17, 2_000_000]])
def test_k_follows_from_the_ratio(ratio: float, group: int, counts: list[int]) -> None:
    """Packets of random groups, which take the most bits; one more group would be too many."""
    options = TopK(ratio=ratio, group=group)
    k = options.groups(counts)
    rng = np.random.default_rng(1)
    residual = [rng.standard_normal(count).astype(np.float32) for count in counts]
    theta = [np.zeros_like(x) for x in residual]
    indices, _ = kernels.update_step(theta, [x.copy() for x in theta], residual, k, group=group)
    (packet,) = kernels.encode_groups(residual, indices, group=group).packets
    sent = len(packet) + 12 + 64
    asked = 4 * sum(counts) / ratio
    assert sent <= asked / 0.97
    assert sent == pytest.approx(sent_bytes(options, k, counts), rel=0.02, abs=8)
    if k < kernels.groups.group_count(counts, group):
        assert sent_bytes(options, k + 1, counts) > asked


def test_a_ratio_that_cannot_be_had_says_which_can() -> None:
    with pytest.raises(InvalidArgument) as error:
        TopK(ratio=200).groups([1000])
    most = float(re.findall(r"at most ([\d.]+)", str(error.value))[0])
    assert TopK(ratio=most * 0.999).groups([1000]) == 1
    assert TopK(density=1e-9).groups([1000]) == 1
    assert TopK(density=1).groups([1000, 7]) == 64


def test_index_bits_of_extremes() -> None:
    assert index_bits(100, 100) == 0
    assert index_bits(99, 100) == pytest.approx(100 / 99)  # a bitmap
    assert index_bits(1, 2**31) == pytest.approx(32)  # a list
    assert 7 < index_bits(1000, 70_000) < 8
    assert FIXED_BYTES < 100
