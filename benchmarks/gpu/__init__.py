"""All tests and benchmarks that need a GPU, as one command."""
