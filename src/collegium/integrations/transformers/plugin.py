"""``experts_implementation="collegium"``: the experts that transformers loaded run here."""

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
from .blocks import blocks_of, layer_summary
from .modules import experts_modules, is_experts, routed_weights, spec_of, write_count

__all__ = [
    "NAME",
    "attach",
    "experts_forward",
    "layers_of",
    "install",
    "refresh",
    "register",
    "transformers_experts",
]

NAME = "collegium"


@dataclass(frozen=True, kw_only=True, slots=True)
class _BuiltLayer:
    """A layer and what it was built from: parameters changed since then make it stale."""

    layer: MoELayer
    stamp: tuple[object, ...] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a process that unpickles a model know the implementation that its experts ask for."""
        return _restore_entry, (self.layer, self.stamp)


def _restore_entry(layer: MoELayer, stamp: tuple[object, ...] | None) -> _BuiltLayer:
    install()
    return _BuiltLayer(layer=layer, stamp=stamp)


class _Settings:
    """What ``register`` was last called with."""

    overrides: Overrides | None = None


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _BuiltLayer] = weakref.WeakKeyDictionary()
# Experts modules by the address of their handle, for compiled graphs.
_MODULES: dict[int, weakref.ref[nn.Module]] = {}
_building = threading.RLock()


def register(overrides: Overrides | None = None, *, compare: bool = True) -> None:
    """Make ``experts_implementation="collegium"`` known to transformers, for plain and for FP8 and FP4 experts.

    overrides: kernel or activation format of the layers built from now on; without it activations are not quantised.
    compare: at the first call rows of a few experts of each layer are compared with the checkpoint's files, where
    these are on this machine, and a difference is a ConfigError; False for weights that were changed on purpose, an
    adapter merged into them for instance. May be called any number of times. A model without experts that another
    implementation can run raises ConfigError when it is asked for this one.
    """
    _Settings.overrides = overrides
    trust.set_comparing(compare)
    install()


def install() -> None:
    """Do what ``register`` does and leave as it is how layers are built."""
    hooks.install(NAME)
    import_extra("transformers.integrations.moe").ExpertsInterface.register(NAME, experts_forward)
    import_extra("transformers.integrations.finegrained_fp8").FP8ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Run one transformers experts module: ``x [T, H]``, ids and weights ``[T, K]``, returns ``[T, H]``.

    The layer is built from the module's parameters at the first call and again whenever they change; layers given by
    ``attach`` or ``load_model`` are used as they are. With expert parallelism ids of ``num_experts`` and above mean
    "not on this rank". Inference only: InputError where a gradient is asked for.
    """
    computed: Any = getattr(module, "parametrizations", None)
    if computed:
        raise InputError(
            f"{type(module).__name__}: its parameters {', '.join(computed)} are computed at every call, as PEFT's "
            "target_parameters are; merge them (merge_and_unload()), or give the adapter to load_model(adapter=...)"
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
    """Let the experts of ``model`` run through ``layers`` (by layer index), whatever its own parameters hold.

    Raises InputError when the indices are not exactly the model's MoE layers.
    """
    modules = experts_modules(model)
    if set(modules) != set(layers):
        raise InputError(
            f"attach: layers were given for {sorted(layers)}, the model has experts in {sorted(modules)}; give all"
        )
    for index, module in modules.items():
        # In the module itself, so that it goes with copies and into pickles.
        vars(module)["collegium_given"] = _BuiltLayer(layer=layers[index], stamp=None)
        _add_repr(module)
        # Parameters on the meta device have no address, and a copy of the module must not share this one's handle.
        module.register_buffer("collegium_handle", layers[index].handle.clone(), persistent=False)


def layers_of(model: nn.Module) -> list[MoELayer]:
    """Return the layers that the experts of ``model`` run through so far, in order; for ``collegium.warm_up``."""
    layers = {index: entry.layer for index, own in experts_modules(model).items() if (entry := _entry_of(own))}
    layers |= {index: block.layer for index, block in blocks_of(model).items()}
    return [layer for _, layer in sorted(layers.items())]


def refresh(model: nn.Module) -> None:
    """Say that the experts' weights of ``model`` were written through ``.data``: the next call reads them again.

    Every other change in place, also an optimizer's step, is noticed without it. Layers given by ``attach`` or
    ``load_model`` do not come from the model's parameters and stay as they are.
    """
    for module in experts_modules(model).values():
        _LAYERS.pop(module, None)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)  # written on purpose: no longer the checkpoint's


def _handle(module: Any) -> Tensor:
    """Return the tensor that names ``module`` in a compiled graph, where it is an input like any other."""
    return module.collegium_handle if hasattr(module, "collegium_handle") else module.down_proj


@torch.library.custom_op(
    "collegium::transformers_experts",
    mutates_args=("out",),
    schema="(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, Tensor(a!) out) -> ()",
)
def transformers_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor, out: Tensor) -> None:
    """Write ``out [T, H]``, the output for ``x [T, H]`` of the experts module that has ``handle``."""
    module = _module_of(handle)
    if _built_for(module, x, topk_ids) is None:
        _build_in_thread(module, x, topk_ids)
    _run(module, x, topk_ids, topk_weights, out)


@transformers_experts.register_fake
def _transformers_experts_fake(*_: object) -> None:
    return None


