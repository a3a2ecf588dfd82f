"""The benchmarks that need the repository; pycomm/bench has the others, and the table of all."""
