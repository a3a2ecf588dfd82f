"""DGC's options."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm._arguments import flag, integer, one_of, positive
from pycomm.compress.schedule import K_RULES, VALUE_DTYPES, SparsityWarmup
from pycomm.errors import InvalidArgument

EXCHANGES = ("auto", "gather", "dense_masked", "sharded", "hierarchical", "auto_time")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of DGC, which describes them; the first three are one SparsityWarmup.

    Raises:
        InvalidArgument: a value is not allowed, or two values contradict each other.
    """

    warmup: SparsityWarmup
    clip_norm: float | None
    clip: str
    masking: bool
    momentum_correction: bool
    decay_correction: bool
    select: str
    min_count: int
    k_rule: str
    value_dtype: str
    codec: str
    exchange: str
    owner_k_factor: int
    fused: bool

    def __post_init__(self) -> None:
        for name in ("masking", "momentum_correction", "decay_correction", "fused"):
            flag(name, getattr(self, name))
        one_of("clip", self.clip, ("parameter", "global"))
        one_of("select", self.select, ("parameter", "model"))
        one_of("k_rule", self.k_rule, K_RULES)
        one_of("exchange", self.exchange, EXCHANGES)
        one_of("codec", self.codec, ("auto", "raw", "compact"))
        one_of("value_dtype", self.value_dtype, VALUE_DTYPES)
        if self.codec == "raw" and self.compact:
            raise InvalidArgument(
                f"value_dtype={self.value_dtype!r} with exchange={self.exchange!r} needs compact "
                'packets: codec="raw" is for float32 and another exchange'
            )
        if self.clip_norm is not None:
            positive("clip_norm", self.clip_norm, "None")
        integer("owner_k_factor", self.owner_k_factor, 1)
        integer("min_count", self.min_count, 0)
        if self.fused and not (self.momentum_correction and self.decay_correction):
            raise InvalidArgument(
                "fused=True requires momentum_correction=True and decay_correction=True"
            )

    @property
    def compact(self) -> bool:
        """Whether packets are compact; otherwise they are raw."""
        return (
            self.codec == "compact"
            or self.value_dtype != "float32"
            or self.exchange in ("sharded", "hierarchical")
        )

    @property
    def may_shard(self) -> bool:
        """Whether a level may use shards, so that ranks have owner residuals."""
        return self.compact and self.exchange not in ("gather", "dense_masked")

    @property
    def is_auto(self) -> bool:
        """Whether DGC chooses the exchange of each level."""
        return self.exchange in ("auto", "auto_time")

    @property
    def selects_model(self) -> bool:
        """Whether k is for all parameters together."""
        return self.select == "model"

    @property
    def owned(self) -> tuple[str, ...]:
        """The settings of the optimizer that DGC applies."""
        momentum = ("momentum", "nesterov") if self.momentum_correction else ()
        return (*momentum, *(("weight_decay",) if self.decay_correction else ()))
