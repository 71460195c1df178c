"""Experts on a CPU: any format, decoded a tile at a time."""
