"""Helpers for tests and benchmarks: random inputs, independent activations, error measure."""
