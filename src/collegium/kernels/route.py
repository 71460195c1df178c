"""Router logits to expert ids and weights, a token a program.

Scores are evaluated in float64 and rounded once to float32, as ``ops/route.py`` defines them.
"""

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["route_kernel", "widen_kernel"]

_LOWEST = tl.constexpr(-2147483648)  # below the key of every float
# In the order of ``types.SCORE_FUNCTIONS``.
SOFTMAX, TOPK_SOFTMAX, SIGMOID = (tl.constexpr(0), tl.constexpr(1), tl.constexpr(2))
SQRT_SOFTPLUS, SPARSEMIXER = (tl.constexpr(3), tl.constexpr(4))


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
        raised = tl.exp(score64 - tl.max(score64, 0))
        return (raised / tl.sum(raised, 0)).to(tl.float32)
    if SCORE == SIGMOID:
        return (1.0 / (1.0 + tl.exp(-score64))).to(tl.float32)
    # log1p(u) = log(w) * u / (w - 1) with w = 1 + u rounded: the error of w cancels.
    u = tl.exp(-tl.abs(score64))
    w = 1.0 + u
    ratio = tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0))
    return tl.sqrt(tl.maximum(score64, 0.0) + tl.where(w == 1.0, u, ratio)).to(tl.float32)


@triton.jit
def _sparsemixer(logit, left, chosen, jitter):
    """Return the weight of the ``chosen`` lane: a softmax over the logits near its own, of those that are ``left``.

    As ``_sparsemixer`` of ``ops/route.py`` defines it.
    """
    best = tl.sum(tl.where(chosen, logit, 0.0), 0)
    far = tl.div_rn(best - logit, tl.maximum(tl.abs(logit), best)) > 2 * jitter
    near = tl.where(left & ~far, logit, float("-inf")).to(tl.float64)
    raised = tl.exp(near - tl.max(near, 0))
    return (tl.sum(tl.where(chosen, raised, 0.0), 0) / tl.sum(raised, 0)).to(tl.float32)


@triton.jit
def _keep_groups(
    key, basis, valid, groups, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr
):  # fmt: skip
    """Return keys with those outside the KEPT best groups lowered to the key of minus infinity."""
    inner = tl.reshape(tl.where(valid, basis, _LOWEST), [BLOCK_G, BLOCK_S])
    best = tl.max(inner, 1)
    if TOP2:
        place = tl.arange(0, BLOCK_S)[None, :]
        first = tl.min(tl.where(inner == best[:, None], place, BLOCK_S), 1)
        second = tl.max(tl.where(place == first[:, None], _LOWEST, inner), 1)
        # A group of one expert has no second.
        total = _value(best) + tl.where(second == _LOWEST, 0.0, _value(second))
        best = _key(total)
    group = tl.arange(0, BLOCK_G)
    best = tl.where(group < groups, best, _LOWEST)
    selected = group < 0
    for _ in tl.static_range(KEPT):
        best_key = tl.max(best, 0)
        chosen = tl.min(tl.where(best == best_key, group, BLOCK_G), 0)
        selected = selected | (group == chosen)
        best = tl.where(group == chosen, _LOWEST, best)
    inside = tl.reshape(tl.broadcast_to(selected[:, None], [BLOCK_G, BLOCK_S]), [BLOCK_G * BLOCK_S])
    return tl.where(inside, key, _key(tl.full([BLOCK_G * BLOCK_S], float("-inf"), tl.float32)))


