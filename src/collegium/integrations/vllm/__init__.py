"""vLLM plug-in: Collegium runs the routed experts of vLLM's MoE layers. vLLM loads the plug-in automatically.

``plugin`` interacts with vLLM; ``layers`` reads the spec and the weights of a vLLM layer, without importing vLLM.
"""

from .plugin import register

__all__ = ["register"]
