"""Plug-ins for the engines people already use, one file an engine; nothing is imported until asked for."""
