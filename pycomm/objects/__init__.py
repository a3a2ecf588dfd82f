"""Plain Python values between ranks, without pickle."""

from pycomm.objects.exchange import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    all_gather_object,
    user_get,
    user_pop,
    user_set,
)

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "all_gather_object",
    "user_get",
    "user_pop",
    "user_set",
]
