"""Implementation of the commands, one module per command; ``cli.py`` parses options and prints reports."""
