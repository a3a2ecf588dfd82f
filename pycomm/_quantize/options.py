"""Quantize, the description of a quantized all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm._arguments import one_of, refuse
from pycomm._quantize.state import QuantizeState
from pycomm.kernels.quantized import check_bits

EXCHANGES = ("auto", "sharded", "auto_time")


@dataclass(frozen=True)
class Quantize:
    """A dense all-reduce of quantized values, for gradients or updates of any optimizer.

        model = pycomm.DataParallel(model, compression=pycomm.Quantize())
        local = pycomm.LocalSGD(model, optimizer, compression=pycomm.Quantize(bits=1))

    Each rank quantizes its values for the owner of each block of 4096. The owner adds the values of
    all ranks in rank order, in float32, and sends the quantized sums to all ranks. What is lost is
    added to the next values, on each rank and on the owner: error feedback. All ranks get the same
    bits. With DataParallel, optimizer and learning rate stay as they are without compression.

    pycomm.kernels.quantize describes the codes. Sources: Seide et al., 1-bit SGD (Interspeech
    2014), for error feedback; Tang et al., DoubleSqueeze (ICML 2019), for feedback in both phases.

    Args:
        bits: of each value that is sent to its owner: 1, 2, 3, 4 or 8.
        down_bits: of each sum that the owners send to all ranks: 1, 2, 3, 4 or 8.
        error_feedback: add what is lost to the next values. It takes 8 bytes of memory for each
            value, and 8 for each value that this rank owns.
        exchange: "sharded": as described. "auto": the same, or "hierarchical" where several hosts
            have several ranks: the ranks of a host average exactly, and hosts take the place of
            ranks. "auto_time": the shortest of these and "dense", which sends everything
            uncompressed, from rank 0's measured link and kernels. pycomm.all_reduce has "sharded"
            only, which is its "auto".

    Raises:
        InvalidArgument: another number of bits, error_feedback is not a bool, or another exchange.
    """

    bits: int = 3
    down_bits: int = 8
    error_feedback: bool = True
    exchange: str = "auto"

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_bits(self.down_bits, "down_bits")
        if not isinstance(self.error_feedback, bool):
            refuse("error_feedback", self.error_feedback, "True or False")
        one_of("exchange", self.exchange, EXCHANGES)

    def state(self) -> QuantizeState:
        """A new state of one array, for pycomm.all_reduce: what was lost in earlier calls."""
        return QuantizeState()
