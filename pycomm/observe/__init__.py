"""The commands that show ranks and their calls: `pycomm info`, `top` and `trace`."""
