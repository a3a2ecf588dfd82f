"""How programs run under the sanitizers of the compiler."""

import subprocess
from functools import cache

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


@cache
def fixed_addresses() -> list[str]:
    """A command prefix that disables address randomization: the thread sanitizer of g++ 12 cannot
    place its shadow on kernels that randomize 32 bits. Empty if the system does not allow it."""
    prefix = ["setarch", "-R"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    except FileNotFoundError:  # no setarch: runs without
        return []
    return prefix if allowed == 0 else []
