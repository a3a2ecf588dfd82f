"""Private: the quantized all-reduce, for `collectives` and `compress`; needs no torch.

quantize    x + residual, in blocks of 4096 values; each block has an owner
all-to-all  packets to the owners
sum         the owner adds the packets in rank order, in float32, to its owner residual
all-gather  the sums, quantized again
"""

from pycomm._quantize.exchange import QuantizedExchange, all_reduce
from pycomm._quantize.layout import Layout, blocks_of, own_count, own_places
from pycomm._quantize.options import Quantize
from pycomm._quantize.state import Feedback, QuantizeState

__all__ = [
    "Feedback",
    "Layout",
    "Quantize",
    "QuantizeState",
    "QuantizedExchange",
    "all_reduce",
    "blocks_of",
    "own_count",
    "own_places",
]
