"""``experts_implementation="collegium"``: run experts that transformers has loaded."""

import gc
import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...formats.unquantised import FLOAT_FORMATS
from ...layer import MoELayer
from ...planning import plan
from ...problem import Overrides, Problem
from ...runtime.devices import probe
from ...runtime.memory import is_capturing, is_stream_capturing
from ...runtime.packed_module import refuse_gradient
from ...types import Routing
from ..extra import import_extra
from . import hooks, trust
from .adapters import adapter_ids_for
from .blocks import blocks_of, layer_summary
from .modules import experts_modules, is_experts, named_experts, routed_weights, spec_of, write_count
from .patches import wrap_extra_repr

__all__ = [
    "NAME",
    "attach",
    "experts_forward",
    "install",
    "layers_of",
    "refresh",
    "register",
    "transformers_experts",
]

NAME = "collegium"


@dataclass(frozen=True, kw_only=True, slots=True)
class _BuiltLayer:
    """A layer and the stamp of the parameters it was built from; None for a layer that was attached."""

    layer: MoELayer
    stamp: tuple[object, ...] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the layer so that unpickling also registers the experts implementation."""
        return _restore_entry, (self.layer, self.stamp)


def _restore_entry(layer: MoELayer, stamp: tuple[object, ...] | None) -> _BuiltLayer:
    install()
    return _BuiltLayer(layer=layer, stamp=stamp)


class _Settings:
    """Arguments of the last call of ``register``."""

    overrides: Overrides | None = None


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _BuiltLayer] = weakref.WeakKeyDictionary()
# Experts modules by the address of their handle, which compiled graphs pass.
_MODULES: dict[int, weakref.ref[nn.Module]] = {}
_building = threading.RLock()


def register(overrides: Overrides | None = None, *, compare: bool = True) -> None:
    """Register ``experts_implementation="collegium"`` with transformers, for unquantised, FP8 and FP4 experts.

    overrides: kernel or activation format of layers built from now on; by default activations are not quantised.
    compare: at the first call, compare sampled rows of each layer with the checkpoint's files, if they are on this
    machine, and raise ConfigError for a difference. False for weights that were changed on purpose, for instance by
    merging an adapter.

    May be called repeatedly. Requesting the implementation for a model without exchangeable experts raises ConfigError.
    """
    _Settings.overrides = overrides
    trust.set_comparing(compare)
    install()


def install() -> None:
    """Register the implementation without changing the settings of ``register``."""
    hooks.install(NAME)
    import_extra("transformers.integrations.moe").ExpertsInterface.register(NAME, experts_forward)
    import_extra("transformers.integrations.finegrained_fp8").FP8ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Run one transformers experts module: ``x [T, H]``, ids and weights ``[T, K]``, returns ``[T, H]``.

    The layer is built from the module's parameters at the first call and again whenever they change; layers from
    ``attach`` or ``load_model`` are used unchanged. With expert parallelism, ids of ``num_experts`` and above mean "not
    on this rank". Inference only: raises InputError if a gradient is required.
    """
    parametrizations: Any = getattr(module, "parametrizations", None)
    if parametrizations:
        raise InputError(
            f"{type(module).__name__}: its parameters {', '.join(parametrizations)} are computed at every call, as "
            "PEFT's target_parameters are; merge them (merge_and_unload()), or pass the adapter to "
            "load_model(adapter=...)"
        )
    handle = _handle(module)
    refuse_gradient(x=x, topk_weights=topk_weights, experts=handle)
    if not torch.compiler.is_compiling():
        refuse_gradient(**dict(module.named_parameters(recurse=False)))
        return _run(module, x, topk_ids, topk_weights)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ops.collegium.transformers_experts(x, topk_ids, topk_weights, handle, out)
    return out


