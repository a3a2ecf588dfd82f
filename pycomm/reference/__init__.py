"""The definition of each kernel of `pycomm.kernels` in NumPy, to read and to compare with.

The functions return new arrays and change nothing. Results have the bits of the kernels on every
device; speed is no goal. A bfloat16 array is a float32 array with bfloat16 values, because NumPy
has no bfloat16.

Arithmetic uses float32, or float64 if the arrays are float64. Every operation rounds to nearest,
ties to even. A NaN that is computed is the quiet NaN 0x7fc00000.

Arguments have the shapes and dtypes of the kernels and are not validated: invalid ones raise
NumPy's errors (IndexError, ValueError) or give undefined results.
"""

from pycomm.reference.groups import Update, group_elements, topk_groups, update_step
from pycomm.reference.kernels import (
    Step,
    cast,
    clip,
    clip_scale,
    decode_sum,
    decode_update,
    dgc_rollback,
    dgc_step,
    encode,
    fma,
    magnitude,
    momentum_mask,
    norm,
    reduce,
    scatter_add,
    threshold,
    topk,
    unpack,
)
from pycomm.reference.quantized import dequantize, quantize

__all__ = [
    "Step",
    "Update",
    "cast",
    "clip",
    "clip_scale",
    "decode_sum",
    "decode_update",
    "dequantize",
    "dgc_rollback",
    "dgc_step",
    "encode",
    "fma",
    "group_elements",
    "magnitude",
    "momentum_mask",
    "norm",
    "quantize",
    "reduce",
    "scatter_add",
    "threshold",
    "topk",
    "topk_groups",
    "unpack",
    "update_step",
]
