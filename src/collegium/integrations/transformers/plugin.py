"""``experts_implementation="collegium"``: the experts that transformers loaded run here."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ...devices import probe
from ...errors import InputError
from ...formats.unquantised import FLOAT_FORMATS
from ...layer import MoELayer
from ...plan import plan
from ...types import Problem, Routing
from ..extra import extra
from .blocks import blocks_of
from .modules import experts_modules, routed_weights, spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from ...types import Choice

__all__ = ["NAME", "attach", "experts_forward", "layers_of", "register"]

NAME = "collegium"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A layer and what it was built from: parameters changed since then make it stale."""

    layer: MoELayer
    stamp: tuple[object, ...] | None


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


def register(force: Choice | None = None) -> None:
    """Make ``experts_implementation="collegium"`` known to transformers, for plain and for FP8 and FP4 experts.

    force: kernel or activation format of the layers built from now on; without it activations are not quantised.
    May be called any number of times.
    """
    forward = partial(experts_forward, force=force)
    extra("transformers.integrations.moe").ExpertsInterface.register(NAME, forward)
    extra("transformers.integrations.finegrained_fp8").FP8ExpertsInterface.register(NAME, forward)


def experts_forward(
    module: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, force: Choice | None = None
) -> Tensor:
    """Run one transformers experts module: ``x [T, H]``, ids and weights ``[T, K]``, returns ``[T, H]``.

    The layer is built from the module's parameters at the first call and again whenever they change; layers given by
    ``attach`` or ``load_model`` are used as they are. force: see ``register``.
    Ids of ``num_experts`` and above mean "not on this rank".
    """
    entry = _LAYERS.get(module)
    if entry is None or (entry.stamp is not None and entry.stamp != _stamp(module)):
        entry = _Entry(layer=_build(module, x, topk_ids.shape[-1], force), stamp=_stamp(module))
        _LAYERS[module] = entry
    return entry.layer(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))


def attach(model: nn.Module, layers: Mapping[int, MoELayer]) -> None:
    """Let the experts of ``model`` run through ``layers`` (by layer index), whatever its own parameters hold.

    Raises InputError when the indices are not exactly the model's MoE layers.
    """
    modules = experts_modules(model)
    if set(modules) != set(layers):
        raise InputError(
            f"attach: layers were given for {sorted(layers)}, the model has experts in {sorted(modules)}; give all"
        )
    for index, module in modules.items():
        _LAYERS[module] = _Entry(layer=layers[index], stamp=None)


def layers_of(model: nn.Module) -> list[MoELayer]:
    """Return the layers that the experts of ``model`` run through so far, in order; for ``collegium.warm_up``."""
    found = {index: _LAYERS.get(module) for index, module in experts_modules(model).items()}
    layers = {index: entry.layer for index, entry in found.items() if entry is not None}
    layers |= {index: block.layer for index, block in blocks_of(model).items()}
    return [layer for _, layer in sorted(layers.items())]


def _build(module: Any, x: Tensor, top_k: int, force: Choice | None) -> MoELayer:
    weights = routed_weights(module)
    if weights.down.device.type == "meta":
        raise InputError(
            f"{type(module).__name__}: its parameters are on the meta device and no layer was attached; "
            "use load_model(), or attach() layers of your own"
        )
    if x.dtype not in FLOAT_FORMATS:
        raise InputError(f"x is {x.dtype}; allowed: {', '.join(map(str, FLOAT_FORMATS))}")
    spec = spec_of(module, weights, top_k)
    problem = Problem(spec=spec, device=probe(x.device), dtype=cast("Any", FLOAT_FORMATS[x.dtype].name))
    # Not every release of transformers knows of experts that end in a norm.
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return MoELayer(weights, plan(problem, force), after_expert=norm)


def _stamp(module: nn.Module) -> tuple[object, ...]:
    return tuple((p.data_ptr(), p._version, p.dtype, p.device) for p in module.parameters(recurse=False))
