"""What the benchmarks and the demo share: processes, simulated hosts, a model and its text."""
