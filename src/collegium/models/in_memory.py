"""How transformers names and holds in memory what a family's files name or hold otherwise.

An adapter is saved under the names of the model in memory. Source of the names: ``transformers.conversion_mapping`` of
transformers 5.23 and 5.24; ``tests/cpu/test_adapters_of_classes.py`` compares every entry with the installed release.
"""

import re
from dataclasses import dataclass
from functools import cache

__all__ = ["FORGET_GATE", "InMemory", "text_path"]

# What may come before the layers, embeddings and last norm of a text model, alone and inside multimodal models.
_LAYERS = re.compile(
    r"(?:model\.language_model|language_model\.model|language_model\.backbone|language_model|thinker\.model|model"
    r"|backbone|transformer)\.(?=(?:layers|blocks)\.\d+\.|embed_tokens\.|norm\.)"
)
_HEAD = re.compile(r"(?:model\.language_model|language_model|thinker)\.(?=lm_head\.)")
# Linear attention of Kimi-Linear and GLM-5-Next.
FORGET_GATE = ((r"\.self_attn\.f_(a|b)_proj\.", r".self_attn.forget_gate.f_\1_proj."),)
_BASE = re.compile(r"(?:thinker\.)?(?:model\.)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class InMemory:
    """The differences between a family's files and the class of transformers.

    renames: regular expression and replacement, applied in this order to the name of a tensor in the files. joined:
    pairs of module names; one module in memory, the second, holds the rows of the first ones one after the other.
    transposed: stacked experts are held input-first, ``[E, H, 2I]`` and ``[E, I, H]``, else output-first. marked: the
    experts' class has the attribute ``is_transposed``, and it is true. turned_since_4: model types whose stacks
    transformers 4 held in the other orientation.
    """

    renames: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[tuple[str, ...], str], ...] = ()
    transposed: bool = False
    marked: bool = False
    turned_since_4: tuple[str, ...] = ()

    def name(self, name: str) -> str:
        """Return the name in memory of tensor ``name`` of the files."""
        for pattern, replacement in self.renames:
            name = _compile(pattern).sub(replacement, name, count=1)
        return name


def text_path(name: str) -> str:
    """Return ``name`` without what only tells apart a text model by itself, one in a larger model, and a bare one."""
    match = _LAYERS.match(name) or _HEAD.match(name) or _BASE.match(name)
    return name if match is None else name[match.end() :]


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
