"""Experts in host memory, of which slots on the GPU hold some: policies, the host's copy, and the residents."""
