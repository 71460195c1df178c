"""transformers runs everything but the experts: ``experts_implementation="collegium"``.

Two ways in::

    register()                                     # then any AutoModel...from_pretrained(..., experts_implementation=
    model.set_experts_implementation("collegium")  # "collegium"): the experts transformers loaded run here

    model = load_model("path/to/checkpoint")       # the experts never pass through transformers: Collegium reads,
                                                   # audits and packs them in the format they were published in
"""

from __future__ import annotations

import importlib
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ..checkpoint.reader import Checkpoint
from ..devices import probe
from ..errors import ConfigError, InputError, MissingExtraError, MissingTensorError, SpecError
from ..formats.fp8_block import Fp8Block
from ..formats.fp8_tensor import Fp8Tensor
from ..formats.mxfp4 import MxFp4
from ..formats.unquantised import FLOAT_FORMATS, as_stored
from ..layer import MoELayer
from ..loading import load_routed
from ..models import family_of
from ..ops.activation import activate, deinterleave
from ..plan import plan
from ..types import ActivationSpec, ExpertWeights, MoESpec, Problem, Routing, RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from ..formats.payload import Payload
    from ..types import Choice, Limits

__all__ = [
    "attach",
    "build_layers",
    "experts_forward",
    "experts_modules",
    "extra",
    "layers_of",
    "load_model",
    "register",
    "routed_weights",
    "spec_of",
]

NAME = "collegium"
# Where transformers names a module otherwise than the published checkpoint does: family -> {theirs: published}.
RENAMED: dict[str, dict[str, str]] = {"mixtral": {".mlp.": ".block_sparse_moe."}}


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
    With expert parallelism ids of ``num_experts`` and above mean "not on this rank".
    """
    entry = _LAYERS.get(module)
    if entry is None or (entry.stamp is not None and entry.stamp != _stamp(module)):
        entry = _Entry(layer=_build(module, x, topk_ids.shape[-1], force), stamp=_stamp(module))
        _LAYERS[module] = entry
    if getattr(module, "_is_expert_parallel", torch.distributed.is_available() and torch.distributed.is_initialized()):
        topk_ids = topk_ids.masked_fill(topk_ids >= entry.layer.spec.num_experts, -1)
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
    found = (_LAYERS.get(module) for _, module in sorted(experts_modules(model).items()))
    return [entry.layer for entry in found if entry is not None]


def routed_weights(module: Any) -> ExpertWeights[Payload]:
    """Return an experts module's parameters in logical order, as views: gate before up, output-first."""
    if hasattr(module, "down_proj_scale_inv"):
        return _quantised_weights(module)
    upper = module.gate_up_proj if module.has_gate else module.up_proj
    lower = module.down_proj
    parts = 2 if module.has_gate else 1
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        biases = (_split(bias.detach(), parts, module), module.down_proj_bias.detach())
    upper, lower = upper.detach(), lower.detach()
    if module.is_transposed:
        upper, lower = upper.transpose(1, 2), lower.transpose(1, 2)
    return ExpertWeights(
        gate_up=as_stored(_split(upper, parts, module)),
        down=as_stored(lower),
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )


