"""Router logits to expert ids and weights; a program computes one token.

Scores are evaluated in float64 and rounded once to float32, as ``ops/route.py`` defines them. ``None`` stands for an
optional input that is absent. Shape letters: T tokens, K experts per token, E experts, N lanes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["route_kernel", "widen_kernel"]

_LOWEST = tl.constexpr(-2147483648)  # below the key of every float
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# In the order of ``types.SCORE_FUNCTIONS``.
SOFTMAX, TOPK_SOFTMAX, SIGMOID = (tl.constexpr(0), tl.constexpr(1), tl.constexpr(2))
SQRT_SOFTPLUS, SPARSEMIXER = (tl.constexpr(3), tl.constexpr(4))


class _Lanes(NamedTuple):
    """The experts of a token ``[N]``, group by group: each group has a power of two lanes, of which some are unused."""

    expert: Any
    valid: Any
    logit: Any
    score: Any


@triton.jit
def _key(value):
    """Return int32 keys that order like the floats; the two zeros have one key."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _score(logit, valid, SCORE: tl.constexpr):
    """Score logits ``[N]``; for topk_softmax and sparsemixer the logits, weighted after the choice."""
    if SCORE == TOPK_SOFTMAX or SCORE == SPARSEMIXER:
        return logit
    score64 = logit.to(tl.float64)
    if SCORE == SOFTMAX:
        score64 = tl.where(valid, score64, float("-inf"))
        exponential = tl.exp(score64 - tl.max(score64, 0))
        return (exponential / tl.sum(exponential, 0)).to(tl.float32)
    if SCORE == SIGMOID:
        return (1.0 / (1.0 + tl.exp(-score64))).to(tl.float32)
    # log1p(u) = log(w) * u / (w - 1) with w = 1 + u rounded: the error of w cancels.
    u = tl.exp(-tl.abs(score64))
    w = 1.0 + u
    ratio = tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0))
    return tl.sqrt(tl.maximum(score64, 0.0) + tl.where(w == 1.0, u, ratio)).to(tl.float32)


@triton.jit
def _sparsemixer(logit, remaining, chosen, jitter):
    """Return the weight of the ``chosen`` lane: a softmax over the ``remaining`` logits that are close to its logit.

    As ``_sparsemixer`` of ``ops/route.py`` defines it.
    """
    best = tl.sum(tl.where(chosen, logit, 0.0), 0)
    distant = tl.div_rn(best - logit, tl.maximum(tl.abs(logit), best)) > 2 * jitter
    close = tl.where(remaining & ~distant, logit, float("-inf")).to(tl.float64)
    exponential = tl.exp(close - tl.max(close, 0))
    return (tl.sum(tl.where(chosen, exponential, 0.0), 0) / tl.sum(exponential, 0)).to(tl.float32)


@triton.jit
def _mask_groups(key, group_key, valid, groups, GROUPS: tl.constexpr):
    """Return keys with those outside the ``GROUPS.top`` best groups lowered to the key of minus infinity.

    group_key: keys that groups are compared by.
    """
    BLOCK_G: tl.constexpr = GROUPS.block_g
    BLOCK_S: tl.constexpr = GROUPS.block_s
    TOP: tl.constexpr = GROUPS.top
    by_group = tl.reshape(tl.where(valid, group_key, _LOWEST), [BLOCK_G, BLOCK_S])
    best = tl.max(by_group, 1)
    if GROUPS.top2_sum:
        position = tl.arange(0, BLOCK_S)[None, :]
        first = tl.min(tl.where(by_group == best[:, None], position, BLOCK_S), 1)
        second = tl.max(tl.where(position == first[:, None], _LOWEST, by_group), 1)
        # A group of one expert has no second.
        total = _value(best) + tl.where(second == _LOWEST, 0.0, _value(second))
        best = _key(total)
    group = tl.arange(0, BLOCK_G)
    best = tl.where(group < groups, best, _LOWEST)
    selected = group < 0
    for _ in tl.static_range(TOP):
        best_key = tl.max(best, 0)
        chosen = tl.min(tl.where(best == best_key, group, BLOCK_G), 0)
        selected = selected | (group == chosen)
        best = tl.where(group == chosen, _LOWEST, best)
    inside = tl.reshape(tl.broadcast_to(selected[:, None], [BLOCK_G, BLOCK_S]), [BLOCK_G * BLOCK_S])
    return tl.where(inside, key, _key(tl.full([BLOCK_G * BLOCK_S], float("-inf"), tl.float32)))


