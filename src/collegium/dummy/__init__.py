"""Random weights for start-up and benchmarks without files."""
