"""Router logits to experts: scores, grouped top-k, hash tables and custom callables.

Shape letters: T tokens, K experts per token, E experts. ``docs/routing.md`` states the rules.

Scores are evaluated in float64 and rounded once to float32: the float32 sigmoid of torch gives other bits in
the vector body than in the tail of a tensor, so a row would depend on how many rows are before it.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import InputError, RoutingError
from ..runtime.launch import on_device
from ..runtime.memory import Memory
from ..runtime.packed_module import refuse_gradient
from ..types import Routing, RoutingSpec, ScoreFunction
from .checks import describe, require_input
from .route_device import ID_DTYPES, route_on_device, route_regions

__all__ = ["given_routing", "route", "route_custom", "route_regions"]

_LARGEST = torch.finfo(torch.float32).max
_NO_EXPERT = -2  # an id whose row is NaN; any other out of range but -1 does the same
_ID_BITS = 24  # bits of an expert id in a composite sort key; 32 bits of score are above them
_ID_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


def route(
    logits: Tensor,
    spec: RoutingSpec,
    *,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    hash_table: Tensor | None = None,
    expert_scale: Tensor | None = None,
    checked: bool = False,
    memory: Memory | None = None,
) -> Routing:
    """Choose ``spec.top_k`` experts for each token.

    logits: ``[T, E]``, any floating dtype.
    bias: ``[E]`` correction bias, added for selection only; needed exactly when ``spec.correction_bias`` is
        set and experts are not looked up.
    token_ids: ``[T]`` integers, and hash_table: ``[vocabulary, K]`` integers; needed exactly when
        ``spec.hash_routing`` is set (token_ids alone is ignored otherwise).
    expert_scale: ``[E]``, needed exactly when ``spec.expert_scale`` is set.
    checked: waits for the device and raises on bad values; otherwise a bad row gets ids -2 and weights of NaN, which
        make its output NaN. On a GPU, unchecked routing is one kernel.
    memory: where that kernel takes "topk_ids" and "topk_weights".

    Returns ids of ``spec.id_dtype`` in descending order of the (biased) score, ties to the lower id; a hash table keeps
    its order.
    Raises ``InputError`` for wrong shapes, dtypes or missing arguments in both modes, and, in checked mode,
    ``RoutingError`` for NaN logits, NaN bias, weights that are not finite, and token ids or table entries out of range
    or duplicated.
    """
    _check_logits(logits, spec)
    if spec.hash_routing:
        _check_look_up(logits, spec, bias, token_ids, hash_table)
    else:
        _check_ranking(logits, spec, bias, hash_table)
    experts = logits.shape[1]
    _check_expert_scale(logits, spec, expert_scale)
    if not checked and on_device(logits):
        tensors = {"bias": bias, "token_ids": token_ids, "hash_table": hash_table, "expert_scale": expert_scale}
        return route_on_device(logits, spec, **tensors, memory=memory)
    raw = logits.to(torch.float32)
    scores = _scores(raw, spec.score)
    if spec.hash_routing and token_ids is not None and hash_table is not None:
        ids = _look_up(token_ids, hash_table, checked=checked)
        ranked = scores
        if checked:
            _refuse_bad_ids(ids, experts)
        ids = ids.masked_fill((ids < -1) | (ids >= experts), _NO_EXPERT)
    else:
        choice = _choice(raw, scores, bias, checked=checked)
        ids = _select(choice, scores, spec)
        ranked = scores if bias is None else choice
    ids = ids.masked_fill(ranked.isnan().any(dim=1, keepdim=True), _NO_EXPERT)
    weights = _weights(raw, scores, ids, spec)
    routing = Routing(topk_ids=ids.to(ID_DTYPES[spec.id_dtype]), topk_weights=weights)
    routing = _apply_expert_scale(routing, expert_scale)
    if checked:
        _refuse_bad_rows(~routing.topk_weights.isfinite().all(dim=1))
    return routing


def route_custom(
    fn: Callable[[Tensor, Any, int], tuple[Tensor, Tensor] | Routing],
    x: Tensor,
    logits: Tensor | None,
    spec: RoutingSpec,
    *,
    num_experts: int | None = None,
    checked: bool = False,
) -> Routing:
    """Let ``fn(x, logits, top_k) -> (topk_ids, topk_weights)`` choose the experts, and validate its choice.

    x: ``[T, D]``, logits: ``[T, E]``, or None with num_experts, E. Both results must be ``[T, K]``, ids integers and
    weights floating, or in a ``Routing``. The weights are taken as returned: the score function, renormalisation and
    scale of ``spec`` are not applied to them. Validation is ``given_routing``. Raises InputError for results in another
    order, of other shapes and dtypes, on another device, and where they require a gradient.
    """
    if logits is not None:
        _check_logits(logits, spec)
        num_experts = logits.shape[1]
    rows = x.shape[0] if logits is None else logits.shape[0]
    if x.dim() != 2 or x.shape[0] != rows:
        raise InputError(f"route_custom: x is {describe(x)}, allowed: [{rows}, D], a row for each token")
    ids, weights = _pair(cast("Any", fn(x, logits, spec.top_k)))
    if ids.is_floating_point() and not weights.is_floating_point():
        raise InputError(
            f"route_custom: the callable, choose returned ({describe(ids)}, {describe(weights)}), weights first; "
            "it must return (topk_ids, topk_weights) in this order, integers first"
        )
    if logits is None:
        _check_device("topk_ids that choose returned", ids, x, "the tokens")
    else:
        _check_device("topk_ids that choose returned", ids, logits, "the logits")
    shape = (rows, spec.top_k)
    if tuple(ids.shape) != shape:
        raise InputError(
            f"route_custom: the callable returned topk_ids {describe(ids)}, allowed: shape {shape} "
            "(T, top_k); it must return (topk_ids, topk_weights) in this order"
        )
    refuse_gradient(topk_weights=weights)
    return given_routing(ids, weights, cast("int", num_experts), checked=checked)


def _pair(chosen: Any) -> tuple[Tensor, Tensor]:
    """Return the ids and weights that a callable returned; raises InputError for anything but two tensors."""
    if isinstance(chosen, Routing):
        return chosen.topk_ids, chosen.topk_weights
    results: Any = chosen if isinstance(chosen, tuple | list) else ()
    if len(results) != 2 or not all(isinstance(tensor, Tensor) for tensor in results):
        raise InputError(
            f"route_custom: the callable, choose returned a {type(chosen).__name__}; allowed: two tensors, "
            "(topk_ids, topk_weights), or a Routing"
        )
    return results[0], results[1]


def given_routing(topk_ids: Tensor, topk_weights: Tensor, num_experts: int, *, checked: bool = False) -> Routing:
    """Return ``topk_ids [T, K]`` (integers) and ``topk_weights [T, K]`` (floating) from outside as a ``Routing``.

    An id of -1 means "not here", whatever its weight is. Any other outside ``0..num_experts-1``, an id that is in
    an earlier slot of its row, and a weight that is not finite in float32 raise ``RoutingError`` when checked.
    Otherwise nothing is read: the output of a token with an id that is no expert becomes NaN, a repeated expert is
    added twice, and weights multiply as they are.
    Raises ``InputError`` for wrong shapes and dtypes in both modes.
    """
    if topk_ids.is_floating_point() and not topk_weights.is_floating_point():
        raise InputError(
            f"topk_ids is {describe(topk_ids)} and topk_weights {describe(topk_weights)}: they are swapped; the "
            "order is (topk_ids, topk_weights) everywhere, integers first"
        )
    _check_ids("topk_ids", topk_ids, 2)
    _check_device("topk_weights", topk_weights, topk_ids, "topk_ids")
    valid = topk_weights.shape == topk_ids.shape and topk_weights.is_floating_point()
    allowed = f"a floating dtype and the shape of topk_ids {tuple(topk_ids.shape)}"
    require_input(valid, "topk_weights", topk_weights, allowed)
    require_input(num_experts >= 1, "num_experts", num_experts, "at least 1")
    if checked:
        ids = topk_ids.to(torch.int64)
        _refuse_bad_ids(ids, num_experts)
        unusable = (ids >= 0) & ~topk_weights.to(torch.float32).isfinite()
        _refuse_slots(unusable, topk_weights, "topk_weights", "a finite float32 number")
    return Routing(topk_ids=topk_ids, topk_weights=topk_weights)


def _apply_expert_scale(chosen: Routing, expert_scale: Tensor | None) -> Routing:
    """Multiply each weight by the factor of its expert, in place."""
    if expert_scale is not None:
        chosen.topk_weights.mul_(expert_scale.to(torch.float32)[chosen.topk_ids.clamp(min=0)])
    return chosen


def _scores(logits: Tensor, score: ScoreFunction) -> Tensor:
    """Score every expert, ``[T, E]`` float32; for topk_softmax the logits, normalised after top-k."""
    if score in ("topk_softmax", "sparsemixer"):
        return logits
    exact = logits.to(torch.float64)
    if score == "softmax":
        return torch.softmax(exact, dim=1).to(torch.float32)
    if score == "sigmoid":
        return torch.sigmoid(exact).to(torch.float32)
    # softplus written so that neither exp nor log1p overflows or cancels for any finite x.
    softplus = exact.clamp(min=0.0) + torch.log1p(torch.exp(-exact.abs()))
    return softplus.sqrt().to(torch.float32)


def _choice(logits: Tensor, scores: Tensor, bias: Tensor | None, *, checked: bool) -> Tensor:
    """Return the values experts are ranked by, ``[T, E]`` float32: in the finite range, or NaN.

    Every score function rises with the logit, so without a bias the logits rank the experts exactly, where
    rounded scores would tie (a float32 sigmoid is 1 for every logit above 17).
    """
    # The clamp keeps -inf above the -inf of a masked group.
    if bias is None:
        return logits.clamp(-_LARGEST, _LARGEST)
    correction = bias.to(torch.float32)
    if checked and bool(correction.isnan().any()):
        first = int(correction.isnan().nonzero()[0, 0])
        experts = logits.shape[1]
        raise RoutingError(f"correction bias: expert {first} of {experts} is NaN, allowed: numbers; reload the router")
    return (scores + correction).clamp(-_LARGEST, _LARGEST)


def _check_ranking(logits: Tensor, spec: RoutingSpec, bias: Tensor | None, hash_table: Tensor | None) -> None:
    for name, tensor, option in (("hash_table", hash_table, "hash_routing"), ("bias", bias, "correction_bias")):
        if tensor is not None and not getattr(spec, option):
            raise InputError(
                f"route: found a {name} {describe(tensor)}, but spec.{option} is False; pass {name}=None or a "
                f"RoutingSpec with {option}=True"
            )
    if not spec.correction_bias:
        return
    experts = logits.shape[1]
    if bias is None or tuple(bias.shape) != (experts,) or not bias.is_floating_point():
        raise InputError(
            f"route: spec.correction_bias needs a floating bias of shape ({experts},) [E], found {describe(bias)}; "
            "pass the router's correction bias"
        )
    _check_device("bias", bias, logits)


def _select(choice: Tensor, scores: Tensor, spec: RoutingSpec) -> Tensor:
    """Grouped top-k over ``choice [T, E]``: ids ``[T, K]`` int64."""
    tokens, experts = choice.shape
    if spec.groups > 1:
        size = experts // spec.groups
        # A sum of two needs scores; a maximum may rank by whatever ranks the experts.
        summed = spec.group_score == "top2_sum"
        basis = scores if summed and not spec.correction_bias else choice
        grouped = basis.view(tokens, spec.groups, size)
        best = grouped.topk(min(2, size) if summed else 1, dim=2).values.sum(dim=2)
        best_groups = _top(best, spec.topk_groups)
        masked = torch.ones_like(best, dtype=torch.bool).scatter(1, best_groups, False)
        choice = choice.view(tokens, spec.groups, size).masked_fill(masked.unsqueeze(2), -torch.inf)
        choice = choice.view(tokens, experts)
    return _top(choice, spec.top_k)


def _top(values: Tensor, count: int) -> Tensor:
    """Return positions of the ``count`` largest of ``values [T, N]`` float32, descending, ties lower first.

    ``torch.topk`` promises nothing about ties, so each value is packed with its position into one int64 that
    is unique in its row: the float's bits in an order-preserving form above, the reversed position below.
    """
    # Adding +0 turns -0 into +0: the two compare equal but differ in bits.
    bits = (values + 0.0).contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = (1 << _ID_BITS) - 1
    reversed_ids = last - torch.arange(values.shape[1], device=values.device)
    keys = (ordered.to(torch.int64) << _ID_BITS) | reversed_ids
    return last - (keys.topk(count, dim=1).values & last)


def _weights(logits: Tensor, scores: Tensor, ids: Tensor, spec: RoutingSpec) -> Tensor:
    """Weights ``[T, K]`` float32 of the chosen experts, from unbiased scores; 0 for an id of -1, NaN for -2."""
    dropped = ids < 0
    safe = ids.clamp(min=0)
    if spec.score == "topk_softmax":
        picked = logits.gather(1, safe).to(torch.float64).masked_fill(dropped, -torch.inf)
        weights = torch.softmax(picked, dim=1).to(torch.float32)
    elif spec.score == "sparsemixer":
        weights = _sparsemixer(logits, safe, spec.jitter)
    else:
        weights = scores.gather(1, safe)
    weights = weights.masked_fill(dropped, 0.0)
    if spec.renormalize:
        # Slot order, one add at a time: the order of a library sum may depend on the shape.
        total = weights[:, 0]
        for k in range(1, weights.shape[1]):
            total = total + weights[:, k]
        total = (total + spec.renormalize_eps).clamp(min=spec.renormalize_floor).unsqueeze(1)
        weights = (weights / total).masked_fill(total == 0, 0.0)
    return (weights * spec.scale).masked_fill(ids == _NO_EXPERT, torch.nan)


def _sparsemixer(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Weights ``[T, 2]`` of the two best: each a softmax over the logits near the best of those left.

    A logit s is near the best b when ``(b - s) / max(|s|, b) <= 2 * jitter`` (Liu et al., 2023, as Phi-3.5-MoE
    evaluates it).
    """
    left = logits
    weights: list[Tensor] = []
    for chosen in ids.unbind(1):
        best = left.gather(1, chosen[:, None])
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        near = left.masked_fill(far, -torch.inf).to(torch.float64)
        weights.append(torch.softmax(near, dim=1).gather(1, chosen[:, None]))
        left = left.scatter(1, chosen[:, None], -torch.inf)
    return torch.cat(weights, dim=1).to(torch.float32)


