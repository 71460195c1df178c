"""Differences between a family's files and the model in memory in transformers: names and layouts.

An adapter is saved with the names of the model in memory. Source of the names: ``transformers.conversion_mapping`` of
transformers 5.23 and 5.24; ``tests/cpu/test_adapters_of_classes.py`` compares every entry with the installed release.
"""

import re
from dataclasses import dataclass
from functools import cache

__all__ = ["FORGET_GATE", "InMemory", "text_path"]

# Prefixes of the layers, embeddings and last norm of a text model, alone and inside multimodal models.
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

    renames: regular expressions and replacements, applied in order to the name of a tensor in the files. joined: pairs
    (modules in the files, module in memory); the module in memory concatenates the rows of those in the files.
    transposed: stacked experts are input-first in memory, ``[E, H, 2I]`` and ``[E, I, H]``, else output-first. marked:
    the experts' class has the attribute ``is_transposed``, and it is true. turned_since_4: model types whose stacks had
    the other orientation in transformers 4.
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
    """Return ``name`` without the prefix of the text model, so that bare, text and multimodal models agree."""
    match = _LAYERS.match(name) or _HEAD.match(name) or _BASE.match(name)
    return name if match is None else name[match.end() :]


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