def attach(model: nn.Module, layers: Mapping[int, MoELayer]) -> None:
    """Run the experts of ``model`` through ``layers`` (by layer index); the module's parameters are ignored.

    Raises InputError if the indices are not exactly the model's MoE layers.
    """
    modules = experts_modules(model)
    if set(modules) != set(layers):
        raise InputError(
            f"attach: got layers for {sorted(layers)}, the model has experts in {sorted(modules)}; pass all of them"
        )
    for index, module in modules.items():
        # An attribute of the module, so that copies and pickles include it.
        vars(module)["collegium_layer"] = _BuiltLayer(layer=layers[index], stamp=None)
        wrap_extra_repr(type(module), _repr_with_layer)
        # Parameters on the meta device have no address, and a copy of the module must not share this one's handle.
        module.register_buffer("collegium_handle", layers[index].handle.clone(), persistent=False)


def layers_of(model: nn.Module) -> list[MoELayer]:
    """Return the layers of ``model`` that are built or attached, in order; for ``collegium.warm_up``."""
    layers = {index: block.layer for index, block in blocks_of(model).items()}
    for index, module in experts_modules(model).items():
        entry = _entry_of(module)
        if entry is not None:
            layers.setdefault(index, entry.layer)
    return [layer for _, layer in sorted(layers.items())]


def refresh(model: nn.Module) -> None:
    """Rebuild the experts of ``model`` at the next call, after their weights were written through ``.data``.

    All other in-place changes, including an optimizer's step, are detected. Layers from ``attach`` or ``load_model``
    are independent of the model's parameters and do not change.
    """
    for _, _, module in named_experts(model):
        _LAYERS.pop(module, None)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_inference():
                # The weights are no longer compared with the checkpoint.
                torch.autograd.graph.increment_version(parameter)


def _handle(module: Any) -> Tensor:
    """Return the tensor that identifies ``module`` in a compiled graph, where it is an input."""
    return module.collegium_handle if hasattr(module, "collegium_handle") else module.down_proj


@torch.library.custom_op(
    "collegium::transformers_experts",
    mutates_args=("out",),
    schema="(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, Tensor(a!) out) -> ()",
)
def transformers_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, out: Tensor) -> None:
    """Write the output of the experts module with ``handle`` for ``x [T, H]`` to ``out [T, H]``."""
    module = _module_of(handle)
    if _built_for(module, x, topk_ids) is None:
        _build_in_thread(module, x, topk_ids)
    _run(module, x, topk_ids, topk_weights, out)


@transformers_experts.register_fake
def _transformers_experts_fake(*_: object) -> None:
    return None


def _run(module: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None) -> Tensor:
    entry = _built_for(module, x, topk_ids) or _build_once(module, x, topk_ids)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    # A layer that Collegium splits over ranks accepts all ids, and an unknown id is an error.
    if not entry.layer.plan.groups and getattr(module, "_is_expert_parallel", distributed):
        topk_ids = topk_ids.masked_fill(topk_ids >= entry.layer.spec.num_experts, -1)
    routing = Routing(topk_ids=topk_ids, topk_weights=topk_weights)
    return entry.layer(x, routing=routing, adapter_ids=adapter_ids_for(module, x.shape[0]), out=out)


def _entry_of(module: nn.Module) -> _BuiltLayer | None:
    return vars(module).get("collegium_layer") or _LAYERS.get(module)


def _repr_with_layer(module: Any, text: str) -> str:
    entry = _entry_of(module)
    if entry is None or module.config._experts_implementation != NAME:
        return text
    summary = layer_summary(entry.layer)
    return f"{text}, {summary}" if text else summary


def _built_for(module: nn.Module, x: Tensor, topk_ids: Tensor) -> _BuiltLayer | None:
    """Return the layer if it was attached, or built from the current parameters for such tokens; otherwise None."""
    entry = _entry_of(module)
    if entry is None or entry.stamp is None or entry.stamp == _stamp(module, x, topk_ids):
        return entry
    return None


