"""The commands that measure, then choose or predict: `pycomm tune` and `plan`."""
