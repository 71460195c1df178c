"""moe() and moe_batched(): run experts once, on plain tensors, on raw codes with scales, or on payloads.

``moe_plan`` returns the plan of a call of ``moe`` without running it.

Shape letters: T tokens, K experts per token, E local experts, M rows of room for each, G experts of all ranks, P parts
(2: gate and up; 1), I intermediate size, H hidden size.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .formats.from_scales import payload_from_scales
from .formats.payload import Payload
from .formats.unquantised import FLOAT_FORMATS, as_stored
from .layer import MoELayer
from .planning import Plan, plan
from .problem import Limits, Overrides, Problem
from .runtime.devices import probe
from .runtime.packed_module import check_tensors, refuse_gradient
from .stages.given_scales import GivenScales, Scale, given_scales
from .types import ActivationSpec, ExpertWeights, MoESpec, Routing, RoutingSpec

__all__ = ["MoEOptions", "moe", "moe_batched", "moe_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEOptions:
    """Options of ``moe`` and ``moe_batched``, by the names that serving engines use.

    w1_scale, w2_scale: scales of ``gate_up`` and ``down`` where these are raw FP8 or FP4 codes; their dtypes and shapes
        tell the format (``collegium.formats.payload_from_scales``). w1_global_scale, w2_global_scale: of NVFP4, as
        ModelOpt's ``weight_scale_2``. block_shape: rows and columns of an FP8 block, None: (128, 128).
    a1_scale: of x, where it is float8_e4m3fn: one number, ``[T]``, ``[T, 1]``, or ``[T, ceil(H / 128)]``; for x
        ``[E, M, H]`` also ``[E, 1, 1]``, and ``[E, M]`` in place of ``[T]``. Unquantised x is quantised with it.
        a2_scale: of the rows between the products, with the same shapes, ``ceil(I / 128)`` in the last: the experts of
        a token share its scales, and larger numbers saturate. None: scales follow from the values of each row.
    expert_map: ``[G]`` integers, the local expert of each expert of all ranks, -1 for an expert of another rank; ids
        are then global. global_num_experts: G; None or -1: as many as ``expert_map`` has, or E.
    apply_router_weight_on_input: the router weight multiplies the experts' input instead of their output. These three
        are refused by ``moe_batched``, whose rows are routed already.
    inplace: write the result to x and return it. out: write it there. out_dtype: of the result, None: that of x, or
        bfloat16 for float8_e4m3fn.
    overrides: as in ``plan``.
    """

    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w1_global_scale: Tensor | None = None
    w2_global_scale: Tensor | None = None
    block_shape: tuple[int, int] | None = None
    a1_scale: Scale | None = None
    a2_scale: Scale | None = None
    expert_map: Tensor | None = None
    global_num_experts: int | None = None
    apply_router_weight_on_input: bool = False
    inplace: bool = False
    out: Tensor | None = None
    out_dtype: torch.dtype | None = None
    overrides: Overrides = field(default_factory=Overrides)


def moe(
    x: Tensor,
    gate_up: Payload | Tensor,
    down: Payload | Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: ActivationSpec | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    options: MoEOptions | None = None,
) -> Tensor:
    """Run routed experts once, without building a layer: ``x [T, H]`` to ``[T, H]``, same dtype.

    gate_up: a payload ``[E, P, I, H]``, or a tensor ``[E, P*I, H]`` with the gate rows first (w13). down: a payload or
    tensor ``[E, H, I]`` (w2). Tensors of codes need ``options.w1_scale`` and ``w2_scale``. topk_ids ``[T, K]`` integers
    (-1: not here), topk_weights ``[T, K]``. activation: with its clamp, ``ActivationSpec(limit=...)``. biases: gate_up
    ``[E, P*I]`` or ``[E, P, I]`` and down ``[E, H]``. Weights are packed at every call: build a MoELayer for repeated
    use of a quantised format. Inference only. Raises InputError for wrong shapes and dtypes and where a gradient is
    required, and PlanError.
    """
    options = options or MoEOptions()
    _check_types("moe", x=x, gate_up=gate_up, down=down, topk_ids=topk_ids, topk_weights=topk_weights)
    _check("moe", x, 2)
    _check_routing(x, topk_ids, topk_weights)
    activation = activation or ActivationSpec()
    matrices = _payloads(gate_up, down, 2 if activation.gated else 1, options)
    routing = Routing(topk_ids=_local_ids(topk_ids, matrices[0].shape[0], options), topk_weights=topk_weights)
    layer, given = _layer_of(x, matrices, activation, biases, options, top_k=topk_ids.shape[1])
    out = _output(x, options)
    if given.codes is None or given.scale is None:
        return layer(x, routing=routing, out=out)
    return layer.run_quantized(given.codes, given.scale, routing, middle_scale=given.middle_scale, out=out)


def moe_plan(
    x: Tensor,
    gate_up: Payload | Tensor,
    down: Payload | Tensor,
    topk_ids: Tensor,
    *,
    activation: ActivationSpec | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    options: MoEOptions | None = None,
) -> Plan:
    """Return the plan that ``moe`` runs for the same arguments: kernel, formats, memory, and why not others.

    Nothing is packed or computed. Raises the errors of ``moe`` for weights, x, ids, scales and overrides.
    """
    options = options or MoEOptions()
    _check_types("moe", x=x, gate_up=gate_up, down=down, topk_ids=topk_ids)
    _check("moe", x, 2)
    _check_ids(x, topk_ids, "topk_ids")
    activation = activation or ActivationSpec()
    matrices = _payloads(gate_up, down, 2 if activation.gated else 1, options)
    _local_ids(topk_ids, matrices[0].shape[0], options)
    _output(x, options)
    return _plan_of(x, matrices, activation, options, biased=biases is not None, top_k=topk_ids.shape[1])[0]


def moe_batched(
    x: Tensor,
    gate_up: Payload | Tensor,
    down: Payload | Tensor,
    counts: Tensor,
    *,
    activation: ActivationSpec | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    options: MoEOptions | None = None,
    expected: int | None = None,
) -> Tensor:
    """Run experts once on rows that are packed by expert, as low-latency dispatchers send them: ``[E, M, H]``.

    x: ``[E, M, H]``, unquantised or float8_e4m3fn with ``options.a1_scale``. counts: ``[E]`` integers, the number of
    valid rows of each expert. expected: see ``MoELayer.run_batched``. Other arguments, and errors, as for ``moe``.
    Returns ``[E, M, H]``, which no router weight multiplies; rows past ``counts`` are not written.
    """
    options = options or MoEOptions()
    _check_types("moe_batched", x=x, gate_up=gate_up, down=down, counts=counts)
    _check("moe_batched", x, 3)
    if options.expert_map is not None or options.global_num_experts is not None or options.apply_router_weight_on_input:
        raise InputError(
            f"moe_batched: expert_map was {'missing' if options.expert_map is None else 'passed'}, global_num_experts "
            f"is {options.global_num_experts}, apply_router_weight_on_input {options.apply_router_weight_on_input}; "
            "allowed: none of them, since the rows are routed already"
        )
    activation = activation or ActivationSpec()
    matrices = _payloads(gate_up, down, 2 if activation.gated else 1, options)
    layer, given = _layer_of(x, matrices, activation, biases, options, top_k=1)
    rows = x if given.codes is None else given.codes
    scales = {"scale": given.scale, "middle_scale": given.middle_scale}
    return layer.run_batched(rows, counts, **scales, out=_output(x, options), expected=expected)


def _layer_of(
    x: Tensor,
    matrices: tuple[Payload, Payload],
    activation: ActivationSpec,
    biases: tuple[Tensor, Tensor] | None,
    options: MoEOptions,
    *,
    top_k: int,
) -> tuple[MoELayer, GivenScales]:
    """Return a layer for one call, and what it is called with. top_k: number of ids for each row of x."""
    gate_up, down = matrices
    experts, parts, intermediate, _ = gate_up.shape
    gate_up_bias, down_bias = biases or (None, None)
    refuse_gradient(gate_up_bias=gate_up_bias, down_bias=down_bias)
    layer_plan, given = _plan_of(x, matrices, activation, options, biased=biases is not None, top_k=top_k)
    weights = ExpertWeights(
        gate_up=gate_up,
        down=down,
        gate_up_bias=None if biases is None else _gate_up_bias(biases[0], (experts, parts, intermediate)),
        down_bias=None if biases is None else biases[1],
        input_reach=given.reach,
    )
    return MoELayer(weights, layer_plan), given


def _plan_of(
    x: Tensor,
    matrices: tuple[Payload, Payload],
    activation: ActivationSpec,
    options: MoEOptions,
    *,
    biased: bool,
    top_k: int,
) -> tuple[Plan, GivenScales]:
    """Return the plan of one call, and what its layer is called with."""
    gate_up, down = matrices
    experts, _, intermediate, hidden = gate_up.shape
    given = given_scales(
        x,
        options.a1_scale,
        options.a2_scale,
        intermediate_size=intermediate,
        format_name=options.overrides.activation_format,
    )
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        routing=RoutingSpec(top_k=min(top_k, experts), weight_on_input=options.apply_router_weight_on_input),
        activation=activation,
        weight_format=gate_up.name,
        down_format=None if down.name == gate_up.name else down.name,
        expert_bias=biased,
    )
    return plan(_problem(x, top_k, spec, given.activation_format, options), options.overrides), given


def _problem(x: Tensor, top_k: int, spec: MoESpec, format_name: str | None, options: MoEOptions) -> Problem:
    """Return the problem of one call with ``top_k`` ids for each row of x, of which a spec has at most E."""
    dtype = _name_of(options.out_dtype or torch.bfloat16) if x.dtype == torch.float8_e4m3fn else _name_of(x.dtype)
    assignments = max(1, x.shape[:-1].numel() * top_k)
    return Problem(
        spec=spec,
        device=probe(x.device),
        limits=Limits(max_tokens=-(-assignments // spec.routing.top_k)),
        dtype=dtype,
        out_dtype=None if options.out_dtype is None else _name_of(options.out_dtype),
        activation_format=options.overrides.activation_format or format_name,
    )


def _name_of(dtype: torch.dtype) -> Any:
    if dtype not in FLOAT_FORMATS:
        raise InputError(f"moe: out_dtype is {dtype}; allowed: {', '.join(map(str, FLOAT_FORMATS))}")
    return FLOAT_FORMATS[dtype].name


def _check_types(caller: str, **inputs: object) -> None:
    for name, value in inputs.items():
        if not isinstance(value, Tensor | Payload):
            raise InputError(
                f"{caller}: {name} is a {type(value).__name__}; allowed: a tensor, for weights a payload too"
            )


def _check(caller: str, x: Tensor, dimensions: int) -> None:
    if x.dim() != dimensions or x.dtype not in (*FLOAT_FORMATS, torch.float8_e4m3fn):
        allowed = ", ".join(map(str, FLOAT_FORMATS))
        shape = "[T, H]" if dimensions == 2 else "[E, M, H]"
        raise InputError(
            f"{caller}: x is {tuple(x.shape)} {x.dtype}; allowed: {shape} of {allowed}, or float8_e4m3fn with a1_scale"
        )
    refuse_gradient(x=x)


def _check_routing(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        _check_ids(x, tensor, name)
    refuse_gradient(topk_weights=topk_weights)


def _check_ids(x: Tensor, ids: Tensor, name: str) -> None:
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape[1] < 1:
        raise InputError(f"moe: {name} is {tuple(ids.shape)}; allowed: [{x.shape[0]}, K], one row for each of x")


def _local_ids(topk_ids: Tensor, experts: int, options: MoEOptions) -> Tensor:
    """Return ``topk_ids`` as local experts: -1 for those of other ranks, E for an id that is no expert."""
    expert_map, count = options.expert_map, options.global_num_experts
    count = None if count == -1 else count
    if expert_map is None:
        if count not in (None, experts):
            raise InputError(
                f"moe: global_num_experts is {count} and the weights have {experts} experts; pass expert_map, which "
                "tells which of all experts these are"
            )
        return topk_ids
    check_tensors(topk_ids.device, expert_map=expert_map)
    total = expert_map.numel()
    if expert_map.dim() != 1 or expert_map.is_floating_point() or count not in (None, total):
        raise InputError(
            f"moe: expert_map is {tuple(expert_map.shape)} {expert_map.dtype}; allowed: integers "
            f"[{count or 'global_num_experts'}], the local expert of each, or -1"
        )
    # Ids that are no expert of any rank are found without waiting for the device, as in ``parallel/partial.py``.
    table = torch.cat((expert_map.to(torch.int64), expert_map.new_tensor([-1, experts], dtype=torch.int64)))
    ids = topk_ids.to(torch.int64)
    return table[torch.where((ids >= 0) & (ids < total), ids, torch.where(ids == -1, total, total + 1))]


def _output(x: Tensor, options: MoEOptions) -> Tensor | None:
    if not options.inplace:
        return options.out
    dtype = options.out_dtype or x.dtype
    if options.out is not None or x.dtype not in FLOAT_FORMATS or dtype != x.dtype or not x.is_contiguous():
        raise InputError(
            f"moe: inplace with x of {x.dtype}, out_dtype {options.out_dtype} and out "
            f"{'missing' if options.out is None else 'passed'}; allowed: contiguous unquantised x, results of its "
            "dtype, and no out"
        )
    return x


def _payloads(
    gate_up: Payload | Tensor, down: Payload | Tensor, parts: int, options: MoEOptions
) -> tuple[Payload, Payload]:
    """Return gate_up ``[E, P, I, H]`` and down ``[E, H, I]``."""
    first = _with_scales("gate_up", gate_up, parts, (options.w1_scale, options.w1_global_scale), options)
    second = _with_scales("down", down, None, (options.w2_scale, options.w2_global_scale), options)
    return _payload("gate_up", first, parts), _payload("down", second, None)


def _with_scales(
    name: str,
    weight: Payload | Tensor,
    parts: int | None,
    scales: tuple[Tensor | None, Tensor | None],
    options: MoEOptions,
) -> Payload | Tensor:
    """Return raw codes as a payload, other weights unchanged."""
    scale, global_scale = scales
    raw = isinstance(weight, Tensor) and weight.dtype not in FLOAT_FORMATS
    argument = "w1" if name == "gate_up" else "w2"
    if raw and scale is not None:
        assert isinstance(weight, Tensor)
        check_tensors(weight.device, **{f"{argument}_scale": scale})
        try:
            return payload_from_scales(
                weight, scale, global_scale=global_scale, block_shape=options.block_shape, parts=parts
            )
        except InputError as error:
            raise InputError(f"moe: {name}: {error}") from error
    if raw != (scale is not None):
        found = "a payload" if isinstance(weight, Payload) else f"{weight.dtype}"
        raise InputError(
            f"moe: {name} is {found} and {argument}_scale is {'missing' if scale is None else 'passed'}; scales belong "
            "to raw codes, float8_e4m3fn or uint8; a payload contains its scales"
        )
    if global_scale is not None or options.block_shape is not None:
        found = "a payload" if isinstance(weight, Payload) else f"{weight.dtype}"
        unread = f"{argument}_global_scale" if global_scale is not None else f"block_shape {options.block_shape}"
        raise InputError(
            f"moe: {name} is {found} and {unread} was passed; allowed: with raw codes and their scales alone. Leave it "
            "out"
        )
    return weight


def _payload(name: str, weight: Payload | Tensor, parts: int | None) -> Payload:
    """Return ``weight`` as a payload: ``[E, P, I, H]`` for ``parts`` P, ``[E, H, I]`` for None."""
    if not isinstance(weight, Payload):
        refuse_gradient(**{name: weight})
        if parts is not None and weight.dim() == 3 and weight.shape[1] % parts == 0:
            weight = weight.unflatten(1, (parts, -1))
    payload = weight if isinstance(weight, Payload) else as_stored(weight)
    dimensions = 3 if parts is None else 4
    if len(payload.shape) != dimensions or parts not in (None, payload.shape[1]):
        allowed = "[E, H, I]" if parts is None else f"[E, {parts}, I, H], or a tensor [E, {parts} * I, H]"
        raise InputError(f"moe: {name} is {tuple(weight.shape)}; allowed: {allowed}")
    return payload


def _gate_up_bias(bias: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the bias as ``[E, P, I]``."""
    if tuple(bias.shape) not in (shape, (shape[0], shape[1] * shape[2])):
        raise InputError(f"moe: the bias of gate_up is {tuple(bias.shape)}; allowed: {shape}, or its last two in one")
    return bias.reshape(shape)
