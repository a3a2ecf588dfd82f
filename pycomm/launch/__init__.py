"""Launchers: `pycomm launch` (command.py) and `@pycomm.launcher` (function.py).

Both set up each rank's process (worker_setup.py) before the user's code runs, and report the first
failure (failure.py). torch is imported only at the launch.
"""

from pycomm.launch.function import Launcher, launcher

__all__ = ["Launcher", "launcher"]
