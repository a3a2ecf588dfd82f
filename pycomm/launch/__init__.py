"""Starting the ranks of a run: `pycomm launch` (command.py) and `@pycomm.launcher` (function.py).

Both give each rank its place (worker_setup.py) before the user's code runs, and say whose failure
came first (failure.py). torch is imported when something is launched, not before.
"""

from pycomm.launch.function import Launcher, launcher

__all__ = ["Launcher", "launcher"]