def _check_expert_scale(logits: Tensor, spec: RoutingSpec, expert_scale: Tensor | None) -> None:
    shape = None if expert_scale is None else tuple(expert_scale.shape)
    needed = (logits.shape[1],)
    if shape != (needed if spec.expert_scale else None):
        raise InputError(
            f"route: expert_scale is {describe(expert_scale)}, spec.expert_scale={spec.expert_scale} needs {needed}"
        )
    if expert_scale is not None:
        _check_device("expert_scale", expert_scale, logits)


def _check_look_up(
    logits: Tensor, spec: RoutingSpec, bias: Tensor | None, token_ids: Tensor | None, hash_table: Tensor | None
) -> None:
    if bias is not None:
        raise InputError(
            f"route: found a bias {describe(bias)} with hash routing, which looks experts up and ranks "
            "nothing; pass bias=None"
        )
    if token_ids is None or hash_table is None:
        missing = "token_ids" if token_ids is None else "hash_table"
        raise InputError(
            f"route: spec.hash_routing needs token_ids [T] and hash_table [vocabulary, K], {missing} is None; pass both"
        )
    tokens = logits.shape[0]
    _check_ids("token_ids", token_ids, 1)
    _check_ids("hash_table", hash_table, 2)
    valid = token_ids.shape[0] == tokens
    require_input(valid, "token_ids", token_ids, f"shape ({tokens},), one for each logits row")
    valid = hash_table.shape[1] == spec.top_k and hash_table.shape[0] >= 1
    require_input(valid, "hash_table", hash_table, f"[vocabulary >= 1, top_k={spec.top_k}]")
    _check_device("token_ids", token_ids, logits)
    _check_device("hash_table", hash_table, logits)


