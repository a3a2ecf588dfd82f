"""Programs that tests run to their end."""

import subprocess
from typing import Any


def finished(command: Any, *, check: bool = False, **options: Any) -> Any:
    """The ended process, with its stdout and stderr as text; `options` are subprocess.run()'s."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)
