"""Unmerged adapters of a whole model: which one each sequence of a batch has, for all layers together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters import ExpertAdapters
from ...errors import InputError
from ...layer import MoELayer

__all__ = ["AdapterChoice", "adapter_ids_for", "choose_adapters", "set_model_adapters"]

_ATTRIBUTE = "collegium_adapters"
_ByLayer = Mapping[int, ExpertAdapters]


class AdapterChoice:
    """The adapters of a model and the one that each sequence has; the modules of all layers share one object.

    names: in the order of ids.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._ids: Tensor | None = None

    def choose(self, ids: Sequence[int] | None, device: torch.device) -> None:
        """Set the adapter of each sequence; the address of the ids stays where their number does, for CUDA graphs."""
        if ids is None:
            self._ids = None
            return
        wrong = [number for number in ids if not -1 <= number < len(self.names)]
        if wrong or not ids:
            raise InputError(
                f"choose_adapters: ids {list(ids)}; allowed: for each sequence -1 (none) to {len(self.names) - 1}, the "
                f"adapters {', '.join(self.names)}"
            )
        values = torch.tensor(ids, dtype=torch.int64, device=device)
        if self._ids is None or self._ids.shape != values.shape:
            self._ids = values
        else:
            self._ids.copy_(values)

    def check(self, sequences: int) -> None:
        """Raise InputError for a batch of another number of sequences than was chosen for."""
        if self._ids is not None and self._ids.shape[0] != sequences:
            raise InputError(
                f"choose_adapters: adapters were chosen for {self._ids.shape[0]} sequences, the batch has {sequences}; "
                "choose one for each sequence of the batch, or None"
            )

    def ids_for(self, tokens: int) -> Tensor | None:
        """Return the adapter of each of ``tokens`` rows: the tokens of one sequence follow each other."""
        if self._ids is None:
            return None
        sequences = self._ids.shape[0]
        return self._ids[:, None].expand(sequences, tokens // sequences).reshape(-1)


def set_model_adapters(
    model: nn.Module, modules: Mapping[int, nn.Module], layers: Mapping[int, MoELayer], adapters: _ByLayer
) -> None:
    """Give ``layers`` their adapters, and the modules that run them one common choice; all by layer index."""
    choice = AdapterChoice(next(iter(adapters.values())).names)
    vars(model)[_ATTRIBUTE] = choice
    model.register_forward_pre_hook(_check_batch, with_kwargs=True)
    for index, by_expert in adapters.items():
        layers[index].set_adapters(by_expert)
        vars(modules[index])[_ATTRIBUTE] = choice


def _check_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare the batch of a model's call with the choice."""
    choice: AdapterChoice | None = vars(model).get(_ATTRIBUTE)
    inputs = args[0] if args else kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    if choice is not None and isinstance(inputs, Tensor):
        choice.check(inputs.shape[0])


def adapter_ids_for(module: Any, tokens: int) -> Tensor | None:
    """Return the adapter ids of a pass of ``tokens`` rows through ``module``, None where none were chosen."""
    choice: AdapterChoice | None = vars(module).get(_ATTRIBUTE)
    return None if choice is None else choice.ids_for(tokens)


def choose_adapters(model: nn.Module, ids: Sequence[int] | None) -> None:
    """Choose which adapter of ``load_model(adapters=...)`` each sequence of the next batches has.

    ids: for each sequence the position of its adapter, -1 for none; None: no sequence has one. Raises InputError for
    other ids, and for a model without adapters.
    """
    choice: AdapterChoice | None = vars(model).get(_ATTRIBUTE)
    if choice is None:
        raise InputError("choose_adapters: the model has no adapters; load it with load_model(adapters=[...])")
    choice.choose(ids, next(p.device for p in model.parameters() if p.device.type != "meta"))
