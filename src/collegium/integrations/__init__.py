"""Plug-ins for the engines people already use, one folder an engine; nothing is imported until asked for."""
