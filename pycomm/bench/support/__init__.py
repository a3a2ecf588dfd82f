"""Helpers of the benchmarks and the demo: processes, simulated hosts, a model and its text."""