@triton.jit
def _choice_keys(choice, lanes: _Lanes, HAS_BIAS: tl.constexpr, groups, GROUPS: tl.constexpr):
    """Return int32 keys ``[N]`` that order experts by ``choice``; _LOWEST for lanes without an expert."""
    # A biased score of -inf stays above the -inf of a masked group.
    key = _key(tl.minimum(tl.maximum(choice, -_FLOAT32_MAX), _FLOAT32_MAX))
    if GROUPS.top:
        group_key = key
        if GROUPS.top2_sum and not HAS_BIAS:
            group_key = _key(lanes.score)
        key = _mask_groups(key, group_key, lanes.valid, groups, GROUPS)
    return tl.where(lanes.valid, key, _LOWEST)


@triton.jit
def _look_up(hash_table, token_id, slot, experts, vocabulary, TOP_K: tl.constexpr):
    """Return the experts of a token id in ``hash_table [vocabulary, TOP_K]``, -2 where there is none."""
    known = (token_id >= 0) & (token_id < vocabulary)
    row = tl.where(known, token_id, 0)
    expert = tl.load(hash_table + row * TOP_K + slot, mask=slot < TOP_K, other=0).to(tl.int64)
    return tl.where(known & (expert >= -1) & (expert < experts), expert, -2).to(tl.int32)


@triton.jit
def _softmax_of_slots(weight, expert_ids):
    """Return the softmax of ``weight`` over the slots with an expert, computed in float64, 0 in other slots."""
    weight64 = tl.where(expert_ids >= 0, weight.to(tl.float64), float("-inf"))
    max_weight = tl.max(weight64, 0)
    exponential = tl.where(expert_ids >= 0, tl.exp(weight64 - max_weight), 0.0)
    total = tl.sum(exponential, 0)
    return (exponential / tl.where(total == 0.0, 1.0, total)).to(tl.float32)


