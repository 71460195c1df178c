"""Integrations with other inference libraries, one package each; optional dependencies are imported on use."""