def _look_up(token_ids: Tensor, hash_table: Tensor, *, checked: bool) -> Tensor:
    """Return ``hash_table[token_ids]``, ``[T, K]`` int64, with -2 for token ids outside the table."""
    vocabulary = hash_table.shape[0]
    ids = token_ids.to(torch.int64)
    outside = (ids < 0) | (ids >= vocabulary)
    if checked and bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise RoutingError(
            f"token_ids: token {row} is {int(ids[row])}, allowed: 0 to {vocabulary - 1} (rows of the hash "
            "table); pass the ids of the tokens the logits were computed for"
        )
    # torch has few operations for uint16 and uint32, index_select is not among them.
    table = hash_table.to(torch.int64) if hash_table.dtype in (torch.uint16, torch.uint32) else hash_table
    rows = table.index_select(0, ids.clamp(0, vocabulary - 1)).to(torch.int64)
    return rows.masked_fill(outside.unsqueeze(1), _NO_EXPERT)


def _refuse_bad_ids(ids: Tensor, experts: int) -> None:
    """Raise for ids ``[T, K]`` outside ``-1..experts-1`` and for repeated ids of a row."""
    outside = (ids < -1) | (ids >= experts)
    _refuse_slots(outside, ids, "topk_ids", f"0 to {experts - 1}, or -1 for not here")
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (ids >= 0).unsqueeze(2)
    repeated = same.tril(-1).any(dim=2)
    _refuse_slots(repeated, ids, "topk_ids", "each id once in a row, this one is also in an earlier slot")