def _run(module: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None) -> Tensor:
    entry = _built_for(module, x, topk_ids) or _build_once(module, x, topk_ids)
    split = torch.distributed.is_available() and torch.distributed.is_initialized()
    # A layer over ranks of its own takes every id; there an unknown one is a fault.
    if not entry.layer.plan.groups and getattr(module, "_is_expert_parallel", split):
        topk_ids = topk_ids.masked_fill(topk_ids >= entry.layer.spec.num_experts, -1)
    return entry.layer(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights), out=out)


def _entry_of(module: nn.Module) -> _BuiltLayer | None:
    return vars(module).get("collegium_given") or _LAYERS.get(module)


def _add_repr(module: nn.Module) -> None:
    """Let ``print(model)`` show the layer that runs the experts of ``module``, by its class.

    An attribute of the module itself would be a reference cycle, which keeps GPU memory until the next collection.
    """
    cls: Any = type(module)
    if "collegium_extra_repr" not in vars(cls):
        cls.collegium_extra_repr = before = cls.extra_repr

        def extra_repr(self: nn.Module) -> str:
            return _repr_with_layer(self, before(self))

        cls.extra_repr = extra_repr


def _repr_with_layer(module: Any, before: str) -> str:
    entry = _entry_of(module)
    if entry is None or module.config._experts_implementation != NAME:
        return before
    return ", ".join(filter(None, (before, layer_summary(entry.layer))))


def _built_for(module: nn.Module, x: Tensor, topk_ids: Tensor) -> _BuiltLayer | None:
    """Return what was built of the module's parameters as they are, for tokens like these, None without it."""
    entry = _entry_of(module)
    return entry if entry is None or entry.stamp in (None, _stamp(module, x, topk_ids)) else None


def _build_in_thread(module: nn.Module, x: Tensor, topk_ids: Tensor) -> None:
    """Build the layer of ``module`` and run it once, in a thread and on a stream of its own.

    A compiler that makes CUDA graphs may be capturing this thread's launches, and counts the memory this thread takes
    as the graph's; what a layer keeps must be neither.
    """
    like = (torch.zeros, x.shape, x.dtype), (torch.zeros, topk_ids.shape, topk_ids.dtype)
    errors: list[BaseException] = []
    # A stream that is captured cannot be waited for; what it holds does not run yet.
    after = torch.cuda.current_stream(x.device) if x.is_cuda and not is_capturing(x.device) else None

    def build() -> None:
        try:
            with torch.inference_mode(), _separate_stream(x.device, after):
                tokens, ids = (make(shape, dtype=dtype, device=x.device) for make, shape, dtype in like)
                _run(module, tokens, ids, torch.zeros(ids.shape, device=x.device))
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
    # torch gives out the same few streams again and again; one of them may be the one that is captured.
    streams = (torch.cuda.Stream(device) for _ in range(64))
    stream = next(each for each in streams if not is_stream_capturing(device, each.cuda_stream))
    stream.wait_stream(after or torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _module_of(handle: Tensor) -> nn.Module:
    """Return the experts module whose handle is at the address of ``handle``; raises InputError."""
    address = handle.data_ptr()
    for _ in range(2):
        reference = _MODULES.get(address)
        module = None if reference is None else reference()
        if module is not None and _handle(module).data_ptr() == address:
            return module
        # A model compiled before its first call, moved or copied: no call has told yet where its handles are.
        _MODULES.clear()
        # By type: isinstance would ask a weak proxy, which may be dead.
        everything = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and is_experts(m)]
        _MODULES.update({_handle(module).data_ptr(): weakref.ref(module) for module in everything})
    raise InputError(
        "torch.ops.collegium.transformers_experts: no experts module of this process has this handle; a compiled graph "
        "cannot outlive its model or move to another process, compile it again"
    )


def _build_once(module: nn.Module, x: Tensor, topk_ids: Tensor) -> _BuiltLayer:
    """Build the layer of ``module`` and remember it; one thread builds, others that need it wait."""
    if is_capturing(x.device):
        raise InputError(
            f"{type(module).__name__}: a CUDA graph is captured and its layer is not built yet; call the model before"
        )
    with _building:
        stamp, entry = _stamp(module, x, topk_ids), _LAYERS.get(module)
        if entry is None or entry.stamp != stamp:
            _LAYERS[module] = entry = _BuiltLayer(layer=_build(module, x, topk_ids.shape[-1]), stamp=stamp)
            _add_repr(module)
    return entry


def _build(module: Any, x: Tensor, top_k: int) -> MoELayer:
    weights = routed_weights(module)
    if weights.down.device.type == "meta":
        raise InputError(
            f"{type(module).__name__}: its parameters are on the meta device, no layer was given; use load_model()"
        )
    if x.dtype not in FLOAT_FORMATS:
        raise InputError(f"x is {x.dtype}; allowed: {', '.join(map(str, FLOAT_FORMATS))}")
    trust.check(module, weights)
    spec = spec_of(module, weights, top_k)
    problem = Problem(spec=spec, device=probe(x.device), dtype=cast("Any", FLOAT_FORMATS[x.dtype].name))
    # Not every release of transformers knows of experts that end in a norm.
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return MoELayer(weights, plan(problem, _Settings.overrides), after_expert=norm)


def _stamp(module: nn.Module, x: Tensor, topk_ids: Tensor) -> tuple[object, ...]:
    """Return what a layer is built for: the kind of tokens, and the parameters as they are."""
    parameters = ((p.data_ptr(), write_count(p), p.dtype, p.device) for p in module.parameters(recurse=False))
    return x.dtype, topk_ids.shape[-1], *parameters