@triton.jit(do_not_specialize=["token_stride"], do_not_specialize_on_alignment=["token_ids"])
def route_kernel(
    logits, bias, token_ids, hash_table, expert_scale, ids, weights,
    experts, groups, group_size, vocabulary, logits_stride, bias_stride, token_stride, scale_stride,
    eps, floor, scale, jitter,
    SCORE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    KEPT: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr, HASH: tl.constexpr, EXPERT_SCALE: tl.constexpr,
    RENORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ids ``[T, K]`` and weights ``[T, K]`` float32 of one token: -2 and NaN where scores or bias are NaN.

    BLOCK_G * BLOCK_S lanes hold the experts group by group. KEPT 0: no groups.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_G * BLOCK_S)
    place = lane % BLOCK_S
    expert = (lane // BLOCK_S) * group_size + place
    valid = (place < group_size) & (lane // BLOCK_S < groups)
    raw = tl.load(logits + token * logits_stride + expert, mask=valid, other=0.0).to(tl.float32)
    score = _score(raw, valid, SCORE)
    choice, judged = raw, score
    if BIAS:
        choice = score + tl.load(bias + expert * bias_stride, mask=valid, other=0.0).to(tl.float32)
        judged = choice
    # Whatever is chosen then does not matter.
    poisoned = tl.max((valid & (judged != judged)).to(tl.int32), 0) > 0
    slot = tl.arange(0, BLOCK_K)
    if HASH:
        wanted = tl.load(token_ids + token * token_stride).to(tl.int64)
        known = (wanted >= 0) & (wanted < vocabulary)
        row = tl.where(known, wanted, 0)
        table = tl.load(hash_table + row * TOP_K + slot, mask=slot < TOP_K, other=0).to(tl.int64)
        table = tl.where(known & (table >= -1) & (table < experts), table, -2).to(tl.int32)
    else:
        # A biased score of -inf stays above the -inf of a masked group.
        key = _key(tl.minimum(tl.maximum(choice, -3.4028234663852886e38), 3.4028234663852886e38))
        if KEPT:
            basis = key
            if TOP2 and not BIAS:
                basis = _key(score)
            key = _keep_groups(key, basis, valid, groups, BLOCK_G, BLOCK_S, KEPT, TOP2)
        key = tl.where(valid, key, _LOWEST)
    expert_ids = tl.full([BLOCK_K], -1, tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        if HASH:
            chosen = tl.max(tl.where(slot == k, table, -2), 0)
        else:
            left = key != _LOWEST
            best_key = tl.max(key, 0)
            chosen = tl.min(tl.where(key == best_key, expert, 0x7FFFFFFF), 0)
            key = tl.where(expert == chosen, _LOWEST, key)
        chosen = tl.where(poisoned, -2, chosen)
        expert_ids = tl.where(slot == k, chosen, expert_ids)
        picked = valid & (expert == chosen)
        if SCORE == SPARSEMIXER:
            share = _sparsemixer(raw, left, picked, jitter)
        else:
            share = tl.sum(tl.where(picked, score, 0.0), 0)
        weight = tl.where(slot == k, share, weight)
    if SCORE == TOPK_SOFTMAX:
        weight64 = tl.where(expert_ids >= 0, weight.to(tl.float64), float("-inf"))
        max_weight = tl.max(weight64, 0)
        raised = tl.where(expert_ids >= 0, tl.exp(weight64 - max_weight), 0.0)
        total_raised = tl.sum(raised, 0)
        weight = (raised / tl.where(total_raised == 0.0, 1.0, total_raised)).to(tl.float32)
    if RENORM:
        # Slot order, one add at a time.
        total = tl.sum(tl.where(slot == 0, weight, 0.0), 0)
        for k in tl.static_range(1, TOP_K):
            total = total + tl.sum(tl.where(slot == k, weight, 0.0), 0)
        total = tl.maximum(total + eps, floor, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.where(total == 0.0, 0.0, tl.div_rn(weight, tl.zeros([BLOCK_K], tl.float32) + total))
    weight = weight * scale
    written = slot < TOP_K
    if EXPERT_SCALE:
        at = expert_scale + tl.maximum(expert_ids, 0) * scale_stride
        weight = weight * tl.load(at, mask=written, other=0.0).to(tl.float32)
    tl.store(ids + token * TOP_K + slot, expert_ids.to(ids.dtype.element_ty), mask=written)
    tl.store(weights + token * TOP_K + slot, tl.where(expert_ids < -1, float("nan"), weight), mask=written)


@triton.jit
def widen_kernel(
    ids, weights, wide_ids, wide_weights, experts, ids_stride, weights_stride,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ids ``[T, K + MERGED]`` int64 and weights float32 of one token: those given, then the further experts'.

    Ids that are no expert, and not -1, become -2: a further expert is nobody's to choose.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_K)
    is_routed = slot < TOP_K
    chosen = tl.load(ids + token * ids_stride + slot, mask=is_routed, other=-1).to(tl.int64)
    weight = tl.load(weights + token * weights_stride + slot, mask=is_routed, other=1.0).to(tl.float32)
    chosen = tl.where((chosen >= -1) & (chosen < experts), chosen, -2)
    chosen = tl.where(is_routed, chosen, experts + slot - TOP_K)
    place = token * (TOP_K + MERGED) + slot
    tl.store(wide_ids + place, chosen, mask=slot < TOP_K + MERGED)
    tl.store(wide_weights + place, weight, mask=slot < TOP_K + MERGED)