def _quantised_weights(module: Any) -> ExpertWeights[Payload]:
    """Return the parameters of transformers' FP8 experts: blocks or tensors of E4M3, or MXFP4 bytes."""
    if module.activation_scheme != "dynamic":
        raise SpecError(
            f"{type(module).__name__}: its activations have {module.activation_scheme} scales; allowed: dynamic. "
            "Load the checkpoint with load_model() instead"
        )
    parts = 2 if module.has_gate else 1
    name = "gate_up_proj" if module.has_gate else "up_proj"
    made: list[Payload] = []
    for tensor, count in ((name, parts), ("down_proj", None)):
        codes, scale = getattr(module, tensor).detach(), getattr(module, f"{tensor}_scale_inv").detach()
        if scale.dtype == torch.float8_e8m0fnu and codes.dtype != torch.int8:
            scale = scale.float()
        rows = codes.shape[1] // (count or 1)
        block: tuple[int, int] | None = None if codes.dtype == torch.int8 else module.block_size
        if block is not None and count == 2 and rows % block[0]:
            raise SpecError(
                f"{type(module).__name__}: gate has {rows} rows, no multiple of its {block[0]}-row blocks, "
                "so a block spans gate and up; load the checkpoint with load_model() instead"
            )
        if count is not None:
            codes, scale = codes.unflatten(1, (count, -1)), scale.unflatten(1, (count, -1))
        shape = (*codes.shape[:-1], codes.shape[-1] * (2 if codes.dtype == torch.int8 else 1))
        if codes.dtype == torch.int8:
            made.append(MxFp4(shape=shape, codes=codes.view(torch.uint8), scales=scale.view(torch.uint8)))
        elif block is None:
            made.append(Fp8Tensor(shape=shape, codes=codes, scale=scale[..., 0, 0]))
        else:
            made.append(Fp8Block(shape=shape, codes=codes, scales=scale, block=(block[0], block[1])))
    return ExpertWeights(gate_up=made[0], down=made[1])


def load_model(
    path: str,
    *,
    weight_format: str | None = None,
    force: Choice | None = None,
    device: str | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Load a causal language model whose experts run through Collegium in their published format.

    weight_format: encode the experts into this format instead. force: kernel or activation format. progress: called
    with (done, total, what). Raises CheckpointError kinds, PlanError, and MissingExtraError without transformers.
    """
    checkpoint = Checkpoint.open(path)
    model = _skeleton(path)
    _load_rest(model, checkpoint, probe(device).kind)
    attach(
        model,
        build_layers(
            checkpoint,
            weight_format=weight_format,
            force=force,
            device=device,
            limits=limits,
            progress=progress,
        ),
    )
    return model


def build_layers(
    checkpoint: Checkpoint,
    *,
    weight_format: str | None = None,
    force: Choice | None = None,
    device: str | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[int, MoELayer]:
    """Read, audit, plan and pack the routed experts of every MoE layer, one layer in memory beyond the packed ones.

    The layers hold no router and no shared expert: transformers keeps those. Arguments and errors as ``load_model``.
    """
    indices = family_of(checkpoint.config).moe_layers(checkpoint.config)
    layers: dict[int, MoELayer] = {}
    for done, index in enumerate(indices):
        if progress is not None:
            progress(done, len(indices), f"layer {index}")
        layers[index] = load_routed(
            checkpoint, index, weight_format=weight_format, force=force, device=device, limits=limits
        )
    if progress is not None:
        progress(len(indices), len(indices), "done")
    return layers


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


def spec_of(module: Any, weights: ExpertWeights[Payload], top_k: int) -> MoESpec:
    """Return what an experts module with its ``routed_weights`` computes for ``top_k`` experts a token."""
    experts, _, wide, hidden = weights.gate_up.shape
    return MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=min(top_k, experts)),
        activation=_activation_of(module),
        weight_format=weights.down.name,
        expert_bias=weights.down_bias is not None,
    )


def _activation_of(module: Any) -> ActivationSpec:
    """Find the activation by trying it: a candidate counts only if it reproduces the module's own gate function."""
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if not module.has_gate:
        kinds = ("relu2", "silu", "gelu")
        candidates = [ActivationSpec(kind=kind) for kind in kinds]
    else:
        candidates = [ActivationSpec(kind=kind) for kind in ("swiglu", "geglu", "geglu_tanh")]
        for bound in {float(v) for v in (limit, getattr(module, "swiglu_limit", None)) if v}:
            candidates.append(ActivationSpec(kind="swiglu", limit=bound))
            candidates.append(ActivationSpec(kind="swiglu_oai", limit=bound, alpha=float(alpha or 1.702)))
        softcaps = [float(getattr(module.config, f"mlp_{part}_softcap", None) or 0) for part in ("gate", "up")]
        if all(softcaps):
            candidates.append(ActivationSpec(kind="situ", gate_bound=softcaps[0], up_bound=softcaps[1]))
    for candidate in candidates:
        if _reproduces(module, candidate):
            return candidate
    tried = ", ".join(f"{c.kind}(limit={c.limit})" for c in candidates)
    raise SpecError(
        f"{type(module).__name__}: its gate function matches none of the activations tried ({tried}); "
        "build a MoELayer with the right ActivationSpec and attach() it"
    )


def _reproduces(module: Any, candidate: ActivationSpec) -> bool:
    points = torch.linspace(-30, 30, 41)
    if not module.has_gate:
        found, wanted = module.act_fn(points[:, None]), activate(points[:, None, None], candidate)
    else:
        gate, up = torch.meshgrid(points, points, indexing="ij")
        pair = torch.stack([gate.reshape(-1), up.reshape(-1)], dim=1)
        # one intermediate column: concatenated and interleaved rows are the same two numbers
        found, wanted = module._apply_gate(pair), activate(pair[:, :, None], candidate)
    return bool(torch.allclose(found.float(), wanted, rtol=1e-5, atol=1e-5))


def _split(weight: Tensor, parts: int, module: nn.Module) -> Tensor:
    """Bring ``[E, P*I, ...]`` to ``[E, P, I, ...]`` without a copy."""
    if parts == 2 and not module.is_concatenated:
        return deinterleave(weight, 1)
    return weight.unflatten(1, (parts, -1))


def _stamp(module: nn.Module) -> tuple[object, ...]:
    return tuple((p.data_ptr(), p._version, p.dtype, p.device) for p in module.parameters(recurse=False))


def experts_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the experts modules of a transformers model by layer index."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate"):
            index = next((int(piece) for piece in name.split(".") if piece.isdigit()), None)
            if index is not None:
                found[index] = module
    return found


