"""vLLM: the routed experts of its MoE layers run through Collegium, as a plug-in that vLLM loads by itself.

``plugin`` is what vLLM calls and what calls vLLM; ``layers`` reads what a layer of vLLM is and holds, without vLLM.
"""

from .plugin import register

__all__ = ["register"]
