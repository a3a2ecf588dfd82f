"""Programs that tests run to their end."""

import subprocess
from collections.abc import Iterable
from typing import Any


def finished(command: Any, *, check: bool = False, **options: Any) -> Any:
    """The ended process, with its stdout and stderr as text; `options` are subprocess.run()'s."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def finished_together(
    ranks: Iterable[tuple[Any, dict[str, str]]], *, timeout: float = 180, **options: Any
) -> list[Any]:
    """The ended processes of ranks that run at the same time, by their commands and environments;
    as of finished(). All are killed if one does not end within `timeout` seconds."""
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, **options)
        for command, env in ranks
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]