def _skeleton(path: str) -> nn.Module:
    """Build the model with every parameter on the meta device and every buffer real."""
    register()
    transformers, accelerate = extra("transformers"), extra("accelerate")
    config = transformers.AutoConfig.from_pretrained(path)
    config._experts_implementation = NAME
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return cast("nn.Module", model.eval())


def _load_rest(model: Any, checkpoint: Checkpoint, device: str) -> None:
    """Fill every parameter outside the experts, refusing missing and quantised ones."""
    renames = RENAMED.get(family_of(checkpoint.config).name, {})
    experts = {id(p) for m in experts_modules(model).values() for p in m.parameters()}
    state: dict[str, Tensor] = {}
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    for name, parameter in model.named_parameters():
        if id(parameter) in experts or name in tied:
            continue
        stored = name
        for theirs, published in renames.items():
            stored = stored.replace(theirs, published)
        if stored not in checkpoint:
            raise MissingTensorError(
                f"{name}: transformers' {type(model).__name__} needs it, the checkpoint has no {stored!r}; "
                "is the download complete?"
            )
        state[name] = _plain(checkpoint.read(stored), stored).to(device=device, dtype=torch.bfloat16)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name in checkpoint:
            buffer.copy_(checkpoint.read(name).to(buffer.dtype))
    generation = extra("transformers").GenerationConfig
    if (checkpoint.path / "generation_config.json").exists():
        model.generation_config = generation.from_pretrained(checkpoint.path)


def _plain(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype in FLOAT_FORMATS:
        return tensor
    raise ConfigError(
        f"{name}: stored as {tensor.dtype}; outside the experts only {', '.join(map(str, FLOAT_FORMATS))} are read. "
        "Run this model in an engine that quantises its other layers too, and use Collegium for the experts there"
    )


def extra(module: str) -> Any:
    """Return a module of the transformers extra; raises MissingExtraError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is not installed; install it with: pip install 'collegium[transformers]'"
        ) from error