def _refuse_bad_rows(bad: Tensor) -> None:
    if bool(bad.any()):
        rows = bad.nonzero()
        raise RoutingError(
            f"router logits: token {int(rows[0, 0])} is the first of {rows.shape[0]} of {bad.shape[0]} "
            "whose row holds NaN, or infinities or an expert_scale that give no finite weight, allowed: numbers; "
            "find the layer that produced it, or make the output of such rows NaN with checked=False"
        )


def _refuse_slots(bad: Tensor, values: Tensor, what: str, allowed: str) -> None:
    if bool(bad.any()):
        token, slot = (int(i) for i in bad.nonzero()[0])
        raise RoutingError(
            f"{what}: token {token}, slot {slot} is {values[token, slot].item()}, allowed: {allowed}; "
            "correct the router, or use checked=False to see it in the output"
        )


def _check_logits(logits: Tensor, spec: RoutingSpec) -> None:
    valid = logits.dim() == 2 and logits.is_floating_point()
    require_input(valid, "router logits", logits, "[T, E] of a floating dtype")
    experts = logits.shape[1]
    if not spec.top_k <= experts < 1 << _ID_BITS:
        max_experts = (1 << _ID_BITS) - 1
        raise InputError(f"router logits: found {experts} experts, allowed: top_k={spec.top_k} to {max_experts}")
    if experts % spec.groups or spec.top_k > spec.topk_groups * (experts // spec.groups):
        raise InputError(
            f"router logits: found {experts} experts, allowed: a multiple of groups={spec.groups} whose "
            f"{spec.topk_groups} selected groups hold at least top_k={spec.top_k} experts"
        )


def _check_ids(name: str, ids: Tensor, dims: int) -> None:
    valid = ids.dim() == dims and ids.dtype in _ID_DTYPES
    require_input(valid, name, ids, f"{dims} dimensions of int8 to int64 or uint8 to uint32")


def _check_device(name: str, tensor: Tensor, other: Tensor, what: str = "the logits") -> None:
    if tensor.device != other.device:
        raise InputError(f"{name}: found on {tensor.device}, allowed: {other.device}, where {what} are; move it there")
