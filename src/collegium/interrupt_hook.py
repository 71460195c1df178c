"""Installs the hook of ``interrupts`` when it is imported, which the command does before anything slow."""

from .interrupts import install

__all__: list[str] = []

install()
