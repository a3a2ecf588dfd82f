"""TopK: how the updates of any optimizer are compressed; updates.py does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycomm._arguments import integer, integers, number, one_of, refuse
from pycomm.errors import InvalidArgument
from pycomm.kernels.compact import VALUES
from pycomm.kernels.groups import group_count
from pycomm.kernels.inputs import MOST_GROUP

VALUE_BLOCK = 4096  # values that share magnitudes
VALUE_BITS = {"1bit": 1, "2bit": 2, "3bit": 3, "bfloat16": 16, "float32": 32}
LEVEL_BYTES = {"1bit": 2, "2bit": 4, "3bit": 4}  # of the magnitudes of a block
# Beside the indices and values: the head of the packet, its length, the word that ranks compare and
# its length, and the headers of two frames.
FIXED_BYTES = 16 + 12 + 2 * 32
RICE_BLOCK = 64  # gaps that share a parameter, which takes about 1.5 bits
TOLERANCE = 1.01  # "everything" is chosen if it is at most this much larger than asked for


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Sends the largest groups of an optimizer's updates, with error feedback.

        local = pycomm.LocalSGD(model, optimizer, compression=pycomm.TopK(ratio=200))

    Each rank steps its own optimizer; ranks exchange what the parameters would have changed by. In
    each step, with parameters theta that are equal on all N ranks, and a residual e on each:

        e = e + theta - optimizer(theta, g)      the update of this rank
        S = the k groups of neighbours with the largest norm of e, ties to the lower index
        q = quantized e[S];  e[S] = e[S] - q     send q
        theta = theta - 1/N * the sum of all ranks' q

    The page "Gradient compression" says which optimizers it suits, and how k follows from ratio.

    Args:
        ratio: 4 bytes for each parameter, over the bytes that this rank sends in a step, as an
            owner not counted. None: 200, or what `density` gives.
        density: instead of `ratio`, the fraction of the groups that is sent, above 0 and at most 1.
        group: neighbours that are selected together: 1, 2, 4, ... 1024.
        value_dtype: values sent as "1bit" (sign; 4096 values share one magnitude), "2bit", "3bit",
            "bfloat16" or "float32".
        error_feedback: keep what is not sent. False: drop it.
        exchange: "gather": all-gather of the ranks' packets. "sharded": each rank owns a shard of
            the parameters, adds the packets for it, and sends the largest groups of the sum to all;
            it keeps the rest for the next step. "auto": "sharded" for more than 16 ranks, otherwise
            "gather". Where several hosts have several ranks, "auto" is "hierarchical": the ranks of
            a host average their updates and share one residual, and a host counts as a rank.
        owner_k_factor: groups that all owners together send, in multiples of what one rank sends.

    Raises:
        InvalidArgument: an argument out of its range. LocalSGD raises it too if the model has too
            few parameters for the ratio.
    """

    ratio: float | None = None
    density: float | None = None
    group: int = 16
    value_dtype: str = "1bit"
    error_feedback: bool = True
    exchange: str = "auto"
    owner_k_factor: int = 4

    def __post_init__(self) -> None:
        one_of("value_dtype", self.value_dtype, VALUES)
        if integer("group", self.group) not in [1 << i for i in range(MOST_GROUP.bit_length())]:
            refuse("group", self.group, f"1, 2, 4, ... {MOST_GROUP}")
        one_of("exchange", self.exchange, ("auto", "gather", "sharded"))
        integer("owner_k_factor", self.owner_k_factor, 1)
        for name in ("ratio", "density"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        if self.ratio is not None and self.density is not None:
            raise InvalidArgument(
                f"TopK: got ratio={self.ratio} and density={self.density}, expected one of them"
            )
        if self.density is not None and not 0 < self.density <= 1:
            raise InvalidArgument(f"invalid density: got {self.density}, expected above 0, up to 1")
        if self.density is None and self.ratio is None:
            object.__setattr__(self, "ratio", 200.0)
        least = 32 / (VALUE_BITS[self.value_dtype] + _level_bits(self.value_dtype))
        if self.ratio is not None and not self.ratio * TOLERANCE >= least:  # NaN fails too
            raise InvalidArgument(
                f"invalid ratio: got {self.ratio}, expected at least {least:.4g}, which "
                f"value_dtype={self.value_dtype!r} has when all groups are sent"
            )

    def groups(self, counts: Sequence[int]) -> int:
        """k: the number of groups that a rank sends in a step.

        Args:
            counts: elements of each parameter.

        Raises:
            InvalidArgument: `counts` are no counts, or the parameters are too few for the ratio.
        """
        counts = integers("counts", counts, 0)
        count, total = sum(counts), group_count(counts, self.group)
        if self.density is not None:
            return max(1, round(self.density * total))
        assert self.ratio is not None
        budget = 4 * count / self.ratio
        if sent_bytes(self, total, counts) <= TOLERANCE * budget:
            return total
        low, high = 0, total  # the most groups that fit, and the fewest that do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if sent_bytes(self, middle, counts) <= budget else (low, middle)
            )
        if low == 0:
            most = 4 * count / sent_bytes(self, 1, counts)
            raise InvalidArgument(
                f"invalid ratio: got {self.ratio}, expected at most {most:.4g}, which one group of "
                f"{self.group} among {count} parameters has"
            )
        return low


def sent_bytes(options: TopK, k: int, counts: Sequence[int]) -> float:
    """The expected bytes of a step in which a rank sends k groups.

    Args:
        options: group and value_dtype count.
        k: number of groups.
        counts: elements of each parameter.
    """
    total = group_count(counts, options.group)
    values = k * options.group
    blocks = -(-values // VALUE_BLOCK)
    level_bytes = LEVEL_BYTES.get(options.value_dtype, 0) * blocks
    value_bytes = level_bytes + VALUE_BITS[options.value_dtype] * values / 8
    return FIXED_BYTES + value_bytes + k * index_bits(k, total) / 8


def index_bits(k: int, total: int) -> float:
    """The expected bits of an index, if k of `total` are chosen at random; 0 if all are.

    The Rice code with parameter b has b + 1 bits and the quotient of the gap by 2^b; gaps are
    geometric, so that the mean quotient is r / (1 - r) with r = (1 - k / total)^(2^b).
    """
    if k >= total:
        return 0.0
    rest = 1 - k / total
    rice = min(b + 1 + _mean_quotient(rest ** (2**b)) for b in range(31)) + 1.5 / RICE_BLOCK
    return min(32.0, total / k, rice)


def _mean_quotient(r: float) -> float:
    return r / (1 - r) if r < 1 else float("inf")


def _level_bits(value_dtype: str) -> float:
    return 8 * LEVEL_BYTES.get(value_dtype, 0) / VALUE_BLOCK