@triton.jit
def _renormalize(weight, slot, eps, floor, TOP_K: tl.constexpr):
    """Return weights divided by their sum plus ``eps``, at least ``floor``; added in the order of slots."""
    BLOCK_K: tl.constexpr = weight.shape[0]
    total = tl.sum(tl.where(slot == 0, weight, 0.0), 0)
    for k in tl.static_range(1, TOP_K):
        total = total + tl.sum(tl.where(slot == k, weight, 0.0), 0)
    total = tl.maximum(total + eps, floor, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(total == 0.0, 0.0, tl.div_rn(weight, tl.zeros([BLOCK_K], tl.float32) + total))


@triton.jit
def _choose(lanes: _Lanes, key, table_ids, has_nan, jitter, ROUTING: tl.constexpr):
    """Return the ids and weights of the slots ``[BLOCK_K]``: the highest keys in order, or the ids of a hash table.

    table_ids: None where keys decide; otherwise keys are not used. Of equal keys the expert with the lowest id comes
    first. has_nan: every id is -2.
    """
    TOP_K: tl.constexpr = ROUTING.top_k
    BLOCK_K: tl.constexpr = ROUTING.block_k
    slot = tl.arange(0, BLOCK_K)
    expert_ids = tl.full([BLOCK_K], -1, tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        if table_ids is not None:
            chosen = tl.max(tl.where(slot == k, table_ids, -2), 0)
        else:
            remaining = key != _LOWEST
            best_key = tl.max(key, 0)
            chosen = tl.min(tl.where(key == best_key, lanes.expert, 0x7FFFFFFF), 0)
            key = tl.where(lanes.expert == chosen, _LOWEST, key)
        chosen = tl.where(has_nan, -2, chosen)
        expert_ids = tl.where(slot == k, chosen, expert_ids)
        is_chosen = lanes.valid & (lanes.expert == chosen)
        if ROUTING.score == SPARSEMIXER:
            slot_weight = _sparsemixer(lanes.logit, remaining, is_chosen, jitter)
        else:
            slot_weight = tl.sum(tl.where(is_chosen, lanes.score, 0.0), 0)
        weight = tl.where(slot == k, slot_weight, weight)
    return expert_ids, weight


@triton.jit(do_not_specialize=["token_stride"], do_not_specialize_on_alignment=["token_ids"])
def route_kernel(
    logits,
    bias,
    token_ids,
    hash_table,
    expert_scale,
    ids,
    weights,
    experts,
    groups,
    group_size,
    vocabulary,
    logits_stride,
    bias_stride,
    token_stride,
    scale_stride,
    eps,
    floor,
    scale,
    jitter,
    ROUTING: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ids ``[T, K]`` and weights ``[T, K]`` float32 of one token: -2 and NaN where a score or bias is NaN.

    logits: ``[T, E]``. bias, expert_scale: ``[E]``. token_ids: integers ``[T]``, and hash_table
    ``[vocabulary, K]``, both or neither: the table then chooses. experts: E, in ``groups`` groups of ``group_size``.
    eps, floor, scale, jitter: as in ``RoutingSpec``. ROUTING: a ``RoutingFormat``; GROUPS: ``ExpertGroups``.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, GROUPS.block_g * GROUPS.block_s)
    position = lane % GROUPS.block_s
    expert = (lane // GROUPS.block_s) * group_size + position
    valid = (position < group_size) & (lane // GROUPS.block_s < groups)
    logit = tl.load(logits + token * logits_stride + expert, mask=valid, other=0.0).to(tl.float32)
    score = _score(logit, valid, ROUTING.score)
    lanes = _Lanes(expert=expert, valid=valid, logit=logit, score=score)
    # Without a bias, experts are chosen by their logits, which order them as the scores do.
    choice = logit
    checked = score
    if bias is not None:
        choice = score + tl.load(bias + expert * bias_stride, mask=valid, other=0.0).to(tl.float32)
        checked = choice
    # With a NaN the choice does not matter.
    has_nan = tl.max((valid & (checked != checked)).to(tl.int32), 0) > 0
    slot = tl.arange(0, ROUTING.block_k)
    if hash_table is not None:
        token_id = tl.load(token_ids + token * token_stride).to(tl.int64)
        table_ids = _look_up(hash_table, token_id, slot, experts, vocabulary, ROUTING.top_k)
        expert_ids, weight = _choose(lanes, None, table_ids, has_nan, jitter, ROUTING)
    else:
        key = _choice_keys(choice, lanes, bias is not None, groups, GROUPS)
        expert_ids, weight = _choose(lanes, key, None, has_nan, jitter, ROUTING)
    if ROUTING.score == TOPK_SOFTMAX:
        weight = _softmax_of_slots(weight, expert_ids)
    if ROUTING.renormalize:
        weight = _renormalize(weight, slot, eps, floor, ROUTING.top_k)
    weight = weight * scale
    inside = slot < ROUTING.top_k
    if expert_scale is not None:
        pointers = expert_scale + tl.maximum(expert_ids, 0) * scale_stride
        weight = weight * tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(ids + token * ROUTING.top_k + slot, expert_ids.to(ids.dtype.element_ty), mask=inside)
    tl.store(weights + token * ROUTING.top_k + slot, tl.where(expert_ids < -1, float("nan"), weight), mask=inside)


@triton.jit
def widen_kernel(
    ids,
    weights,
    out_ids,
    out_weights,
    experts,
    ids_stride,
    weights_stride,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Append the SHARED experts to the routing of one token: out_ids ``[T, K + SHARED]`` int64, out_weights float32.

    ids, weights: ``[T, K]``. Their ids are ``experts`` and following, and their weight is 1. Ids that are no routed
    expert, and not -1, become -2: the router cannot choose a shared expert.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_K)
    is_routed = slot < TOP_K
    expert_id = tl.load(ids + token * ids_stride + slot, mask=is_routed, other=-1).to(tl.int64)
    weight = tl.load(weights + token * weights_stride + slot, mask=is_routed, other=1.0).to(tl.float32)
    expert_id = tl.where((expert_id >= -1) & (expert_id < experts), expert_id, -2)
    expert_id = tl.where(is_routed, expert_id, experts + slot - TOP_K)
    offset = token * (TOP_K + SHARED) + slot
    tl.store(out_ids + offset, expert_id, mask=slot < TOP_K + SHARED)
    tl.store(out_weights + offset, weight, mask=slot < TOP_K + SHARED)