def _build_in_thread(module: nn.Module, x: Tensor, topk_ids: Tensor) -> None:
    """Build the layer of ``module`` and run it once, in a separate thread and on a separate stream.

    A compiler that uses CUDA graphs may be capturing launches and memory of this thread, and the layer's persistent
    memory must not belong to a graph.
    """
    x_shape, x_dtype = x.shape, x.dtype
    ids_shape, ids_dtype = topk_ids.shape, topk_ids.dtype
    device = x.device
    errors: list[BaseException] = []
    # A captured stream cannot be waited for, and its work does not run yet.
    after = torch.cuda.current_stream(device) if x.is_cuda and not is_capturing(device) else None

    def build() -> None:
        try:
            with torch.inference_mode(), _separate_stream(device, after):
                zeros = torch.zeros(x_shape, dtype=x_dtype, device=device)
                ids = torch.zeros(ids_shape, dtype=ids_dtype, device=device)
                _run(module, zeros, ids, torch.zeros(ids_shape, device=device))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@contextmanager
def _separate_stream(device: torch.device, after: torch.cuda.Stream | None) -> Generator[None]:
    if device.type != "cuda":
        yield
        return
    # torch hands out a few streams in rotation, and one of them may be capturing.
    streams = (torch.cuda.Stream(device) for _ in range(64))
    stream = next(candidate for candidate in streams if not is_stream_capturing(device, candidate.cuda_stream))
    stream.wait_stream(after or torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _module_of(handle: Tensor) -> nn.Module:
    """Return the experts module whose handle has the address of ``handle``; raises InputError if there is none."""
    address = handle.data_ptr()
    for _ in range(2):
        reference = _MODULES.get(address)
        module = None if reference is None else reference()
        if module is not None and _handle(module).data_ptr() == address:
            return module
        # The model was compiled before its first call, moved or copied: collect the handles of all experts modules.
        _MODULES.clear()
        # issubclass of the type, because isinstance would access the target of a weak proxy, which may be dead.
        objects = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and is_experts(item)]
        _MODULES.update({_handle(item).data_ptr(): weakref.ref(item) for item in objects})
    raise InputError(
        "torch.ops.collegium.transformers_experts: no experts module of this process has this handle; a compiled graph "
        "cannot outlive its model or move to another process, compile it again"
    )


def _build_once(module: nn.Module, x: Tensor, topk_ids: Tensor) -> _BuiltLayer:
    """Build the layer of ``module`` and store it; other threads that need it wait."""
    if is_capturing(x.device):
        raise InputError(
            f"{type(module).__name__}: its layer is not built yet, and a CUDA graph is being captured; call the model "
            "once before the capture"
        )
    with _building:
        stamp = _stamp(module, x, topk_ids)
        entry = _LAYERS.get(module)
        if entry is None or entry.stamp != stamp:
            entry = _BuiltLayer(layer=_build(module, x, topk_ids.shape[-1]), stamp=stamp)
            _LAYERS[module] = entry
            wrap_extra_repr(type(module), _repr_with_layer)
    return entry


def _build(module: Any, x: Tensor, top_k: int) -> MoELayer:
    weights = routed_weights(module)
    if weights.down.device.type == "meta":
        raise InputError(
            f"{type(module).__name__}: its parameters are on the meta device and no layer is attached; use load_model()"
        )
    if x.dtype not in FLOAT_FORMATS:
        raise InputError(f"x is {x.dtype}; allowed: {', '.join(map(str, FLOAT_FORMATS))}")
    trust.check(module, weights)
    spec = spec_of(module, weights, top_k)
    problem = Problem(spec=spec, device=probe(x.device), dtype=cast("Any", FLOAT_FORMATS[x.dtype].name))
    # Older releases of transformers have no experts that end in a norm.
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return MoELayer(weights, plan(problem, _Settings.overrides), after_expert=norm)


def _stamp(module: nn.Module, x: Tensor, topk_ids: Tensor) -> tuple[object, ...]:
    """Return the key of a built layer: dtype and top-k of the tokens, address and version of the parameters."""
    parameters = ((p.data_ptr(), write_count(p), p.dtype, p.device) for p in module.parameters(recurse=False))
    return x.dtype, topk_ids.shape[-1], *parameters
