"""Families without a file: names and routing derived from the class of the installed transformers, and proved.

``derived_family`` builds the class without memory, reads its names from transformers' conversion mapping, proposes a
spec, and compares the layer that Collegium would compute with the class on random float32 numbers.
"""

from .class_layers import class_of, config_of_class, has_identity_experts
from .exchangeable import ExchangeableExperts, replace_modules
from .family import DerivedFamily, derived_family
from .gate_functions import activation_of
from .parallel_experts import ParallelExperts, ParallelExpertsBlock, replace_parallel_experts

__all__ = [
    "DerivedFamily",
    "ExchangeableExperts",
    "ParallelExperts",
    "ParallelExpertsBlock",
    "activation_of",
    "class_of",
    "config_of_class",
    "derived_family",
    "has_identity_experts",
    "replace_modules",
    "replace_parallel_experts",
]
