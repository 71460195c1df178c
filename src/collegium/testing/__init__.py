"""Shipped helpers for tests and benchmarks: inputs, truth, comparison, toy checkpoints."""
