"""Compressed training with torch: deep gradient compression, compression of updates, and quantized
gradients.
"""

from pycomm.compress.dgc import DGC
from pycomm.compress.hook import dgc_hook, quantize_hook
from pycomm.compress.hsdp import quantize_hsdp
from pycomm.compress.quantized_gradients import QuantizedGradients
from pycomm.compress.topk import TopK

__all__ = [
    "DGC",
    "QuantizedGradients",
    "TopK",
    "dgc_hook",
    "quantize_hook",
    "quantize_hsdp",
]
