"""The list of mutants: known kinds of mistakes, each with where it is made and which tests may see it."""

from __future__ import annotations

from typing import NamedTuple

from mutant_edits import Edit

__all__ = ["GPU_MUTANTS", "MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """One mistake: what is wrong, in which file below src/collegium, its edits, and who may see it.

    tests: pytest arguments, likeliest first.
    """

    name: str
    file: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


_HOST = ("tests/cpu/test_activation.py", "tests/cpu/test_layer.py")
_CPU = ("tests/cpu/test_cpu_grouped.py", "tests/cpu/test_verify.py")
_LOAD = ("tests/cpu/test_loader.py",)
_STATIC = ("tests/cpu/test_static_scales.py",)
_NVFP4 = "tests/cpu/test_nvfp4_activations.py"
_CALIBRATE = ("tests/cpu/test_calibrate.py",)
_WHOLE_GGUF = ("tests/cpu/test_whole_gguf.py",)
_KERNEL = tuple(
    f"tests/cpu/test_grouped_gemm.py::{name}"
    for name in (
        "test_experts_against_the_reference",
        "test_every_activation",
        "test_int4_groups_and_scale_dtypes",
        "test_zero_points_for_every_integer_layout",
    )
)
_BLOCKS = tuple(
    f"tests/cpu/test_grouped_gemm.py::test_{name}"
    for name in ("every_gguf_kind_and_row_dtype", "halves_and_sums_of_partial_columns")
)
_ORDERS = ("tests/cpu/test_grouped_gemm.py::test_gathered_columns_follow_the_rows_expert",)
_LARGE = ("tests/cpu/test_expanded.py",)
_ACTS = ("tests/cpu/test_grouped_gemm.py::test_every_activation",)
_LAYER = ("tests/cpu/test_layer.py",)
_ROUTE = ("tests/cpu/test_route.py",)
_LINEAR = ("tests/cpu/test_linear.py",)
_FORMAT = ("tests/cpu/test_formats_examples.py", "tests/cpu/test_formats.py", "tests/cpu/test_formats_agreement.py")
_WRITE = ("tests/cpu/test_conversion.py::test_what_is_written_loads_back",)
_STACK = ("tests/cpu/test_conversion.py::test_stacked_families_stay_stacked",)
_GPU = ("tests/gpu/test_experts.py",)
_GPU_FOUR = ("tests/gpu/test_w4a8.py",)
_GPU_LARGE = ("tests/gpu/test_prefill.py", "tests/gpu/test_expanded.py")
_W4_PREFILL = ("tests/cpu/test_w4_prefill.py",)
_W4_RECIPES = ("tests/cpu/test_w4_prefill_recipes.py",)
_PREFILL = ("tests/cpu/test_prefill_products.py", "tests/cpu/test_prefill.py")
_GPU_SMALL = ("tests/gpu/test_small_kernels.py", "tests/gpu/test_layer.py")
_GPU_NVFP4 = "tests/gpu/test_nvfp4_activations.py"
_GPU_BESIDE = ("tests/gpu/test_layer.py::test_gpu_shared_expert_on_side_stream",)
_GPU_CLOSE = ("tests/gpu/test_direct.py",)
_SMALL = ("tests/cpu/test_small_kernels.py",)
_FOUR = ("tests/cpu/test_w4a8.py",)
_DIRECT = ("tests/cpu/test_direct.py",)
_ADAPTED = ("tests/cpu/test_low_rank.py::test_mixed_adapters_match_merged_weights[bf16-None-bf16-0.015]",)
_ADAPTED_FOUR = ("tests/cpu/test_low_rank.py::test_mixed_adapters_match_merged_weights[mxfp4-fp8_token-bf16-0.06]",)
_ADAPTED_TILES = ("tests/cpu/test_low_rank.py::test_hot_and_empty_experts",)
_ADAPTERS = ("tests/cpu/test_expert_adapters.py",)
_FUSED = ("tests/cpu/test_cpu_fused.py",)
_NAN = ("tests/cpu/test_nan.py",)
_RANKS = ("tests/cpu/test_all_to_all.py",)
_MICROBATCHES = ("tests/cpu/test_microbatches.py",)
_LAYER_CHECK = ("tests/cpu/test_layer_check.py",)
_MEGA = ("tests/cpu/test_mega.py::test_passes_equal_one_rank_bitwise",)
_MEGA_FULL = ("tests/cpu/test_mega.py::test_full_passes_equal_one_rank",)
_MEGA_LOST = ("tests/cpu/test_mega.py::test_absent_ranks_are_named",)
_REDUCED = ("tests/cpu/test_reduced.py",)
_MOVE = ("tests/cpu/test_mover.py::test_packed_formats_move_bit_exactly",)
_ROUNDS = ("tests/cpu/test_mover.py::test_rounds_reach_any_placement_without_loss",)
_BUILDER = ("tests/cpu/test_layer_builder.py",)
_GGUF = ("tests/cpu/test_gguf.py",)
_DERIVED = ("tests/cpu/test_derived.py",)
_MIDDLE = ("tests/cpu/test_middle_scales.py",)
_LOW_BITS = ("tests/cpu/test_low_bits.py",)
_PAGING = ("tests/cpu/test_paging.py", "tests/cpu/test_paged_layers.py")
_SUM = ("tests/cpu/test_mover.py::test_checksum_tracks_position_across_chunks",)

MUTANTS: tuple[Mutant, ...] = (
    # Gate and up swapped.
    Mutant(
        "gate and up swapped", "ops/activation.py",
        (Edit("_formula", "_gated($wide[:, 0], $wide[:, 1], $spec)", "_gated($wide[:, 1], $wide[:, 0], $spec)"),), _HOST,
    ),
    Mutant(
        "gate and up swapped", "experts/cpu/grouped.py",
        (Edit("fast_activate", "$gate, $up = $inner.chunk(2, dim=-1)", "$up, $gate = $inner.chunk(2, dim=-1)"),), _CPU,
    ),
    Mutant(
        "gate and up swapped", "kernels/grouped_gemm.py",
        (Edit(
            "grouped_tile",
            "activate($gate if $PROJ.count == 2 else $up, $up, $bounds, $PROJ)",
            "activate($up, $gate if $PROJ.count == 2 else $up, $bounds, $PROJ)",
        ),), _KERNEL,
    ),
    Mutant(
        "gate and up swapped on loading", "checkpoint/loader.py",
        (Edit(
            "_read_payloads",
            "$made[$field][$slot].put($half, $matrix)",
            "$made[$field][$slot].put(layer.spec.gate_up_parts - 1 - $half, $matrix)",
        ),), _LOAD,
    ),
    Mutant(
        "interleaved rows: odd is gate", "checkpoint/layout.py",
        (Edit("source_of", "($half, 2)", "(1 - $half, 2)"),), _LOAD,
    ),
    Mutant(
        "gate and up swapped on writing", "commands/quantize.py",
        (Edit(
            "_encode",
            "($payloads, ($error / $norm) ** 0.5 if $norm else 0.0)",
            "((*$payloads[-2::-1], $payloads[-1]), ($error / $norm) ** 0.5 if $norm else 0.0)",
        ),), _WRITE,
    ),
    # Identity, threads and refusals of a layer.
    Mutant(
        "a workspace lent twice", "runtime/memory.py",
        (Edit("Workspaces.acquire", "$free.pop()", "$free[-1]"),), ("tests/cpu/test_workspace.py",),
    ),
    Mutant(
        "a copy keeps its original's identity", "runtime/packed_module.py",
        (Edit(
            "PackedModule._state",
            "{$name: $tensor for $name, $tensor in self._buffers.items() if $name != 'handle'}",
            "{$name: $tensor for $name, $tensor in self._buffers.items()}",
        ),
        Edit("PackedModule.__setstate__", "self.identify($place, self._input_dtype)", "$place.type"),), ("tests/cpu/test_compiled_models.py",),
    ),
    Mutant(
        "a gradient is not refused", "runtime/packed_module.py",
        (Edit("refuse_gradient", "$tensor.requires_grad", "$tensor.is_meta"),), ("tests/cpu/test_inference_only.py",),
    ),
    Mutant(
        "every experts module has the first one's handle", "integrations/transformers/plugin.py",
        (Edit(
            "_module_of",
            "$found is not None and _handle($found).data_ptr() == $address",
            "$found is not None",
        ),
        Edit("_module_of", "return $found", "return next(iter(_MODULES.values()))() or $found"),), ("tests/cpu/test_compiled_models.py",),
    ),
    Mutant(
        "autocast reaches the router", "stages/router.py",
        (Edit("autocast_disabled", "torch.autocast($device.type, enabled=False)", "nullcontext()"),), ("tests/cpu/test_inference_only.py",),
    ),
    # Between ranks.
    Mutant(
        "rows come back in the order of experts", "parallel/all_to_all.py",
        (Edit(
            "AllToAll.send_back",
            "$found.index_select(0, $order)",
            "$found.index_select(0, $order).sort().values",
        ),), _RANKS,
    ),
    Mutant(
        "other copies of an expert accepted", "parallel/layer_check.py",
        (Edit("_check_copies", "len(set(values.values())) == 1", "True"),), _LAYER_CHECK,
    ),
    Mutant(
        "a sample of a copy is all of it", "execution/layer_comparison.py",
        (Edit("_copied_slots", "counts[expert] > 1", "False"),), _LAYER_CHECK,
    ),
    Mutant(
        "other plans of ranks accepted", "parallel/layer_check.py",
        (Edit("_check_settings", "not differing", "True"),), _LAYER_CHECK,
    ),
    Mutant(
        "the shared expert waits for the rows", "pipelines/split.py",
        (Edit(
            "Split.__call__",
            "overlap = shared is not None and self.parts.overlap_shared",
            "overlap = False",
        ),), ("tests/cpu/test_shared_overlap.py",),
    ),
    Mutant(
        "the shared expert of the other half", "pipelines/half_batches.py",
        (Edit("HalfBatches._combine", "shared[half]", "shared.flip(0)[half]"),), _MICROBATCHES,
    ),
    Mutant(
        "half batches of any size", "pipelines/half_batches.py",
        (Edit("no_half_batches", "not overrides.allow_slow", "False"),), _MICROBATCHES,
    ),
    Mutant(
        "scales of another token", "parallel/message_format.py",
        (Edit("TokenMessage.unpack", "$blocks.pop(0).contiguous()", "$blocks.pop(0).flip(0)"),), _RANKS,
    ),
    Mutant(
        "a token without room adds nothing", "parallel/all_to_all_fixed.py",
        (Edit(
            "AllToAllFixed.dispatch",
            "torch.where($found < 0, -2, $found * $top_k + torch.arange($top_k, device=$ids.device))",
            "torch.where($found < 0, -1, $found * $top_k + torch.arange($top_k, device=$ids.device))",
        ),), _RANKS,
    ),
    Mutant(
        "a graph without room is not told", "parallel/all_to_all_fixed.py",
        (Edit(
            "AllToAllFixed._agree",
            "self.overflow.add_(($counts - self.rank_tokens).clamp(min=0).sum())",
            "self.overflow.mul_(($counts - self.rank_tokens).clamp(min=0).sum())",
        ),), _RANKS,
    ),
    Mutant(
        "codes that are weighted later", "planning.py",
        (Edit(
            "_with_wire_format",
            "$form.e4m3 and (not $form.static) and $kernel.takes_codes and (not $problem.spec.routing.weight_on_input)",
            "$form.e4m3 and (not $form.static) and $kernel.takes_codes",
        ),), _RANKS,
    ),
    Mutant(
        "parts of FP8 without weights", "parallel/combine.py",
        (Edit(
            "ReducedCombine.pack",
            "weighted_sum($rows, $slots, $weights, torch.float32)",
            "weighted_sum($rows, $slots, None, torch.float32)",
        ),), _REDUCED,
    ),
    Mutant(
        "a token of nobody alone is zero", "parallel/expert_parallel.py",
        (Edit(
            "permute_by_rank",
            "$rank.amin(dim=1, keepdim=True).clamp(max=-1)",
            "$rank.amin(dim=1, keepdim=True).clamp(-1, -1)",
        ),), _REDUCED,
    ),
    # The clamp.
    Mutant(
        "clamp dropped (swiglu)", "ops/activation.py",
        (Edit("_gated", "$spec.limit is not None", "$spec.limit is not None and $spec.kind != 'swiglu'"),), _HOST,
    ),
    Mutant(
        "clamp dropped (swiglu_oai)", "ops/activation.py",
        (Edit("_gated", "$spec.limit is not None", "$spec.limit is not None and $spec.kind != 'swiglu_oai'"),), _HOST,
    ),
    Mutant(
        "clamp dropped", "experts/cpu/grouped.py",
        (Edit("fast_activate", "$spec.limit is not None", "False"),), _CPU,
    ),
    Mutant(
        "clamp dropped", "kernels/activation.py",
        (Edit("activate", "$KIND != SWIGLU_STEP", "$KIND > GELU"),), _ACTS,
    ),
    Mutant(
        "clamp dropped (swiglu_step)", "kernels/activation.py",
        (Edit(
            "activate",
            "gate = _silu(gate, FAST)\n        if PROJ.has_limit:",
            "gate = _silu(gate, FAST)\n        if KIND > GELU:",
            text=True,
        ),), _ACTS,
    ),
    Mutant(
        "gate clamped from below too", "ops/activation.py",
        (Edit("_gated", "$gate.clamp(max=$spec.limit)", "$gate.clamp(-$spec.limit, $spec.limit)"),), _HOST,
    ),
    Mutant(
        "gate clamped from below too", "kernels/activation.py",
        (Edit(
            "activate",
            "gate = _clamp_above(gate, bounds.limit)\n        up = _clamp(up, bounds.limit)\n    if KIND == SWIGLU",
            "gate = _clamp(gate, bounds.limit)\n        up = _clamp(up, bounds.limit)\n    if KIND == SWIGLU",
            text=True,
        ),), _ACTS,
    ),
    # Clamp after SiLU.
    Mutant(
        "clamp after SiLU", "ops/activation.py",
        (Edit("_gated", "$spec.kind == 'swiglu_step'", "$spec.kind in ('swiglu', 'swiglu_step')"),
        Edit("_gated", "functional.silu($gate) * $up", "$gate * $up"),), _HOST,
    ),
    Mutant(
        "clamp after SiLU", "experts/cpu/grouped.py",
        (Edit(
            "fast_activate",
            "if $spec.limit is not None:\n    $gate, $up = ($gate.clamp(max=$spec.limit), $up.clamp(-$spec.limit, $spec.limit))\nreturn functional.silu($gate).mul_($up)",
            "$gate = functional.silu($gate)\nif $spec.limit is not None:\n    $gate, $up = ($gate.clamp(max=$spec.limit), $up.clamp(-$spec.limit, $spec.limit))\nreturn $gate.mul_($up)",
        ),), _CPU,
    ),
    Mutant(
        "clamp after SiLU", "kernels/activation.py",
        (Edit("activate", "$KIND != SWIGLU_STEP", "$KIND > SWIGLU_STEP"),
        Edit(
            "activate",
            "_silu($gate, $FAST) * $up",
            "tl.where(PROJ.has_limit, _clamp_above(_silu($gate, $FAST), bounds.limit) * _clamp($up, bounds.limit), _silu($gate, $FAST) * $up)",
        ),), _ACTS,
    ),
    # SwiGLU-OAI.
    Mutant(
        "alpha dropped", "ops/activation.py",
        (Edit("_gated", "$spec.alpha * $gate", "$gate"),), _HOST,
    ),
    Mutant(
        "alpha dropped", "kernels/activation.py",
        (Edit("activate", "$bounds.alpha * $gate", "$gate"),), _ACTS,
    ),
    Mutant(
        "beta dropped", "ops/activation.py",
        (Edit("_gated", "$up + $spec.beta", "$up"),), _HOST,
    ),
    Mutant(
        "beta dropped", "kernels/activation.py",
        (Edit("activate", "$up + $bounds.gate_bound", "$up"),), _ACTS,
    ),
    # A scale dropped.
    Mutant(
        "a group's scale dropped", "formats/codecs.py",
        (Edit(
            "scale_groups_",
            "change($full.unflatten(-1, (-1, $group)), $scales[:, :$whole, None])",
            "$full.unflatten(-1, (-1, $group))",
        ),), _FORMAT,
    ),
    Mutant(
        "the last, partial group's scale dropped", "formats/codecs.py",
        (Edit(
            "scale_groups_",
            "change($values[:, $whole * $group:], $scales[:, $whole:])",
            "$values[:, $whole * $group:]",
        ),), _FORMAT,
    ),
    Mutant(
        "a row's scale dropped", "experts/cpu/grouped.py",
        (Edit(
            "_project",
            "torch.mul($result, $matrix.row_scale[$expert], out=$out[$span])",
            "$out[$span].copy_($result)",
        ),), _CPU,
    ),
    Mutant(
        "gate's row scale dropped", "kernels/grouped_gemm.py",
        (Edit(
            "grouped_tile",
            "gate = _scale_and_add_bias(gate, gate_unit, tokens, weights, token, offset, FORMAT)",
            "gate = _scale_and_add_bias(gate, gate_unit, tokens, weights, token, offset, FORMAT)\nif FORMAT.row_scale:\n    gate /= tl.load(weights.row_scale + offset)[:, None]",
        ),), _KERNEL,
    ),
    Mutant(
        "a block's scale dropped", "kernels/grouped_gemm.py",
        (Edit(
            "_add_stored",
            "$factors = $scale[:, None] if $TILE.interleave_gate_up else $scale",
            "$factors = 0.0 * $scale + 1.0",
        ),), _KERNEL,
    ),
    Mutant(
        "the tokens' scale dropped", "kernels/grouped_gemm.py",
        (Edit("_add_stored", "$scale * $block.x_scale", "$scale + 0.0 * $block.x_scale"),), _KERNEL,
    ),
    Mutant(
        "the tokens' scale dropped for up", "kernels/grouped_gemm.py",
        (Edit(
            "grouped_tile",
            "up = _scale_and_add_bias(up, up_unit, tokens, weights, token, up_offset, FORMAT)",
            "up = _scale_and_add_bias(up, up_unit, tokens, weights, token, up_offset, FORMAT)\nif FORMAT.x_scale == X_ROW_SCALE:\n    up /= tl.load(tokens.scale + token)[None, :]",
        ),), _KERNEL,
    ),
    # The neighbouring group's scale.
    Mutant(
        "the neighbouring group's scale", "formats/codecs.py",
        (Edit("scale_groups_", "$scales[:, :$whole, None]", "$scales.roll(1, 1)[:, :$whole, None]"),), _FORMAT,
    ),
    Mutant(
        "the neighbouring group's scale (MXFP4)", "experts/cpu/decode.py",
        (Edit("CodeMatrix._decode", "self.scales[$expert, $span]", "self.scales[$expert, $span].roll(1, -1)"),), _CPU,
    ),
    Mutant(
        "the neighbouring group's scale (NVFP4, MXFP8)", "experts/cpu/decode.py",
        (Edit(
            "CodeMatrix._scale_in_bits",
            "self.scales[$expert, $span]",
            "self.scales[$expert, $span].roll(1, -1)",
        ),), _CPU,
    ),
    Mutant(
        "the neighbouring group's scale (INT4, FP8 blocks)", "experts/cpu/decode.py",
        (Edit(
            "CodeMatrix._scale_by_value",
            "self.scales[$expert].index_select(0, $line)",
            "self.scales[$expert].index_select(0, $line).roll(1, 1)",
        ),), _CPU,
    ),
    Mutant(
        "the neighbouring row block's scale", "experts/cpu/decode.py",
        (Edit(
            "CodeMatrix._scale_by_value",
            "$rows % $height // self.row_block",
            "($rows % $height // self.row_block + 1) % blocks",
        ),), _CPU,
    ),
    Mutant(
        "the neighbouring group's scale", "kernels/decode.py",
        (Edit("_byte_scale", "8 * $QUARTER", "8 * (($QUARTER + 1) % 4)"),), _KERNEL,
    ),
    Mutant(
        "the neighbouring group's scale (INT4)", "kernels/decode.py",
        (Edit(
            "_group_factors",
            "return (upper_scale($n0 << 16), upper_scale($n0), upper_scale($n2 << 16), upper_scale($n2))",
            "return (upper_scale($n0), upper_scale($n0 << 16), upper_scale($n2 << 16), upper_scale($n2))",
        ),), _KERNEL,
    ),
    Mutant(
        "the neighbouring group's zero point", "kernels/decode.py",
        (Edit("_load_words", "tl.load($scale + $stride) if $WORDS == 4 else $n0", "$n0"),), _KERNEL,
    ),
    Mutant(
        "a zero point of seven bits", "kernels/decode.py",
        (Edit("_minus_zero_point", "$word & 255", "$word & 127"),), _KERNEL,
    ),
    Mutant(
        "a zero point left in its scale", "kernels/decode.py",
        (Edit("_group_scale", "$words & -256", "$words & -1"),), _KERNEL,
    ),
    Mutant(
        "a minimum of the neighbouring group", "kernels/decode.py",
        (Edit(
            "_minima",
            "tl.join(tl.join($m0, $m2), tl.join($m1, $m3))",
            "tl.join(tl.join($m0, $m1), tl.join($m2, $m3))",
        ),), _BLOCKS,
    ),
    Mutant(
        "the step of the neighbouring group", "kernels/decode.py",
        (Edit(
            "_stepped_quarters",
            "_times_step($lanes >> 4 & 15, $steps, 1)",
            "_times_step($lanes >> 4 & 15, $steps, 2)",
        ),
        Edit(
            "_stepped_quarters",
            "_times_step($lanes >> 8 & 255, $steps, 1)",
            "_times_step($lanes >> 8 & 255, $steps, 2)",
        ),), _BLOCKS,
    ),
    Mutant(
        "minima times the factor of codes", "kernels/decode.py",
        (Edit("_decode_stepped", "$halves >> 16", "$halves"),), _BLOCKS,
    ),
    Mutant(
        "what rounding leaves of a sum dropped", "kernels/columns.py",
        (Edit("halves_kernel", "$total - $rounded", "0.0"),), _BLOCKS[1:],
    ),
    Mutant(
        "rows whose sums overflow", "kernels/columns.py",
        (Edit("halves_kernel", "($most >> 23) - 9", "($most >> 23) - 15"),), _BLOCKS[1:],
    ),
    Mutant(
        "a row with NaN that is zero", "kernels/columns.py",
        (Edit(
            "halves_kernel",
            "tl.where($finite, ($exponent << 23).to(tl.float32, bitcast=True), float('nan'))",
            "($exponent << 23).to(tl.float32, bitcast=True)",
        ),), _BLOCKS[1:],
    ),
    Mutant(
        "the factor of the neighbouring group", "kernels/dequantize.py",
        (Edit("dequantize_kernel", "$i * 4 // $GROUPS", "0"),), _LARGE,
    ),
    Mutant(
        "the factor of the neighbouring block", "kernels/dequantize.py",
        (Edit(
            "dequantize_kernel",
            "$scale + ($matrix * $scale_rows + $row // 128) * $K_BLOCKS + $block",
            "$scale + ($matrix * $scale_rows + $row // 128) * $K_BLOCKS",
        ),), _LARGE,
    ),
    Mutant(
        "quarters of a block swapped", "kernels/dequantize.py",
        (Edit("dequantize_kernel", "quarters[$quarter]", "quarters[3 - $quarter]"),), _LARGE,
    ),
    Mutant(
        "an expert's first tokens in all of its tiles", "kernels/prefill.cu",
        (Edit("tile_of", "inside / width, start + first,", "inside / width, start,"),), _PREFILL,
    ),
    Mutant(
        "gate's factors for up", "kernels/prefill.cu",
        (Edit(
            "factors",
            "i64 part = (i64)t.expert * PROJECTIONS + (PROJECTIONS == 2 ? h : 0);",
            "i64 part = (i64)t.expert * PROJECTIONS;",
        ),), _PREFILL,
    ),
    Mutant(
        "gate and up swapped in a large tile", "kernels/prefill.cu",
        (Edit(
            "prefill",
            "activated(d[i], d[PROJECTIONS == 2 ? i + 32 : i], z)",
            "activated(d[PROJECTIONS == 2 ? i + 32 : i], d[i], z)",
        ),), _PREFILL,
    ),
    Mutant(
        "the neighbouring row block's scale", "kernels/prefill.cu",
        (Edit(
            "factors",
            "(matrix * z.scale_rows + band) * z.k_blocks",
            "(matrix * z.scale_rows + (band ^ 1)) * z.k_blocks",
        ),), _PREFILL,
    ),
    Mutant(
        "a bias of the neighbouring expert", "kernels/prefill.cu",
        (Edit(
            "finish",
            "i64 i = ((i64)expert * PROJECTIONS + part) * z.n_out + c;",
            "i64 i = ((i64)(expert ^ 1) * PROJECTIONS + part) * z.n_out + c;",
        ),), _PREFILL,
    ),
    Mutant(
        "a row beyond a tile's end stored", "kernels/prefill.cu",
        (Edit(
            "store_rows",
            "if (r >= left || at_column >= z.n_out) continue;",
            "if (r > left || at_column >= z.n_out) continue;",
        ),), _PREFILL,
    ),
    Mutant(
        "a stage multiplied before it is there", "kernels/prefill.cu",
        (Edit("products", "wait(&s.full[p.stage], p.parity);\n            next(q);", "next(q);"),), _PREFILL,
    ),
    Mutant(
        "a row's scale of one block's columns alone", "kernels/prefill.cu",
        (Edit("store_codes", "amax[0] = max(amax[0], peer_amax[0]), amax[1] = max(amax[1], peer_amax[8]);", ""),), _PREFILL,
    ),
    Mutant(
        "a counter that is left", "kernels/prefill.cu",
        (Edit("copies", "counters[0] = counters[1] = 0;", "counters[0] = 0;"),), _PREFILL,
    ),
    Mutant(
        "gate and up swapped (registers)", "kernels/w4_epilogue.cuh",
        (Edit("results_of", "activated(low, high, z)", "activated(high, low, z)"),), _W4_PREFILL,
    ),
    Mutant(
        "up with gate's bias (registers)", "kernels/w4_epilogue.cuh",
        (Edit("results_of", "r.bias[m][1]", "r.bias[m][0]"),), _W4_PREFILL,
    ),
    Mutant(
        "a token beyond a tile's end stored", "kernels/w4_epilogue.cuh",
        (Edit("store_rows", "first + in_room >= tokens_of(t)", "first + in_room > tokens_of(t)"),), _W4_PREFILL,
    ),
    Mutant(
        "signs of the first four codes for all", "kernels/w4_decode.cuh",
        (Edit("decode_word", "((word * sixteen) & 0x80808080u)", "(word & 0x80808080u)"),), _W4_PREFILL,
    ),
    Mutant(
        "the scale of the neighbouring group (registers)", "kernels/w4_decode.cuh",
        (Edit("scale_selector", "lane % 4", "(lane ^ 1) % 4"),), _W4_PREFILL,
    ),
    Mutant(
        "one row's scales for both rows of a thread", "kernels/w4_decode.cuh",
        (Edit("decode", "row ? codes.high_scales : codes.low_scales", "codes.low_scales"),), _W4_PREFILL,
    ),
    Mutant(
        "a tile of 160 tokens with group scales (NVFP4)", "experts/triton/tiles/choice.py",
        (Edit("prefill_tile", "scaled and problem.operands > 1", "False"),),
        ("tests/cpu/test_w4_prefill_recipes.py::test_which_batches_are_large",),
    ),
    Mutant(
        "tokens of the first piece for all", "kernels/w4_pipeline.cuh",
        (Edit("multiply_piece", "stage + FIRST * 128", "stage"),), _W4_PREFILL,
    ),
    Mutant(
        "token scales of the first piece for all", "kernels/w4_pipeline.cuh",
        (Edit("add_scaled", "FIRST / 8 + j", "j"),), _W4_PREFILL,
    ),
    Mutant(
        "a piece added before its product is complete", "kernels/w4_pipeline.cuh",
        (Edit("add_pieces", "await_products<(NEXT < N)>();", ""),), ("tests/cpu/test_w4_prefill_compile.py",),
    ),
    Mutant(
        "a turn that is not passed", "kernels/w4_pipeline.cuh",
        (Edit("add_pieces", "if (LAST) pass_turn(group);", ""),), _W4_PREFILL,
    ),
    Mutant(
        "tokens of an expert in all of its four-bit tiles", "kernels/w4_pipeline.cuh",
        (Edit("tile_at", "start + first, min(rows - first, width)", "start, min(rows - first, width)"),), _W4_PREFILL,
    ),
    Mutant(
        "weights of the first row tile for both", "kernels/w4_pipeline.cuh",
        (Edit("load_codes", "int row_tile = step % ROW_TILES;", "int row_tile = 0;"),), _W4_PREFILL,
    ),
    Mutant(
        "columns of the first pass for both (registers)", "kernels/w4_pipeline.cuh",
        (Edit("multiply_pass", "pass * PRODUCTS + k", "k"),), _W4_RECIPES,
    ),
    Mutant(
        "a sum left in the units of the factor before", "kernels/w4_pipeline.cuh",
        (Edit("prepare", "units.of[row_tile][h] * flushed_inverse(factor)", "1.0f"),), _W4_RECIPES,
    ),
    Mutant(
        "second term dropped (NVFP4, registers)", "kernels/w4_decode.cuh",
        (Edit("magnitudes_of", "{scale * 0x01000000u, scale * 0x01000100u + 0x10000800u}", "{0, 0}"),), _W4_RECIPES,
    ),
    Mutant(
        "the scale of a row's first quarter for all (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("scale_pair", "0x4040 + quarter * 0x0101", "0x4040"),), _W4_RECIPES,
    ),
    Mutant(
        "codes of a row for the row eight rows later (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("first_code", "lane / 8 % 2 * 8 + lane % 8", "lane % 8"),), _W4_RECIPES,
    ),
    Mutant(
        "one factor for both rows of a thread (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("factor_of", "codes.scales[h]", "codes.scales[0]"),), _W4_RECIPES,
    ),
    Mutant(
        "row factors of gate for up (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("row_scale_of", "(PROJECTIONS == 2 ? row / 8 % 2 : 0)", "0"),), _W4_RECIPES,
    ),
    Mutant(
        "four-bit bias of gate for up", "kernels/w4_pipeline.cuh",
        (Edit("load_factors", "+ part_of(row)) * z.n_out", "+ 0) * z.n_out"),), _W4_PREFILL,
    ),
    Mutant(
        "a token's scale for its neighbour", "kernels/w4_epilogue.cuh",
        (Edit("results_of", "e ? x_scale.y : x_scale.x", "x_scale.x"),), _W4_PREFILL,
    ),
    Mutant(
        "rows of four-bit tiles not at their places", "kernels/w4_epilogue.cuh",
        (Edit("begins", "HAS_ROW_OFFSETS ? __ldg(o.row_offsets + row) : (i64)row * n_out", "(i64)row * n_out"),), _W4_PREFILL,
    ),
    Mutant(
        "a repeated kernel in CUDA with the tensors of the first call", "runtime/nvrtc.py",
        (Edit("_starter.call", "$arguments if $addresses == $first else arguments_for($addresses)", "$arguments"),), ("tests/cpu/test_replay.py",),
    ),
    Mutant(
        "large tiles for a few rows of one expert", "experts/triton/tiles/choice.py",
        (Edit(
            "large_from",
            "$rows * (1 if $enough else LARGE.few_experts)\n",
            "$rows\n",
        ),), _PREFILL[1:],
    ),
    Mutant(
        "the tiles of all experts for some", "experts/triton/dequantized.py",
        (Edit(
            "dequantized_groups",
            "$tiles if $size == $experts else tile_list($offsets, $rows, $tiles.tile, $memory)",
            "$tiles",
        ),), _LARGE,
    ),
    Mutant(
        "the sign of a step lost", "kernels/decode.py",
        (Edit("_step_scale", "$words << 24 - 8 * $QUARTER >> 24", "$words >> 8 * $QUARTER & 255"),), _BLOCKS,
    ),
    Mutant(
        "steps of minima added", "experts/triton/packing/gguf.py",
        (Edit("_scale_words", "[1, -1]", "[1, 1]"),), _BLOCKS,
    ),
    Mutant(
        "sums of columns beyond a row", "kernels/columns.py",
        (Edit("halves_kernel", "column < tl.where($kept, $columns, 0)", "column >= 0"),), _BLOCKS[1:],
    ),
    Mutant(
        "the columns of the neighbouring expert", "kernels/columns.py",
        (Edit("columns_kernel", "expert * $columns", "(expert ^ 1) * $columns"),), _ORDERS,
    ),
    Mutant(
        "rows of the first product in their own order", "experts/triton/pack_experts.py",
        (Edit("pack_both", "$weights = _reorder_middle($weights)", "pass"),), _KERNEL,
    ),
    Mutant(
        "a bias that stays where it was", "experts/triton/pack_experts.py",
        (Edit("_reorder_middle", "None if $bias is None else reorder($bias)", "$bias"),), _KERNEL,
    ),
    Mutant(
        "bytes of a lane swapped", "kernels/decode.py",
        (Edit("_int8_halves", "return ($low, $high)", "return ($high, $low)"),), _KERNEL,
    ),
    Mutant(
        "the neighbouring row block's scale", "kernels/grouped_gemm.py",
        (Edit("_first_pointers", "$n_first // 128", "tl.maximum($n_first // 128 - 1, 0)"),), _KERNEL,
    ),
    # Nibbles.
    Mutant(
        "nibbles swapped", "formats/codecs.py",
        (Edit(
            "pair_table",
            "($row.repeat(16), $row.repeat_interleave(16))",
            "($row.repeat_interleave(16), $row.repeat(16))",
        ),), _FORMAT,
    ),
    Mutant(
        "nibbles swapped on writing", "formats/codecs.py",
        (Edit(
            "pack_nibbles",
            "$codes[..., 0::2] | $codes[..., 1::2] << 4",
            "$codes[..., 1::2] | $codes[..., 0::2] << 4",
        ),), ("tests/cpu/test_formats_codecs.py", "tests/cpu/test_formats_examples.py", "tests/cpu/test_formats.py", "tests/cpu/test_formats_agreement.py"),
    ),
    Mutant(
        "nibbles swapped", "experts/cpu/decode.py",
        (Edit("_table", "(0, 4, 8, 12)", "(4, 0, 12, 8)"),), _CPU,
    ),
    Mutant(
        "nibbles swapped (packing NVFP4)", "formats/codecs.py",
        (Edit("unpack_nibbles", "($packed & 15, $packed >> 4)", "($packed >> 4, $packed & 15)"),), ("tests/cpu/test_formats_codecs.py", "tests/cpu/test_cpu_grouped.py", "tests/cpu/test_verify.py"),
    ),
    Mutant(
        "quarters swapped (E2M1)", "experts/triton/packing/interleave.py",
        (Edit("_pack_e2m1", "($a, $b, $c, $d)", "($b, $a, $c, $d)"),), _KERNEL,
    ),
    Mutant(
        "quarters swapped (INT4)", "experts/triton/packing/interleave.py",
        (Edit("_pack_int4", "($a, $b, $c, $d)", "($b, $a, $c, $d)"),), _KERNEL,
    ),
    Mutant(
        "an INT4 code of three bits", "kernels/decode.py",
        (Edit("_int4_quarters", "$lanes >> 12 & 15", "$lanes >> 12 & 7"),), _KERNEL,
    ),
    # E8M0.
    Mutant(
        "E8M0 bias off by one", "formats/codecs.py",
        (Edit(
            "e8m0_values",
            "torch.arange(256, device=$device, dtype=torch.int32)",
            "(torch.arange(256, device=$device, dtype=torch.int32) - 1).clamp(min=0)",
        ),), _FORMAT,
    ),
    Mutant(
        "E8M0 bias off by one on writing", "formats/codecs.py",
        (Edit(
            "e8m0_codes",
            "floor_log2($amax) - $largest_exponent + 127",
            "floor_log2($amax) - $largest_exponent + 126",
        ),), _FORMAT,
    ),
    Mutant(
        "E8M0 bias off by one (MXFP4)", "experts/cpu/decode.py",
        (Edit("_mxfp4", "$largest.mul_(0.5)", "$largest"),), _CPU,
    ),
    Mutant(
        "E8M0 bias off by one (MXFP8)", "experts/cpu/decode.py",
        (Edit("_E4M3_FIELD", "_E4M3_FIELD = 247", "_E4M3_FIELD = 246", text=True),), _CPU,
    ),
    Mutant(
        "E8M0 bias off by one", "kernels/decode.py",
        (Edit("_byte_scale", "$byte << (10 if $HALF else 7)", "$byte - 1 << (10 if $HALF else 7)"),), _KERNEL,
    ),
    # The global scale of NVFP4.
    Mutant(
        "global scale divided instead of multiplied", "formats/nvfp4.py",
        (Edit("NvFp4.decode", "self.global_divides", "not self.global_divides"),), _FORMAT,
    ),
    Mutant(
        "global scale divided instead of multiplied", "experts/cpu/decode.py",
        (Edit(
            "_nvfp4",
            "$scale.reciprocal() if $payload.global_divides else $scale",
            "$scale if $payload.global_divides else $scale.reciprocal()",
        ),), _CPU,
    ),
    Mutant(
        "global scale divided instead of multiplied", "experts/triton/packing/mx.py",
        (Edit(
            "pack_nvfp4",
            "$own.reciprocal() if $payload.global_divides else $own",
            "$own if $payload.global_divides else $own.reciprocal()",
        ),), _KERNEL,
    ),
    Mutant(
        "compressed-tensors global scale multiplied", "experts/triton/packing/mx.py",
        (Edit("pack_nvfp4", "$own.reciprocal() if $payload.global_divides else $own", "$own"),), ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "compressed-tensors read as ModelOpt", "formats/nvfp4.py",
        (Edit("NvFp4.from_parts", "$storage == 'compressed-tensors'", "False"),), ("tests/cpu/test_formats_examples.py", "tests/cpu/test_loader.py"),
    ),
    Mutant(
        "one global scale for both halves", "experts/cpu/stored.py",
        (Edit(
            "by_row",
            "$per_matrix.reshape(*$shape[:-2], 1).float().expand($shape[:-1])",
            "$per_matrix.reshape($shape[0], -1)[:, :1].float().expand($shape[0], $shape[-2] * (len($shape) - 2))",
        ),), _CPU,
    ),
    Mutant(
        "one global scale for both halves", "experts/triton/packing/mx.py",
        (Edit("pack_nvfp4", "$row_scale.unsqueeze(-1)", "$row_scale[:, :1].unsqueeze(-1)"),), _KERNEL,
    ),
    Mutant(
        "one scale for both halves (FP8)", "experts/triton/packing/fp8.py",
        (Edit("pack_fp8_rows", "$scale.float()", "$scale[:, :1].float()"),), _KERNEL,
    ),
    Mutant(
        "one global scale for both halves", "formats/nvfp4.py",
        (Edit(
            "NvFp4.decode",
            "$spread = self.global_scale.reshape(-1).repeat_interleave(self.shape[-2]).unsqueeze(-1)",
            "global_scale = self.global_scale\n$spread = (global_scale[..., :1].expand_as(global_scale) if global_scale.dim() else global_scale).reshape(-1).repeat_interleave(self.shape[-2]).unsqueeze(-1)",
        ),), ("tests/cpu/test_formats.py", "tests/cpu/test_audit.py", "tests/cpu/test_layer.py"),
    ),
    # Experts rotated by one.
    Mutant(
        "experts rotated by one", "experts/reference.py",
        (Edit(
            "_one_expert",
            "$weights.gate_up[$expert]",
            "$weights.gate_up[($expert + 1) % $weights.gate_up.shape[0]]",
        ),), _HOST[1:],
    ),
    Mutant(
        "experts rotated by one", "experts/cpu/grouped.py",
        (Edit(
            "_product",
            "$matrix.tile($expert, $tile, $rows.dtype, $scratch)",
            "$matrix.tile(($expert + 1) % $matrix.shape[0], $tile, $rows.dtype, $scratch)",
        ),), _CPU,
    ),
    Mutant(
        "experts rotated by one", "kernels/grouped_gemm.py",
        (Edit("_weight_rows", "$expert * $PROJ.count", "tl.maximum($expert - 1, 0) * $PROJ.count"),), _KERNEL,
    ),
    Mutant(
        "experts rotated by one in a file", "checkpoint/layer_view.py",
        (Edit(
            "CheckpointLayer.source",
            "return source_of(self.names, self.spec, layer=self.number, expert=$expert, projection=$projection, stacked=self.stored.stacked)",
            "$expert = ($expert + 1) % self.spec.num_experts\nreturn source_of(self.names, self.spec, layer=self.number, expert=$expert, projection=$projection, stacked=self.stored.stacked)",
        ),), _LOAD,
    ),
    Mutant(
        "experts rotated by one in a stack", "checkpoint/layout.py",
        (Edit(
            "source_of",
            "Source(label=$label, path=$paths.get($projection, $paths['gate']).format(layer=$layer), projection=$projection, rows=$rows, columns=$columns, experts=$spec.num_experts, index=$expert, stored_rows=$stored, offset=$offset, step=$step, transposed=$table.transposed or ($table.flat and $projection == 'down'), flat=$table.flat, plain=$table.plain)",
            "Source(label=$label, path=$paths.get($projection, $paths['gate']).format(layer=$layer), projection=$projection, rows=$rows, columns=$columns, experts=$spec.num_experts, index=($expert + 1) % $spec.num_experts, stored_rows=$stored, offset=$offset, step=$step, transposed=$table.transposed or ($table.flat and $projection == 'down'), flat=$table.flat, plain=$table.plain)",
        ),), _LOAD,
    ),
    Mutant(
        "experts rotated by one on writing", "commands/quantize.py",
        (Edit(
            "_expert_tensors",
            "job.names.projection($which).format(layer=$layer, expert=$expert)",
            "job.names.projection($which).format(layer=$layer, expert=($expert + 1) % job.spec.num_experts)",
        ),), _WRITE,
    ),
    Mutant(
        "experts rotated by one on writing a stack", "commands/quantize.py",
        (Edit(
            "_write_layer",
            "$expert if $job.stacked else 0",
            "($expert + 1) % $job.spec.num_experts if $job.stacked else 0",
        ),), _STACK,
    ),
    Mutant(
        "a bias of the neighbouring expert", "kernels/grouped_gemm.py",
        (Edit("_scale_and_add_bias", "$weights.bias + $offset", "$weights.bias + 0 * $offset"),), _KERNEL,
    ),
    # Routing and combining.
    Mutant(
        "router weight applied twice", "ops/weighted_sum.py",
        (Edit(
            "_reference",
            "$weights.float().t()[$span].reshape(-1, 1)",
            "$weights.float().t()[$span].reshape(-1, 1).square()",
        ),), ("tests/cpu/test_weighted_sum.py",),
    ),
    Mutant(
        "columns of a pair swapped (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode", "_rounded($builder, *$pair)", "_rounded($builder, *$pair[::-1])"),), _FUSED,
    ),
    Mutant(
        "zero points forgotten (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode", "$builder.select($zeros, $builder.fsub($first, $behind), $first)", "$first"),), _FUSED,
    ),
    Mutant(
        "zero points of wide scales subtracted late (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode", "$SCALES.index('fp32')", "$SCALES.index('e8m0')"),), _FUSED,
    ),
    Mutant(
        "E4M3 scales shifted by one (machine code)", "kernels/cpu_fused.py",
        (Edit("_scale", "_word(7, $_SHORTS)", "_word(8, $_SHORTS)"),), _FUSED,
    ),
    Mutant(
        "the sign of E4M3 left in its exponent (machine code)", "kernels/cpu_fused.py",
        (Edit("_numbers", "_word(-16512, $_SHORTS)", "_word(-128, $_SHORTS)"),), _FUSED,
    ),
    Mutant(
        "E4M3 read as integers (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode", "$apart == 2", "False"),), _FUSED,
    ),
    Mutant(
        "what E4M3 in float16 leaves of a scale forgotten", "experts/cpu/fused.py",
        (Edit("_e4m3_scales", "$_LARGEST + 8", "$_LARGEST"),), _FUSED,
    ),
    Mutant(
        "the scale of the row block before", "experts/cpu/fused.py",
        (Edit(
            "_e4m3_scales",
            "$payload.scales.float().repeat_interleave($rows, dim=-2)",
            "$payload.scales.float().repeat_interleave($rows, dim=-2).roll(1, dims=-2)",
        ),), _FUSED,
    ),
    Mutant(
        "the fifth bits of the other half (machine code)", "kernels/cpu_fused.py",
        (Edit("_numbers", "2 * $half", "2 * (1 - $half)"),), _FUSED,
    ),
    Mutant(
        "int8 scales of the first 256 columns (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode_piece", "$number * $spans + $done // $_SPAN", "$number * $spans"),), _FUSED,
    ),
    Mutant(
        "scales of the group before (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode_piece", "$number * $groups + group_index", "$number * $groups + max(group_index - 1, 0)"),), _FUSED,
    ),
    Mutant(
        "the table of the first expert (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode_piece", "_field($job, $VALUES) + $expert * 4 * $LANES", "_field($job, $VALUES)"),), _FUSED,
    ),
    Mutant(
        "half of a table looked up (machine code, AVX2)", "kernels/cpu_fused.py",
        (Edit(
            "_look_up",
            "$builder.select($builder.trunc($builder.lshr($code, _word(3)), $ir.VectorType($_I1, $LANES)), $high, $low)",
            "$builder.select($builder.trunc($builder.lshr($code, _word(3)), $ir.VectorType($_I1, $LANES)), $low, $low)",
        ),), _FUSED,
    ),
    Mutant(
        "rows and columns trade the wrong half (machine code)", "kernels/cpu_fused.py",
        (Edit("_turned", "($bit, 0) if $row & $bit else (0, $bit)", "(0, $bit) if $row & $bit else ($bit, 0)"),), _FUSED,
    ),
    Mutant(
        "columns of rows always the first (machine code)", "kernels/cpu_fused.py",
        (Edit("_decode_piece", "$codes + $begin * 4", "$codes"),), _FUSED,
    ),
    Mutant(
        "mins of a K block added", "experts/cpu/fused.py",
        (Edit("_gguf_scales", "[1, -1]", "[1, 1]"),), _FUSED,
    ),
    Mutant(
        "the order of the first expert", "experts/cpu/fused.py",
        (Edit("_codes", "order[$expert]", "order[0]"),), _FUSED,
    ),
    Mutant(
        "a token of the first rank", "kernels/mega.py",
        (Edit("_pull_block", "$peer * $current.bound + $token", "$token"),), _MEGA,
    ),
    Mutant(
        "a row goes to the rank it comes from", "kernels/mega.py",
        (Edit("_store_remote", "$peers.deltas + $peer", "$peers.deltas + current.rank"),), _MEGA,
    ),
    Mutant(
        "rows quantised before their last piece", "kernels/mega.py",
        (Edit("_first_products", "$up.n_tiles - 1", "$up.n_tiles - 2"),), _MEGA,
    ),
    Mutant(
        "one token more than a rank has", "kernels/mega.py",
        (Edit("_pull_block", "token < $found", "token <= $found"),), _MEGA,
    ),
    Mutant(
        "counters of the pass before", "kernels/mega.py",
        (Edit("_publish_tokens", "start < $cleared", "start < 0"),), _MEGA,
    ),
    Mutant(
        "a unit of the expert before", "kernels/mega.py",
        (Edit("_m_tile_at", "$tiles.last <= $m_tile", "$tiles.last < $m_tile"),), _MEGA,
    ),
    Mutant(
        "who gave up says that it did not", "kernels/mega.py",
        (Edit("_compute", "tl.where($finished >> 16 == 0, $epoch << 44, -1)", "$epoch << 44"),), _MEGA_LOST,
    ),
    Mutant(
        "lists that overlap", "kernels/mega.py",
        (Edit("_compute", "$peers.world * $current.bound * $FORMAT.top_k", "$current.bound"),), _MEGA_FULL,
    ),
    Mutant(
        "the rest of a float16 number dropped", "experts/cpu/panels.py",
        (Edit("FusedMatrix._multiply_halves", "($upper, $lower)", "($upper, 0 * $lower)"),), ("tests/cpu/test_cpu_fused.py::test_float16_rows_keep_all_their_bits", "tests/cpu/test_cpu_fused.py::test_fp16_infinity_stays_in_its_row"),
    ),
    Mutant(
        "a bias added for both parts of a float16 number", "experts/cpu/panels.py",
        (Edit("FusedMatrix._multiply_halves", "replace(self, bias=None)", "self"),), ("tests/cpu/test_cpu_fused.py::test_float16_rows_keep_all_their_bits", "tests/cpu/test_cpu_fused.py::test_fp16_infinity_stays_in_its_row"),
    ),
    Mutant(
        "what is left of an infinity is NaN", "experts/cpu/panels.py",
        (Edit(
            "FusedMatrix._multiply_halves",
            "($x.float() - $upper.float()).nan_to_num(0.0, 0.0, 0.0)",
            "$x.float() - $upper.float()",
        ),), ("tests/cpu/test_cpu_fused.py::test_float16_rows_keep_all_their_bits", "tests/cpu/test_cpu_fused.py::test_fp16_infinity_stays_in_its_row"),
    ),
    Mutant(
        "the second K block of a step read as the first", "kernels/grouped_gemm.py",
        (Edit("_sum_in_steps_of_depth", "$w_ptr + $index * $strides.k_block", "$w_ptr"),), _MEGA,
    ),
    Mutant(
        "the first K block's scale for the second of a step", "kernels/grouped_gemm.py",
        (Edit("_sum_in_steps_of_depth", "$scale = $scale_ptr + $index * $scale_step", "$scale = $scale_ptr"),), _MEGA,
    ),
    Mutant(
        "tokens' scales of the first K block for the second of a step", "kernels/grouped_gemm.py",
        (Edit("_sum_in_steps_of_depth", "$x_block = ($step * $DEPTH + $index) // _blocks_of_scale($FORMAT.block_k)", "$x_block = $step * $DEPTH // _blocks_of_scale($FORMAT.block_k)"),), _MEGA,
    ),
    Mutant(
        "a rank in another call taken for one in this one", "kernels/mega.py",
        (Edit("_compute", "($posts >> 24 != $tag) | ($posts & 16777215 > $current.bound)", "$posts & 16777215 > $current.bound"),), ("tests/cpu/test_mega.py::test_mismatched_call_is_reported",),
    ),
    Mutant(
        "router weight applied on both sides", "parallel/local.py",
        (Edit(
            "Local.dispatch",
            "$routing.topk_weights if self.weight_on_input else None",
            "$routing.topk_weights",
        ),), _HOST[1:],
    ),
    Mutant(
        "router weight on the wrong side", "parallel/local.py",
        (Edit(
            "Local.dispatch",
            "$routing.topk_weights if self.weight_on_input else None",
            "None if self.weight_on_input else $routing.topk_weights",
        ),
        Edit(
            "Local.dispatch",
            "LocalHandle(slots=$order.slots, weights=None if self.weight_on_input else $routing.topk_weights)",
            "LocalHandle(slots=$order.slots, weights=None if not self.weight_on_input else $routing.topk_weights)",
        ),), _HOST[1:],
    ),
    Mutant(
        "correction bias used in the weights", "ops/route.py",
        (Edit(
            "route",
            "_weights($raw, $scores, $ids, $spec)",
            "_weights($raw, $scores if bias is None else $scores + bias.float(), $ids, $spec)",
        ),), _ROUTE,
    ),
    Mutant(
        "renormalize skipped", "ops/route.py",
        (Edit("_weights", "$spec.renormalize", "False"),), _ROUTE,
    ),
    Mutant(
        "tie broken the other way", "ops/route.py",
        (Edit(
            "_top",
            "$last - torch.arange($values.shape[1], device=$values.device)",
            "torch.arange($values.shape[1], device=$values.device)",
        ),
        Edit(
            "_top",
            "$last - ($keys.topk($count, dim=1).values & $last)",
            "$keys.topk($count, dim=1).values & $last",
        ),), _ROUTE,
    ),
    Mutant(
        "routed scale dropped", "ops/route.py",
        (Edit("_weights", "$weights * $spec.scale", "$weights"),), _ROUTE,
    ),
    Mutant(
        "slots added in another order", "ops/weighted_sum.py",
        (Edit("_reference", "$product.view($step, *$total.shape)", "$product.view($step, *$total.shape).flip(0)"),), ("tests/cpu/test_weighted_sum.py",),
    ),
    # Memory nobody wrote.
    Mutant(
        "dropped rows added to the sum", "ops/weighted_sum.py",
        (Edit("_reference", "$product.masked_fill_($dropped.t()[$span].reshape(-1, 1), 0.0)", "pass"),), ("tests/cpu/test_weighted_sum.py", "tests/cpu/test_layer.py"),
    ),
    Mutant(
        "padding rows left uninitialised", "experts/reference.py",
        (Edit(
            "ReferenceExperts.run",
            "torch.zeros($batch.source.numel(), $hidden, dtype=torch.float32, device=$batch.x.device)",
            "torch.empty($batch.source.numel(), $hidden, dtype=torch.float32, device=$batch.x.device)",
        ),), ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "padding columns left uninitialised", "formats/find_storage.py",
        (Edit(
            "pad_last",
            "$codes.new_full((*$codes.shape[:-1], $size), $fill)",
            "$codes.new_empty((*$codes.shape[:-1], $size))",
        ),), ("tests/cpu/test_formats.py", "tests/cpu/test_formats_parts.py"),
    ),
    Mutant(
        "a row beyond a tile's end stored", "kernels/grouped_gemm.py",
        (Edit("_write_tile", "tl.where($t < $rows.count, $t, 0)", "tl.where($t <= $rows.count, $t, 0)"),
        Edit("_write_tile", "$t < $rows.count", "$t <= $rows.count"),), ("tests/cpu/test_grouped_gemm.py::test_unowned_rows_are_not_written",),
    ),
    Mutant(
        "columns beyond K not zero", "kernels/grouped_gemm.py",
        (Edit("_load", "tl.load($pointers, mask=$mask, other=0.0)", "tl.load($pointers, mask=$mask, other=1.0)"),), _KERNEL,
    ),
    Mutant(
        "columns beyond K not zero", "experts/cpu/decode.py",
        (Edit(
            "CodeMatrix.arrange",
            "functional.pad($x, (0, $stored - self.columns))",
            "functional.pad($x, (0, $stored - self.columns), value=1.0)",
        ),), _CPU,
    ),
    # Biases, and the router weight on the input.
    Mutant(
        "bias dropped", "experts/reference.py",
        (Edit("_one_expert", "$weights.gate_up_bias[$expert].float()", "0.0"),), _HOST[1:],
    ),
    Mutant(
        "down bias dropped", "experts/reference.py",
        (Edit("_one_expert", "$weights.down_bias[$expert].float()", "0.0"),), _HOST[1:],
    ),
    Mutant(
        "bias dropped", "experts/cpu/grouped.py",
        (Edit("_project", "bias[$expert]", "0.0"),), _CPU,
    ),
    Mutant(
        "bias of the neighbouring expert", "experts/cpu/grouped.py",
        (Edit("_project", "bias[$expert]", "bias[$expert - 1]"),), _CPU,
    ),
    Mutant(
        "up's bias dropped", "kernels/grouped_gemm.py",
        (Edit(
            "grouped_tile",
            "up = _scale_and_add_bias(up, up_unit, tokens, weights, token, up_offset, FORMAT)",
            "up = _scale_and_add_bias(up, up_unit, tokens, weights, token, up_offset, FORMAT)\nif FORMAT.bias:\n    up -= tl.load(weights.bias + up_offset).to(tl.float32)[:, None]",
        ),), _KERNEL,
    ),
    Mutant(
        "router weight on the input dropped", "experts/reference.py",
        (Edit("_one_expert", "$batch.input_weights[$span, None]", "1.0"),), _HOST[1:],
    ),
    Mutant(
        "router weight on the input dropped", "experts/cpu/grouped.py",
        (Edit("tokens_of", "$batch.input_weights[$own, None]", "1.0"),), _CPU,
    ),
    Mutant(
        "router weight on the input dropped", "experts/triton/packed.py",
        (Edit(
            "PackedExperts._gathered_operand",
            "$batch.input_weights",
            "torch.ones($batch.source.numel(), device=$batch.x.device)",
        ),), ("tests/cpu/test_grouped_gemm.py::test_router_weight_on_the_input",),
    ),
    Mutant(
        "norm of the latent output skipped", "stages/latent.py",
        (Edit("Latent.leave", "self.norm is not None", "False"),), _HOST[1:],
    ),
    # Unmerged adapters.
    Mutant(
        "an adapter's B of gate multiplied for up", "kernels/low_rank.py",
        (Edit("_load_b", "_matrix_at($adapters, tl.where($x, $a, 0), PROJECTION + $k // RANKS, PROJ.count)", "_matrix_at($adapters, tl.where($x, $a, 0), PROJECTION, PROJ.count)"),), _ADAPTED,
    ),
    Mutant(
        "an adapter's inner row of gate multiplied for up", "kernels/low_rank.py",
        (Edit("_add_ranks", "$k // RANKS * RANK + $r", "$r"),), _ADAPTED_FOUR,
    ),
    Mutant(
        "an adapter's change of another column", "kernels/w4a8.py",
        (Edit("_column_of_row", "$n // 16 * 8", "$n // 16"),), _ADAPTED_FOUR,
    ),
    Mutant(
        "an adapter's changes of gate and up swapped", "kernels/grouped_gemm.py",
        (Edit("_first_ranks", "first_ranks($adapters, $a, $e, $c, $n, 1, PROJ, False)", "first_ranks($adapters, $a, $e, $c, $n, 0, PROJ, False)"),), _ADAPTED_TILES,
    ),
    Mutant(
        "the change of one adapter added to every row of a tile", "kernels/low_rank.py",
        (
            Edit("_add_ranks", "tl.load($p, mask=$selected[None, :] & ($r < $rank)[:, None], other=0.0)", "tl.load($p, mask=($r < $rank)[:, None], other=0.0)"),
            Edit("add_low_rank", "tl.where($selected[None, :], $acc + $change, $acc)", "$acc + $change"),
        ), _ADAPTED,
    ),
    Mutant(
        "one adapter for all rows of a tile", "kernels/low_rank.py",
        (Edit("add_low_rank", "$following = _next_adapter($adapter, $current)", "$following = NO_MORE"),), _ADAPTED,
    ),
    Mutant(
        "adapters left out where programs take several", "kernels/low_rank.py",
        (Edit("_write_inner_rows", "$skip = tl.num_programs(2)", ""),), _ADAPTED_TILES,
    ),
    Mutant(
        "ranks that an adapter lacks are read", "kernels/low_rank.py",
        (Edit("_add_ranks", "tl.load($p, mask=$selected[None, :] & ($r < $rank)[:, None], other=0.0)", "tl.load($p, mask=$selected[None, :], other=0.0)"),), _ADAPTED,
    ),
    Mutant(
        "a kernel between inner rows and their product", "experts/triton/packed.py",
        (Edit("PackedExperts.run_unsorted", "$h, $s = self._second_operand($m, $t, None, $memory)", ""),
         Edit("PackedExperts.run_unsorted", "$t = _with_changes($t, $m, $a, $d, $memory)", "$t = _with_changes($t, $m, $a, $d, $memory)\nh, h_scale = self._second_operand($m, $t, None, $memory)")),
        ("tests/cpu/test_low_rank.py::test_inner_rows_right_before_product",),
    ),
    Mutant(
        "the adapter of another token, unsorted", "kernels/low_rank.py",
        (Edit("adapter_at", "$row // TOP_K", "$row % TOP_K"),), _ADAPTED,
    ),
    Mutant(
        "an id that is no adapter changes nothing", "kernels/low_rank.py",
        (Edit("adapter_at", "tl.where($id == -1, NO_ADAPTER, UNKNOWN_ADAPTER)", "tl.where($id == -1, NO_ADAPTER, NO_ADAPTER)"),),
        ("tests/cpu/test_low_rank.py::test_unknown_adapters_make_their_rows_nan",),
    ),
    Mutant(
        "the scale of an adapter's first expert for all", "kernels/low_rank.py",
        (Edit("_inner_rows", "scale + ($s * $count + $p).to(tl.int64) * $adapters.experts + $expert", "scale + ($s * $count + $p).to(tl.int64) * $adapters.experts"),), _ADAPTED,
    ),
    Mutant(
        "input weight not applied before an adapter", "kernels/low_rank.py",
        (Edit("_inner_rows", "$acc *= $rows.factor[None, :]", ""),), ("tests/cpu/test_low_rank.py::test_router_weight_on_the_input",),
    ),
    Mutant(
        "merged shared experts have adapters", "kernels/low_rank.py",
        (Edit("add_changes", "$expert < $adapters.experts", "$expert < $expert + 1"),), ("tests/cpu/test_low_rank.py::test_experts_without_matrices_are_unchanged",),
    ),
    Mutant(
        "adapters dropped in large batches", "experts/triton/packed.py",
        (Edit("PackedExperts.run", "self.tiling.large($rows) if $batch.adapters is None else None", "self.tiling.large($rows)"),),
        ("tests/cpu/test_low_rank.py::test_adapters_never_take_the_large_flow",),
    ),
    Mutant(
        "scale of an adapter dropped", "adapters.py",
        (Edit("AdapterMatrices._change", "($x.float() @ $a.T) * self.scale[$s, $p, $e] @ $b", "($x.float() @ $a.T) @ $b"),), _ADAPTERS,
    ),
    Mutant(
        "adapters of gate and up swapped", "adapters.py",
        (Edit("PackedAdapters.pack", "('gate', 'up') if $gated else ('up',)", "('up', 'gate') if $gated else ('up',)"),), _ADAPTERS,
    ),
    Mutant(
        "an id that is no adapter changes nothing", "adapters.py",
        (Edit("AdapterMatrices.add_to", "$out[$span].masked_fill_($wrong[$span, None], torch.nan)", ""),), (f"{_ADAPTERS[0]}::test_unknown_ids",),
    ),
    Mutant(
        "adapters accepted over ranks", "planning.py",
        (Edit("Plan.with_adapters", "$adapters is not None and self.dispatcher != 'local'", "False"),), (f"{_ADAPTERS[0]}::test_plan_refuses",),
    ),
    Mutant(
        "adapter ids of the first tokens in every chunk", "stages/call.py",
        (Edit("Call.chunk", "self.adapter_ids[$rows]", "self.adapter_ids[: $rows.stop - $rows.start]"),),
        (f"{_ADAPTERS[0]}::test_chunks_copies_pickles_and_swaps",),
    ),
    Mutant(
        "what an adapter changes outside experts left out", "checkpoint/expert_adapters.py",
        (Edit("_refuse_others", "not experts_only", "False"),), (f"{_ADAPTERS[0]}::test_other_modules_and_layers",),
    ),
    Mutant(
        "one scale for all experts of an adapter", "checkpoint/expert_adapters.py",
        (Edit("_stack", "$scales[$expert] = $scale", "$scales[:] = $scale"),), (f"{_ADAPTERS[0]}::test_ranks_and_scales_by_pattern",),
    ),
    Mutant(
        "a batch of other sequences than were chosen for", "integrations/transformers/adapters.py",
        (Edit("_check_batch", "$choice.check($inputs.shape[0])", "pass"),), (f"{_ADAPTERS[0]}::test_two_layers_of_a_whole_model",),
    ),
    # The kernels around the products.
    Mutant(
        "router weight dropped", "kernels/weighted_sum.py",
        (Edit("weighted_sum_kernel", "tl.where($kept, $weight, $absent)", "tl.where($kept, 1.0, $absent)"),), _SMALL,
    ),
    Mutant(
        "the neighbouring slot's weight", "kernels/weighted_sum.py",
        (Edit(
            "weighted_sum_kernel",
            "weights + $token * $weight_stride + $k",
            "weights + $token * $weight_stride + ($k + 1) % TOP_K",
        ),), _SMALL,
    ),
    Mutant(
        "the input row of another token, unsorted", "kernels/tiles.py",
        (Edit("token_at", "$row // $TOP_K", "$row % $TOP_K"),), _DIRECT,
    ),
    Mutant(
        "ids of an unsorted batch not checked", "kernels/weighted_sum.py",
        (Edit("weighted_sum_kernel", "$experts if $UNSORTED else $count", "1 << 30 if $UNSORTED else $count"),), ("tests/cpu/test_direct.py::test_weighted_sum_by_ids_matches_slots",),
    ),
    Mutant(
        "bias used in the weights", "kernels/route.py",
        (Edit(
            "route_kernel",
            "_Lanes(expert=$expert, valid=$valid, logit=$logit, score=$score)",
            "_Lanes(expert=$expert, valid=$valid, logit=$logit, score=$score if bias is None else $score + tl.load(bias + $expert * bias_stride, mask=$valid, other=0.0).to(tl.float32))",
        ),), _SMALL,
    ),
    Mutant(
        "renormalize skipped", "kernels/route.py",
        (Edit("_renormalize", "tl.div_rn($weight, tl.zeros([$BLOCK_K], tl.float32) + $total)", "$weight"),), _SMALL,
    ),
    Mutant(
        "tie broken the other way", "kernels/route.py",
        (Edit(
            "_choose",
            "tl.min(tl.where($key == $best_key, lanes.expert, 2147483647), 0)",
            "tl.max(tl.where($key == $best_key, lanes.expert, -1), 0)",
        ),), _SMALL,
    ),
    Mutant(
        "routed scale dropped", "kernels/route.py",
        (Edit("route_kernel", "$weight = $weight * $scale", ""),), _SMALL,
    ),
    Mutant(
        "E4M3 scale of rows inverted", "kernels/scales.py",
        (Edit("scaled", "tl.div_rn(1.0, $scale)", "$scale"),), _SMALL,
    ),
    # Products whose rows do not depend on each other.
    Mutant(
        "all rows multiplied at once", "ops/linear.py",
        (Edit("linear", "_in_blocks($x, $weight)", "$x.to($weight.dtype) @ $weight.T"),), _LINEAR,
    ),
    Mutant(
        "the last term of a float32 weight dropped", "kernels/linear.py",
        (Edit("_product", "$found = dot(w2, x, $found, $ASM)", ""),), _LINEAR,
    ),
    Mutant(
        "the first part of a sum left out", "kernels/linear.py",
        (Edit("add_parts_kernel", "tl.static_range($PARTS)", "tl.static_range(1, $PARTS)"),), _LINEAR,
    ),
    Mutant(
        "a part not started anew", "kernels/linear.py",
        (Edit("_sum_over_k", "tl.where($starts, $product, $part + $product)", "$part + $product"),), _LINEAR,
    ),
    # Four-bit weights and E4M3 rows.
    Mutant(
        "row scale dropped", "kernels/w4a8.py",
        (Edit(
            "_scale_rows",
            "tl.load(weights.row_scale + $expert * ($row_tiles * 64) + tl.minimum($n, $last_row))[:, None]",
            "1.0",
        ),), _FOUR,
    ),
    Mutant(
        "row scale of the neighbouring row", "kernels/w4a8.py",
        (Edit(
            "_scale_rows",
            "tl.minimum($n, $last_row)",
            "tl.maximum(tl.minimum($n, $last_row) - 1, 0)",
        ),), _FOUR,
    ),
    Mutant(
        "scales of two quarters swapped (INT4, E4M3 rows)", "kernels/w4a8.py",
        (Edit(
            "_product_of_quarters",
            "$pair if $quarter % 2 else $pair << 16",
            "$pair << 16 if $quarter % 2 else $pair",
        ),), _FOUR,
    ),
    Mutant(
        "tokens of the neighbouring quarter (INT4, E4M3 rows)", "kernels/w4a8.py",
        (Edit("_product_of_quarters", "$quarter * $STEP", "($quarter ^ 1) * $STEP"),), _FOUR,
    ),
    Mutant(
        "halves of a quarter swapped (INT4, E4M3 rows)", "experts/triton/packing/w4a8.py",
        (Edit(
            "_int4_rows",
            "$codes.unflatten(-1, ($words.shape[-2], 4, 2, 4, 4)).permute(0, 1, 2, 3, 6, 4, 5, 7)",
            "$codes.unflatten(-1, ($words.shape[-2], 4, 2, 4, 4)).permute(0, 1, 2, 3, 6, 4, 5, 7).flip(6)",
        ),), _FOUR,
    ),
    # Activation order.
    Mutant(
        "g_idx ignored", "formats/int_affine.py",
        (Edit(
            "_Ordered._groups",
            "self.group_of.reshape(-1, self.shape[-1]).long()",
            "self.group_of.reshape(-1, self.shape[-1]).long().sort(-1).values",
        ),), ("tests/cpu/test_published.py",),
    ),
    Mutant(
        "g_idx out of range taken", "formats/integers.py",
        (Edit("_group_index", "$low < 0 or $high >= $groups", "False"),), ("tests/cpu/test_published.py", "tests/cpu/test_published_scales.py"),
    ),
    # Codes that look numbers up.
    Mutant(
        "the smaller term of a looked up number dropped", "kernels/grouped_gemm.py",
        (Edit("_add_table_lanes", "tl.static_range(2)", "tl.static_range(1)"),), ("tests/cpu/test_grouped_gemm.py::test_codes_that_look_numbers_up",),
    ),
    Mutant(
        "numbers of gate looked up for up", "kernels/grouped_gemm.py",
        (Edit(
            "_sum_over_k",
            "_add_block($up, $up_unit, $block, $FORMAT, $TILE, $ACCUMULATORS - 1, $ASM)",
            "_add_block($up, $up_unit, $block, $FORMAT, $TILE, 0, $ASM)",
        ),), ("tests/cpu/test_grouped_gemm.py::test_codes_that_look_numbers_up",),
    ),
    Mutant(
        "terms of a looked up number swapped", "experts/triton/packing/bnb4.py",
        (Edit(
            "pack_bnb4",
            "(($payload.table - $first.float()).to($first.dtype), $first)",
            "(($payload.table - $first.float()).to($first.dtype), $first.flip(-1))",
        ),), ("tests/cpu/test_grouped_gemm.py::test_codes_that_look_numbers_up",),
    ),
    Mutant(
        "the scale of the neighbouring half", "kernels/decode.py",
        (Edit("_load_words", "$WORDS // 2", "$WORDS // 4"),), ("tests/cpu/test_grouped_gemm.py::test_codes_that_look_numbers_up",),
    ),
    # Sums in units of the group that is added last.
    Mutant(
        "the unit of a sum forgotten", "kernels/grouped_gemm.py",
        (Edit("_add_quarters", "$unit = $factors[$quarter]", ""),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "a sum left in its unit", "kernels/grouped_gemm.py",
        (Edit("_scale_and_add_bias", "$unit * $DIVISOR", "$DIVISOR"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "gate in the unit of up", "kernels/grouped_gemm.py",
        (Edit("_sum_over_k", "return $gate, $gate_unit, $up, $up_unit", "return $gate, $up_unit, $up, $up_unit"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "codes of a group without a unit kept", "experts/triton/packing/units.py",
        (Edit("flush_codes", "torch.where($gone, $zeros, $codes)", "$codes"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "the unit of a K block forgotten", "kernels/grouped_gemm.py",
        (Edit("_add_with_one_factor", "return wait_for_products(product, ASM), factor", "return wait_for_products(product, ASM), unit"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "minima in the unit of codes", "kernels/grouped_gemm.py",
        (Edit(
            "_add_quarters",
            "(dot($operand, $block.sums, rescale_sum($acc, $unit, $factor, $ASM), $ASM), $factor)",
            "(dot($operand, $block.sums, rescale_sum($acc, $unit, $factor, $ASM), $ASM), $unit)",
        ),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "integers a 64th", "kernels/grouped_gemm.py",
        (Edit("_scale_and_add_bias", "integer_divisor($tokens.x.dtype.element_ty == tl.float16)", "1.0"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "minima beside a zero half kept", "experts/triton/packing/gguf.py",
        (Edit("_scale_words", "$steps * ($halves == $kept).unsqueeze(1)", "$steps"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "a step of zero for a unit", "experts/triton/packing/gguf.py",
        (Edit("_scale_words", "$steps + ($steps == 0)", "$steps"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "ones beyond the blocks of a file forgotten", "experts/triton/packing/gguf.py",
        (Edit(
            "_pad_words",
            "functional.pad($scales, (0, $short), value=1.0)",
            "functional.pad($scales, (0, $short))",
        ),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    # Beside float16 tokens.
    Mutant(
        "what lanes in float16 leave of a scale forgotten", "experts/triton/packing/mx.py",
        (Edit("pack_mx", "_REMAINDER[$eight, $half]", "1"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "what lanes in float16 leave of a global scale forgotten", "experts/triton/packing/mx.py",
        (Edit("pack_nvfp4", "128.0 if $half else 512.0", "512.0"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "the power of two of a row in float16 forgotten", "experts/triton/packing/plain.py",
        (Edit("_to_half", "$scale.copy_(power_of_two($power))", "$scale.fill_(1.0)"),), ("tests/cpu/test_grouped_gemm.py",),
    ),
    Mutant(
        "an exponent's bit of the third quarter lost (float16, as on a device)", "kernels/decode_ptx.py",
        (Edit("E2M1_TO_FP16", "$4, 6; and.b32 code, code, 0x0E000E00;", "$4, 6; and.b32 code, code, 0x06000600;", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "sign of the last quarter lost (float16, as on a device)", "kernels/decode_ptx.py",
        (Edit("E2M1_TO_FP16", "shl.b32 sign, $4, 2;", "shl.b32 sign, $4, 3;", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "upper codes of a byte a bit too low (as on a device)", "kernels/decode_ptx.py",
        (Edit("INT4_TO_BF16", "0x7D007D00", "0x7D807D80", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "a byte read twice (as on a device)", "kernels/decode_ptx.py",
        (Edit("INT8_TO_BF16", "$2, 0, 0x4341;", "$2, 0, 0x4240;", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "a byte read twice (float16, as on a device)", "kernels/decode_ptx.py",
        (Edit("INT8_TO_FP16", "$2, base, 0x5351;", "$2, base, 0x5250;", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "a sixteenth of base forgotten (float16, as on a device)", "kernels/decode_ptx.py",
        (Edit("INT4_TO_FP16", "minus_64, $8, plus_960;", "minus_64, $8, sixteenth;", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "E4M3 a bit too low (float16, as on a device)", "kernels/decode_ptx.py",
        (Edit("E4M3_TO_FP16", "shl.b32 code, $2, 7;", "shl.b32 code, $2, 6;", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    Mutant(
        "E4M3 without a scale times 2^7 (float16, as on a device)", "kernels/decode_ptx.py",
        (Edit("E4M3_TO_FP16_UNSCALED", "0x5C005C00", "0x58005800", text=True),), ("tests/cpu/test_decoding_text.py",),
    ),
    # Quarters of a K block as one product.
    Mutant(
        "quarters joined in another order", "kernels/decode.py",
        (Edit(
            "join_quarters",
            "tl.join(tl.join($a0, $a2), tl.join($a1, $a3))",
            "tl.join(tl.join($a0, $a1), tl.join($a2, $a3))",
        ),), ("tests/cpu/test_grouped_gemm.py::test_experts_against_the_reference",),
    ),
    Mutant(
        "gate read again for up ahead of its product", "kernels/grouped_gemm.py",
        (Edit(
            "_sum_over_k",
            "up_w, up_w1, up_w2 = _load_weights(up_ptr, left, FORMAT)\n            block = _Block(gate_w",
            "up_w, up_w1, up_w2 = gate_w, gate_w1, gate_w2\n            block = _Block(gate_w",
            text=True,
        ),), ("tests/cpu/test_grouped_gemm.py::test_experts_against_the_reference",),
    ),
    # The shared expert.
    Mutant(
        "shared expert dropped", "execution/executor.py",
        (Edit("Executor._shared_expert", "self._shared is None", "True"),), _HOST[1:],
    ),
    Mutant(
        "merged: routed scaling factor on the shared expert", "ops/route_wide.py",
        (Edit("append_shared_experts", "torch.ones_like($more)", "torch.full_like($more, 2.5, dtype=torch.float32)"),), ("tests/cpu/test_merged_shared.py::test_large_shared_expert_is_split",),
    ),
    Mutant(
        "merged: kernel doubles the shared expert", "kernels/route.py",
        (Edit(
            "widen_kernel",
            "tl.load($weights + $token * $weights_stride + $slot, mask=$given, other=1.0)",
            "tl.load($weights + $token * $weights_stride + $slot, mask=$given, other=2.0)",
        ),), ("tests/cpu/test_merged_shared.py::test_a_kernel_writes_the_further_slots",),
    ),
    Mutant(
        "merged: foreign id reaches the shared expert", "ops/route_wide.py",
        (Edit("append_shared_experts", "($ids < -1) | ($ids >= $experts)", "$ids < -1"),), ("tests/cpu/test_merged_shared.py::test_caller_routing_reaches_only_routed_experts",),
    ),
    Mutant(
        "merged: kernel lets a foreign id reach the shared expert", "kernels/route.py",
        (Edit("widen_kernel", "($chosen >= -1) & ($chosen < $experts)", "$chosen >= -1"),), ("tests/cpu/test_merged_shared.py::test_a_kernel_writes_the_further_slots",),
    ),
    Mutant(
        "merged: gate and up swapped in the pieces", "stages/shared.py",
        (Edit(
            "_split_by_width",
            "$shared.gate_up",
            "replace($shared.gate_up, **{k: t.flip(1) for k, t in $shared.gate_up.tensors().items()})",
        ),), ("tests/cpu/test_merged_shared.py::test_large_shared_expert_is_split",),
    ),
    Mutant(
        "merged: columns of another piece", "stages/shared.py",
        (Edit("_split_by_width", "$shared.down.columns($start, $stop)", "$shared.down.columns(*slices[$start == 0])"),), ("tests/cpu/test_merged_shared.py::test_large_shared_expert_is_split",),
    ),
    Mutant(
        "merged: other blocks taken for alike", "stages/shared.py",
        (Edit("_concatenated", "$storage != $routed_storage", "False"),), ("tests/cpu/test_merged_shared.py::test_incompatible_shared_weights_refused",),
    ),
    Mutant(
        "merged: a swap drops the shared expert", "stages/shared.py",
        (Edit("check_shared_unchanged", "$old.merged_shared_experts or $new.merged_shared_experts", "False"),), ("tests/cpu/test_merged_shared.py::test_a_swap_keeps_the_shared_expert",),
    ),
    Mutant(
        "merged: over ranks too", "sharing.py",
        (Edit("_cannot_merge", "$dispatcher != 'local'", "False"),), ("tests/cpu/test_merged_shared.py::test_plan_describes_merged_shared_expert",),
    ),
    Mutant(
        "shared expert's gate dropped", "stages/shared.py",
        (Edit("SharedExpert.__call__", "self.gate is None", "True"),), _HOST[1:],
    ),
    # Tensor-parallel slices.
    Mutant(
        "tensor-parallel slice of the next rank", "checkpoint/layout.py",
        (Edit(
            "local_range",
            "return (($placement.tp_rank * $width, ($placement.tp_rank + 1) * $width), $width)",
            "start = ($placement.tp_rank + 1) % $placement.tp_size * $width\nreturn ((start, start + $width), $width)",
        ),), _LOAD,
    ),
    Mutant(
        "tensor-parallel slice off by one row", "checkpoint/layout.py",
        (Edit(
            "local_range",
            "return (($placement.tp_rank * $width, ($placement.tp_rank + 1) * $width), $width)",
            "start = min($placement.tp_rank * $width + 1, intermediate - $width)\nreturn ((start, start + $width), $width)",
        ),), _LOAD,
    ),
    Mutant(
        "down bias added on every rank", "checkpoint/loader.py",
        (Edit("_read_biases", "torch.zeros_like($down) if $placement.tp_rank else $down", "$down"),), _LOAD,
    ),
    # Checks that look away.
    Mutant(
        "forbidden scales loaded and audited as fine", "checkpoint/layout.py",
        (Edit("read_matrix", "[_scale_error($source, $stored)] if bool($payload.faults()) else []", "[]"),), ("tests/cpu/test_attacks.py", "tests/cpu/test_loader.py"),
    ),
    Mutant(
        "overlapping tensors believed", "checkpoint/header.py",
        (Edit("_check_coverage", "$info.start < $at", "False"),), ("tests/cpu/test_hostile.py",),
    ),
    Mutant(
        "expert ids not checked", "ops/route.py",
        (Edit("_refuse_bad_ids", "($ids < -1) | ($ids >= $experts)", "$ids < -1"),), _ROUTE,
    ),
    Mutant(
        "queries of Mixtral left in llama.cpp's order", "integrations/transformers/gguf.py",
        (Edit("transformers_tensor", "$model.interleaved", "False"),), _WHOLE_GGUF,
    ),
    Mutant(
        "keys of Mixtral turned by the heads of queries", "integrations/transformers/gguf.py",
        (Edit("transformers_tensor", "{'_kv' * (kind == 'attn_k')}", "", text=True),), _WHOLE_GGUF,
    ),
    Mutant(
        "YaRN's factor left out", "integrations/transformers/gguf.py",
        (Edit("_rope", "$config.number('rope.scaling.factor')", "1.0"),), _WHOLE_GGUF,
    ),
    Mutant(
        "a matrix outside the experts decoded twice", "checkpoint/dense_weights.py",
        (Edit(
            "DenseWeight.read",
            "read_whole(self.checkpoint, self.source, self.stored).to($device).decode($dtype)",
            "read_whole(self.checkpoint, self.source, self.stored).to($device).decode($dtype).square()",
        ),), ("tests/cpu/test_whole_quantised.py",),
    ),
    # NaN, and ids that are no experts, must be seen.
    Mutant(
        "a NaN score adds nothing", "ops/route.py",
        (Edit(
            "route",
            "$ids.masked_fill($judged.isnan().any(dim=1, keepdim=True), $_NO_EXPERT)",
            "$ids.masked_fill($judged.isnan().any(dim=1, keepdim=True), -1)",
        ),), _ROUTE,
    ),
    Mutant(
        "a NaN bias chooses experts", "ops/route.py",
        (Edit("route", "$scores if $bias is None else $choice", "$scores"),), _ROUTE,
    ),
    Mutant(
        "an unknown token adds nothing", "ops/route.py",
        (Edit(
            "_look_up",
            "$rows.masked_fill($outside.unsqueeze(1), $_NO_EXPERT)",
            "$rows.masked_fill($outside.unsqueeze(1), -1)",
        ),), _ROUTE,
    ),
    Mutant(
        "an unknown entry of the hash table adds nothing", "ops/route.py",
        (Edit(
            "route",
            "$ids.masked_fill(($ids < -1) | ($ids >= $experts), $_NO_EXPERT)",
            "$ids.masked_fill(($ids < -1) | ($ids >= $experts), -1)",
        ),), _ROUTE,
    ),
    Mutant(
        "infinite logits clamped before they are scored", "ops/route.py",
        (Edit("route", "$logits.to(torch.float32)", "$logits.to(torch.float32).clamp(-_LARGEST, _LARGEST)"),), _ROUTE,
    ),
    Mutant(
        "checked lets a NaN row through", "ops/route.py",
        (Edit(
            "route",
            "_refuse_bad_rows(~$chosen.topk_weights.isfinite().all(dim=1))",
            "_ = ~$chosen.topk_weights.isfinite().all(dim=1)",
        ),), _ROUTE,
    ),
    Mutant(
        "an id that is no expert adds nothing", "ops/permute.py",
        (Edit("_reference", "torch.where($ids == -1, -1, -2)", "torch.where($ids == -1, -1, -1)"),), ("tests/cpu/test_permute.py", "tests/cpu/test_nan.py"),
    ),
    Mutant(
        "an id that is no expert adds nothing", "ops/weighted_sum.py",
        (Edit("_reference", "torch.nan", "0.0"),), ("tests/cpu/test_weighted_sum.py", "tests/cpu/test_nan.py"),
    ),
    Mutant(
        "a NaN weight adds nothing", "ops/weighted_sum.py",
        (Edit("_reference", "$weights.float()", "$weights.float().nan_to_num(0.0)"),), ("tests/cpu/test_weighted_sum.py", "tests/cpu/test_nan.py"),
    ),
    Mutant(
        "a NaN weight on the input adds nothing", "ops/permute.py",
        (Edit(
            "_reference",
            "$input_weights.reshape(-1).to(torch.float32)",
            "$input_weights.reshape(-1).to(torch.float32).nan_to_num(0.0)",
        ),), _NAN,
    ),
    Mutant(
        "a NaN score adds nothing", "kernels/route.py",
        (Edit("_choose", "tl.where($has_nan, -2, $chosen)", "tl.where($has_nan, -1, $chosen)"),), _SMALL,
    ),
    Mutant(
        "a NaN bias chooses experts", "kernels/route.py",
        (Edit("route_kernel", "checked = choice", "checked = score"),), _SMALL,
    ),
    Mutant(
        "an unknown entry of the hash table adds nothing", "kernels/route.py",
        (Edit(
            "_look_up",
            "tl.where($known & ($expert >= -1) & ($expert < $experts), $expert, -2)",
            "tl.where($known & ($expert >= -1) & ($expert < $experts), $expert, -1)",
        ),), _SMALL,
    ),
    Mutant(
        "an id that is no expert adds nothing", "kernels/permute.py",
        (Edit("_experts", "tl.where($found == -1, -1, -2)", "tl.where($found == -1, -1, -1)"),), _SMALL,
    ),
    Mutant(
        "an id that is no expert adds nothing, among many", "kernels/permute.py",
        (Edit("count_kernel", "tl.where($kept, $expert, $absent)", "tl.where($kept, $expert, -1)"),), _SMALL,
    ),
    Mutant(
        "an id that is no expert adds nothing", "kernels/weighted_sum.py",
        (Edit("weighted_sum_kernel", "float('nan')", "0.0"),), ("tests/cpu/test_small_kernels.py", "tests/cpu/test_direct.py"),
    ),
    Mutant(
        "NaN in a group of rows hidden", "ops/quantize.py",
        (Edit("_Fp8.quantize", "$scale.masked_fill(~$finite, torch.nan)", "$scale"),), ("tests/cpu/test_quantize.py", "tests/cpu/test_nan.py"),
    ),
    Mutant(
        "NaN in a group of rows hidden", "kernels/quantize.py",
        (Edit("_encode", "tl.where($finite, $scale, float('nan'))", "$scale"),), ("tests/cpu/test_small_kernels.py", "tests/cpu/test_direct.py"),
    ),
    Mutant(
        "codes at the row of a token's first assignment", "kernels/quantize.py",
        (Edit("e4m3_to_slots_kernel", "_slot_at($rows, $k, BLOCK_K)", "_slot_at($rows, $k - $k, BLOCK_K)"),),
        ("tests/cpu/test_scatter.py",),
    ),
    Mutant(
        "codes copied with the scale of the first token", "kernels/quantize.py",
        (Edit("copy_to_slots_kernel", "scales + token * groups + group", "scales + group"),),
        ("tests/cpu/test_scatter.py",),
    ),
    Mutant(
        "a format without a kernel written as another", "ops/quantize.py",
        (Edit("ActivationFormat.write", "raise _no_kernel(self)", "_CASTS[0].write(source, out)"),), ("tests/cpu/test_small_kernels.py::test_activation_format_without_kernel_refused",),
    ),
    # Activations in eight bits.
    Mutant(
        "activations left in 32 bits", "experts/reference.py",
        (Edit(
            "_one_expert",
            "between.round_trip(hidden)",
            "hidden",
        ),), ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "input left in 32 bits", "experts/reference.py",
        (Edit("_one_expert", "form.round_trip(x)", "$x.float()"),), ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "scales across of the first K block", "kernels/w4a8.py",
        (Edit("_sum_over_k", "DEPTH * scale_stride", "0 * scale_stride"),), _FOUR,
    ),
    Mutant(
        "tokens of a step's first K block", "kernels/w4a8.py",
        (Edit(
            "_load_block",
            "_load_tokens(pointers.x + $AT * (2 * $HALF), $valid, $BLOCK_T)",
            "_load_tokens(pointers.x + 0 * (2 * $HALF), $valid, $BLOCK_T)",
        ),), _FOUR,
    ),
    Mutant(
        "the last of an odd number of K blocks dropped", "kernels/w4a8.py",
        (Edit("_sum_over_k", "FORMAT.k_blocks % DEPTH", "0"),), _FOUR,
    ),
    Mutant(
        "scales across in the order of the tokens", "experts/triton/packed.py",
        (Edit(
            "PackedExperts._run_sorted",
            "transpose_scales($x_scale, $source, used=_used_rows($batch), memory=$memory)",
            "transpose_scales($x_scale, None, used=_used_rows($batch), memory=$memory)",
        ),), _FOUR,
    ),
    # Scales of activations that a checkpoint has.
    Mutant(
        "the calibrated scale of gate and up used for down", "ops/quantize.py",
        (Edit("formats_within", "$reach[1]", "$reach[0]"),), _STATIC,
    ),
    Mutant(
        "the calibrated scale of gate and up used for down", "experts/triton/packed.py",
        (Edit("PackedExperts._second_operand", "self.forms[1]", "self.forms[0]"),), _STATIC,
    ),
    Mutant(
        "the smallest calibrated scale of all experts", "checkpoint/activation_scales.py",
        (Edit(
            "reach_of",
            "(max($found.gate_up) * $first, max($found.down) * $second)",
            "(min($found.gate_up) * $first, min($found.down) * $second)",
        ),), _STATIC,
    ),
    Mutant(
        "a calibrated scale that divides multiplied", "checkpoint/activation_scales.py",
        (Edit("_read_scale", "$values.reciprocal()", "$values"),), _STATIC,
    ),
    Mutant(
        "a rank's own calibrated scales", "loading.py",
        (Edit(
            "_load_experts",
            "($source for $_, $source in $layer.sources())",
            "($source for e, $source in $layer.sources() if e in placement.expert_ids)",
        ),), _STATIC,
    ),
    Mutant(
        "an expert without a calibrated scale left out", "checkpoint/activation_scales.py",
        (Edit("reach_of", "$found.missing", "$found.missing and (not $found.down)"),), _STATIC,
    ),
    Mutant(
        "a row's own scale instead of the calibrated one", "kernels/scales.py",
        (Edit("scaled", "tl.where($finite, $static_scale, $scale)", "$scale + 0.0 * $static_scale"),), ("tests/cpu/test_small_kernels.py::test_codes_of_a_calibrated_scale",),
    ),
    # NVFP4 rows for 16-bit tensor cores, and scales of each expert.
    Mutant(
        "the sign of an E2M1 number lost", "kernels/quantize.py",
        (Edit("_e2m1_number", "$code & 8", "$code & 0"),), (f"{_NVFP4}::test_decoded_rows_are_the_codes",),
    ),
    Mutant(
        "the first row of an expert with the scale before it", "kernels/quantize.py",
        (Edit("nvfp4_decoded_kernel", "$end <= $row", "$end < $row"),), (f"{_NVFP4}::test_kernel_uses_each_experts_scale",),
    ),
    Mutant(
        "the scale of NVFP4 rows forgotten", "ops/quantize.py",
        (Edit("_DecodedNvFp4.quantize", "scales=rows.global_scale", "scales=torch.ones(x.shape[0], 1)", text=True),),
        (f"{_NVFP4}::test_decoded_rows_are_the_codes",),
    ),
    Mutant(
        "rows between the products rounded before they are quantised", "experts/triton/packed.py",
        (Edit("PackedExperts._middle", "$form.exact_rows", "not $form.exact_rows"),), (f"{_NVFP4}::test_experts_match_emulation",),
    ),
    Mutant(
        "the experts' scales of gate and up used for down", "experts/triton/packed.py",
        (Edit("PackedExperts._form_of", "self.expert_scales[$product]", "self.expert_scales[0]"),), (f"{_NVFP4}::test_experts_have_separate_scales",),
    ),
    Mutant(
        "scales left behind by a moved expert", "experts/triton/packed.py",
        (Edit("PackedExperts._map_tensors", "change($scales[0])", "$scales[0]"),), (f"{_NVFP4}::test_scales_move_with_their_experts",),
    ),
    Mutant(
        "the scales of the first experts on every rank", "checkpoint/activation_scales.py",
        (Edit("Reach.fields", "self.by_expert[list($slots)]", "self.by_expert[: len($slots)]"),), (f"{_NVFP4}::test_checkpoint_scales_of_each_expert",),
    ),
    Mutant(
        "unequal calibrated scales accepted", "checkpoint/activation_scales.py",
        (Edit("reach_of", "$scales.unequal and $request.unequal == 'refuse'", "False"),), ("tests/cpu/test_loader_cases.py::test_unequal_activation_scales_are_refused",),
    ),
    Mutant(
        "negative inputs not calibrated", "commands/calibrate.py",
        (Edit("_watched", "$values.abs().amax()", "$values.amax()"),), _CALIBRATE,
    ),
    Mutant(
        "an expert without tokens calibrated to nothing", "commands/calibrate.py",
        (Edit("_filled", "torch.where($inputs > 0, $inputs, $largest)", "$inputs"),), _CALIBRATE,
    ),
    Mutant(
        "the input of down calibrated after gate and up", "commands/calibrate.py",
        (Edit("_watched", "('down', $middle)", "('down', $rows)"),), _CALIBRATE,
    ),
    Mutant(
        "a divisor of compressed-tensors written as a multiplier", "commands/calibrate.py",
        (Edit("_stored_scale", "$scale.reciprocal()", "$scale"),), _CALIBRATE,
    ),
    # Weights that an engine passes one at a time.
    Mutant(
        "gate and up of one tensor swapped", "checkpoint/parameters.py",
        (Edit("MatrixParameters._copy", "self._cut_part(piece, part, half)", "self._cut_part(piece, part, piece.halves[-1 - half] if piece.fused else half)"),), _BUILDER,
    ),
    Mutant(
        "replicas of an expert left unfilled", "checkpoint/layer_parameters.py",
        (Edit("LayerParameters._targets", "slots_of.get(expert, ())", "slots_of.get(expert, ())[:1]"),), _BUILDER,
    ),
    Mutant(
        "static scales of local experts alone", "checkpoint/layer_parameters.py",
        (Edit("LayerParameters.experts", "range(self.spec.num_experts)", "list(self._slots_of)"),), _BUILDER,
    ),
    Mutant(
        "a checksum that does not tell shards apart", "runtime/checksum.py",
        (Edit("combined_checksum", "tuple(key)", "(key[0], key[2])"),), _BUILDER,
    ),
    Mutant(
        "static scales beyond those of the layer accepted", "weight_updater.py",
        (Edit("WeightUpdater.finish", "self._check_reach()", "None"),), _BUILDER,
    ),
    Mutant(
        "new experts in another layout accepted", "experts/base.py",
        (Edit("_difference", "first == second", "True"),), _BUILDER,
    ),
    # Experts that move.
    Mutant(
        "a checksum that forgets the pieces before", "balance/checksum.py",
        (Edit(
            "checksum",
            "torch.arange($at + $start + 1, $at + $start + 1 + $own.numel(), device=$own.device)",
            "torch.arange($start + 1, $start + 1 + $own.numel(), device=$own.device)",
        ),), _SUM,
    ),
    Mutant(
        "a checksum of what arrived compared with itself", "balance/mover.py",
        (Edit("Mover._verify", "checksum($parts) == $expected", "checksum($parts) == checksum($parts)"),), _MOVE,
    ),
    Mutant(
        "the slot of the destination sent", "balance/mover.py",
        (Edit("Mover._exchange", "$move.source_slot if $send else $move.slot", "$move.slot"),), _MOVE,
    ),
    Mutant(
        "an expert dropped before its copy is there", "balance/mover.py",
        (Edit(
            "_drop_moved",
            "{$expert for $own, $target in zip($held, $targets, strict=True) for $expert in $own if $expert in $target}",
            "{$expert for $own, $target in zip($held, $targets, strict=True) for $expert in $target}",
        ),), _ROUNDS,
    ),
    Mutant(
        "a switch that keeps the number of copies", "parallel/expert_map.py",
        (Edit("ExpertMap.switch", "self.replica_counts.copy_($tables.replica_counts)", ""),), ("tests/cpu/test_expert_map.py",),
    ),
    Mutant(
        "scales of rows left behind", "experts/triton/matrix.py",
        (Edit(
            "PackedMatrix.map_tensors",
            "map_tensors(self, $change, 'values', 'scale', 'row_scale', 'bias', 'order')",
            "map_tensors(self, $change, 'values', 'scale', 'bias', 'order')",
        ),), ("tests/cpu/test_slots.py",),
    ),
    # GGUF blocks below four bits.
    Mutant(
        "the third bit of a code left out (Q3_K)", "formats/gguf_codes.py",
        (Edit("q3_k", "_fields($raw[:, 32:96], 2, 32) | (_fields($raw[:, :32], 1, 32) << 2)", "_fields($raw[:, 32:96], 2, 32)"),), _GGUF,
    ),
    Mutant(
        "upper bits of a step one too low (Q3_K)", "formats/gguf_codes.py",
        (Edit("q3_k_steps", "_fields($raw[:, 104:108], 2, 4) << 4", "_fields($raw[:, 104:108], 2, 4) << 3"),), _GGUF,
    ),
    Mutant(
        "steps of codes and minima swapped (Q2_K)", "formats/gguf_codes.py",
        (Edit("q2_k_steps", "torch.stack(($raw[:, :16] & 15, $raw[:, :16] >> 4), dim=-1)", "torch.stack(($raw[:, :16] >> 4, $raw[:, :16] & 15), dim=-1)"),), _GGUF,
    ),
    Mutant(
        "minima added to codes (GGUF)", "formats/gguf.py",
        (Edit("_decode", "-$lines[..., 1:]", "$lines[..., 1:]"),), _GGUF,
    ),
    Mutant(
        "the eighth sign left out (IQ2, IQ3)", "formats/gguf_codes.py",
        (Edit("_sign_bytes", "($seven | ($parity << 7)).to(torch.uint8)", "$seven.to(torch.uint8)"),), _GGUF,
    ),
    Mutant(
        "signs in reverse order (IQ2, IQ3)", "formats/gguf_codes.py",
        (Edit("_with_signs", "torch.arange(8, dtype=torch.uint8, device=$signs.device)", "torch.arange(8, dtype=torch.uint8, device=$signs.device).flip(0)"),), _GGUF,
    ),
    Mutant(
        "the scale of the neighbouring 32 columns (IQ2_XXS)", "formats/gguf_codes.py",
        (Edit("iq2_xxs_steps", "$raw[:, 9::8] >> 4", "$raw[:, 9::8].roll(1, 1) >> 4"),), _GGUF,
    ),
    Mutant(
        "a shift of each eighth column (IQ1_M)", "formats/gguf_codes.py",
        (Edit("iq1_m", "($more & 8).repeat_interleave(8, dim=1)", "($more & 8).repeat(1, 8)"),), _GGUF,
    ),
    Mutant(
        "bytes of a half swapped (IQ1_M)", "formats/gguf_codes.py",
        (Edit("iq1_m_half", "$four[:, 0::2] | ($four[:, 1::2] << 4)", "$four[:, 1::2] | ($four[:, 0::2] << 4)"),), _GGUF,
    ),
    Mutant(
        "digits in reverse order (TQ1_0)", "formats/gguf_codes.py",
        (Edit("tq1_0", "[1, 3, 9, 27, 81]", "[81, 27, 9, 3, 1]"),), _GGUF,
    ),
    Mutant(
        "upper bits of a grid first", "formats/gguf_grids.py",
        (Edit("grid_of", "torch.arange(0, 8, $grid.bits, dtype=torch.uint8)", "torch.arange(0, 8, $grid.bits, dtype=torch.uint8).flip(0)"),), _GGUF,
    ),
    Mutant(
        "gate and up of one kind, whatever up is", "checkpoint/loader.py",
        (Edit("_read_payloads", "layer.stored_as($source)", "layer.stored if $which == 'up' else layer.stored_as($source)"),),
        ("tests/cpu/test_gguf.py::test_gate_and_up_of_two_kinds",),
    ),
    # Families derived from a class of transformers.
    Mutant(
        "gate and up swapped (derived)", "models/derived/stored_names.py",
        (Edit("_projection", "$row < $half", "$row >= $half"),), _DERIVED,
    ),
    Mutant(
        "stacks read output-first (derived)", "models/derived/stored_names.py",
        (Edit("_sort_expert_tensor", "$found.transposed = $turned", "$found.transposed = False"),), _DERIVED,
    ),
    Mutant(
        "gate and up rows in blocks, though they alternate (derived)", "models/derived/stored_names.py",
        (Edit("_sort_expert_tensor", "$found.interleaved = True", "$found.interleaved = False"),), _DERIVED,
    ),
    Mutant(
        "the scale of routed experts left out (derived)", "models/derived/proposal.py",
        (Edit("_find_routing", "replace($rule, scale=_named_scale($factor, $numbers))", "$rule"),), _DERIVED,
    ),
    Mutant(
        "the scale of a sum of experts left out (derived)", "models/derived/proposal.py",
        (Edit("_proved", "replace($routing, scale=$routing.scale * $factor)", "$routing"),), _DERIVED,
    ),
    Mutant(
        "a shared expert's gate dropped (derived)", "models/derived/proposal.py",
        (Edit("_shared_candidates", "$roles['shared_gate'] = $gate", "pass"),), _DERIVED,
    ),
    Mutant(
        "a block that differs accepted (derived)", "models/derived/proposal.py",
        (Edit("_TOLERANCE", "2e-5", "2.0"),), _DERIVED,
    ),
    Mutant(
        "tensors that nothing reads accepted (derived)", "models/derived/proposal.py",
        (Edit("_unused", "$name not in $used", "$name not in $used and False"),), _DERIVED,
    ),
    Mutant(
        "the bias of a block left out (derived)", "models/derived/parallel_experts.py",
        (Edit("ParallelExpertsBlock.forward", "self.experts($flat, $ids, $weights).view($x.shape) + self.bias", "self.experts($flat, $ids, $weights).view($x.shape)"),), _DERIVED,
    ),
    # Scales of activations that a caller passes.
    Mutant(
        "the scale of the first token for all rows between the products", "experts/triton/packed.py",
        (Edit("PackedExperts._form_of", "$batch.source.clamp(0, $batch.x.shape[0] - 1)", "$batch.source * 0"),), _MIDDLE,
    ),
    Mutant(
        "scales of the rows' order for those of tokens", "experts/reference.py",
        (Edit("_one_expert", "$batch.middle_scale[$source]", "$batch.middle_scale[:len($source)]"),), _MIDDLE,
    ),
    Mutant(
        "scales of x also between the products", "stages/given_scales.py",
        (Edit("given_scales", "_by_row('a2_scale', $second, $x, $intermediate_size, $form.group)", "_by_row('a2_scale', $first, $x, $intermediate_size, $form.group)"),), _MIDDLE,
    ),
    Mutant(
        "one number for x also between the products", "stages/given_scales.py",
        (Edit("_static", "$middle = float($second) * $form.max_value", "$middle = float(first) * $form.max_value"),), _MIDDLE,
    ),
    Mutant(
        "large tiles quantise rows again", "experts/triton/packed.py",
        (Edit("PackedExperts._run_large", "$batch.middle_scale is not None", "False"),), _MIDDLE,
    ),
    # New weights for a layer that serves.
    Mutant(
        "one checksum for all matrices of a buffer", "weight_updater.py",
        (Edit("WeightUpdater._sum_copies", "$copy.number", "$copy.number * 0"),), _BUILDER,
    ),
    Mutant(
        "experts of later batches in the slots of the first", "weight_updater.py",
        (Edit("WeightUpdater._packed_batches", "$slots[$start:$start + $step]", "$slots[:min($step, len($slots) - $start)]"),), _BUILDER,
    ),
    Mutant(
        "a shared expert that is not updated", "weight_updater.py",
        (Edit("WeightUpdater._write_shared", "layer.shared.experts.put_all([0], $packed)", "pass"),), _BUILDER,
    ),
    Mutant(
        "a router's weight without the scale of its input", "weight_updater.py",
        (Edit("WeightUpdater._write_dense", "$tensor = $router.weight", "pass"),), _BUILDER,
    ),
    Mutant(
        "an update without some experts accepted", "weight_updater.py",
        (Edit("WeightUpdater._complete_slots", "parameters.missing(dense=True)", "parameters.missing_shared_parts()"),), _BUILDER,
    ),
    # Four-bit weights decoded in registers, every recipe.
    Mutant(
        "codes of the first column for both of a pair (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("integers_of", "bytes & 0x00F000F0u", "bytes & 0x000F00F0u", text=True),), _W4_RECIPES,
    ),
    Mutant(
        "zero points of the other row of a thread (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("decode", "minus_zero_of(codes.scales[h])", "minus_zero_of(codes.scales[1 - h])", text=True),), _W4_RECIPES,
    ),
    Mutant(
        "the first of two scales for both quarters (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("factor_of", "pass % 2 ? word & 0xFFFF0000u : word << 16", "word << 16", text=True),), _W4_RECIPES,
    ),
    Mutant(
        "the zero point of INT4 read as 7 (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("minus_zero_of", "0xBE00BE00u", "0xBDE0BDE0u", text=True),), _W4_RECIPES,
    ),
    Mutant(
        "E4M3 scales of NVFP4 shifted by one (registers)", "kernels/w4_decode_bf16.cuh",
        (Edit("scale_pair", "bytes << 4, 0x7B807B80u", "bytes << 4, 0x7B007B00u", text=True),), _W4_RECIPES,
    ),
    # Adapters.
    Mutant(
        "a change added twice where ranks take several turns", "kernels/low_rank.py",
        (Edit("add_low_rank", "_load_b($adapters, $current, $expert, $column, $n_out, $start, $PROJECTION, $PROJ, $INTERLEAVED)", "_load_b($adapters, $current, $expert, $column, $n_out, 0, $PROJECTION, $PROJ, $INTERLEAVED)"),), _ADAPTED,
    ),
    Mutant(
        "ranks of the adapter before", "kernels/low_rank.py",
        (Edit("add_low_rank", "$current, $b, $rank = ($following, $next_b, $next_rank)", "$current, $b = ($following, $next_b)"),), _ADAPTED,
    ),
    Mutant(
        "one of four sums over columns dropped", "kernels/low_rank.py",
        (Edit("_sum_over_columns", "$sum0 + $sum1 + ($sum2 + $sum3)", "$sum0 + $sum1 + ($sum2 + $sum2)"),), ("tests/cpu/test_low_rank.py::test_wide_tokens_fill_every_sum",),
    ),
    # GGUF kinds that stay at two and three bits on a GPU.
    Mutant(
        "codes of the first half for both (two bits)", "kernels/low_bits.py",
        (Edit("decode_half", "$lanes1 if $HALF else $lanes", "$lanes"),), _LOW_BITS,
    ),
    Mutant(
        "the step of the neighbouring group (low bits)", "kernels/low_bits.py",
        (Edit("load_factors", "$bytes_of_groups >> 8 & 255", "$bytes_of_groups >> 16 & 255"),), _LOW_BITS,
    ),
    Mutant(
        "steps of codes for minima (low bits)", "kernels/low_bits.py",
        (Edit("_factors", "$offset = ($steps >> 4).to(tl.float32) * 1.4693679385278594e-39 * $ratio", "$offset = ($steps & 15).to(tl.float32) * 1.4693679385278594e-39 * $ratio"),), _LOW_BITS,
    ),
    Mutant(
        "two codes of a lane swapped (three bits)", "kernels/low_bits.py",
        (Edit("_three_bit_place", "(0, 0), (0, 6), (0, 3), (0, 9), (0, 12), (1, 0)", "(0, 0), (0, 3), (0, 6), (0, 9), (0, 12), (1, 0)", text=True),), _LOW_BITS,
    ),
    # Experts in host memory.
    Mutant(
        "an evicted expert taken for one that is there", "kernels/paging.py",
        (Edit("_fill_slots", "tl.store($tables.expert_slot + $evicted, -1, mask=$changed & ($evicted >= 0))", ""),), _PAGING,
    ),
    Mutant(
        "needed experts evicted like others", "kernels/paging.py",
        (Edit("_rank_slots", "tl.where($needed != 0, float('inf'), $score)", "$score"),), _PAGING,
    ),
    Mutant(
        "copies of the second group in the round of the first", "kernels/paging.py",
        (Edit("_write_rounds", "($turn - $FIRST_MISS) % $GROUPS * $half", "($turn - $FIRST_MISS) % $GROUPS * $slot_count"),), _PAGING,
    ),
    Mutant(
        "all experts of a pass scored as needed", "kernels/paging.py",
        (Edit("decide_kernel", "$score * $update.other_factor + $update.other_step", "$score * $update.needed_factor + $update.needed_step"),), _PAGING,
    ),
)  # fmt: skip

# What only a GPU runs: the device form of decoding, where the interpreter runs a plain one, and large batches.
_DEVICE: tuple[Mutant, ...] = (
    Mutant(
        "quarters swapped (device)", "kernels/decode_ptx.py",
        (Edit("E2M1_TO_BF16", "shl.b32 code, $4, 3;", "shl.b32 code, $4, 6;", text=True),), _GPU,
    ),
    Mutant(
        "the neighbouring group's scale (device)", "kernels/decode_ptx.py",
        (Edit("E2M1_TO_BF16", "$2, code, $7, minus_zero;", "$2, code, $6, minus_zero;", text=True),), _GPU,
    ),
    Mutant(
        "sign of the last quarter dropped (device)", "kernels/decode_ptx.py",
        (Edit("E2M1_TO_BF16", "shl.b32 bits, $4, 1;", "shl.b32 bits, $4, 2;", text=True),), _GPU,
    ),
    Mutant(
        "zero points twice (device)", "kernels/decode.py",
        (Edit(
            "_negative_zero_point",
            "($word & 255)[:, None].to(tl.float32) * -0.015625",
            "($word & 255)[:, None].to(tl.float32) * -0.03125",
        ),), _GPU,
    ),
    Mutant(
        "a byte read twice (device)", "kernels/decode_ptx.py",
        (Edit("INT8_TO_BF16", "$2, 0, 0x4341;", "$2, 0, 0x4240;", text=True),), _GPU,
    ),
    Mutant(
        "a byte read twice in float16 (device)", "kernels/decode_ptx.py",
        (Edit("INT8_TO_FP16", "$2, base, 0x5351;", "$2, base, 0x5250;", text=True),), _GPU,
    ),
    Mutant(
        "a step of the neighbouring group (device)", "kernels/decode_ptx.py",
        (Edit("FOUR_BITS_TIMES_STEP", "base, 0x5252;", "base, 0x5152;", text=True),), _GPU,
    ),
    Mutant(
        "a sixteenth of a step forgotten (device)", "kernels/decode_ptx.py",
        (Edit("FOUR_BITS_TIMES_STEP", "step, step, sixteenth; mul.rn.f16x2 offset, step, minus_base; lop3.b32 number, high_byte,", "step, step, minus_base; mul.rn.f16x2 offset, step, minus_base; lop3.b32 number, high_byte,", text=True),), _GPU,
    ),
    Mutant(
        "E4M3 bias off by one (device)", "kernels/decode_ptx.py",
        (Edit("E4M3_TO_BF16_UNSCALED", "0x7B807B80", "0x7C007C00", text=True),), _GPU,
    ),
    Mutant(
        "sign of the second half dropped (MXFP4, E4M3 rows, device)", "kernels/w4a8_ptx.py",
        (Edit("DECODE_E2M1_E8M0", "shl.b32 second_signs, $2, 4;", "shl.b32 second_signs, $2, 5;", text=True),), _GPU_FOUR,
    ),
    Mutant(
        "scale of the neighbouring exponent (MXFP4, E4M3 rows, device)", "kernels/w4a8.py",
        (Edit("_decode_e2m1_e8m0", "$scale * 16843009 + 471340048", "$scale * 16843009 + 471340056"),), _GPU_FOUR,
    ),
    Mutant(
        "-8 read as -7 (INT4, E4M3 rows, device)", "kernels/w4a8_ptx.py",
        (Edit("DECODE_INT4", "0xCACCCED0, 0xB8C0C4C8, first;", "0xCACCCECE, 0xB8C0C4C8, first;", text=True),), _GPU_FOUR,
    ),
    Mutant(
        "second operand dropped (NVFP4, E4M3 rows, device)", "kernels/w4a8_ptx.py",
        (Edit("DECODE_E2M1_E4M3", "sub.u32 $3, $1, second_values;", "sub.u32 $3, $1, $1;", text=True),), _GPU_FOUR,
    ),
    Mutant(
        "the neighbouring group's scale (E4M3 rows, device)", "kernels/w4a8.py",
        (Edit("_scale_byte", "$index + 17472", "($index ^ 1) + 17472"),), _GPU_FOUR,
    ),
    Mutant(
        "the sum does not wait for a shared expert beside it", "runtime/side_stream.py",
        (Edit("run_on_side_stream.wait", "torch.cuda.current_stream($device).wait_stream($side)", "pass"),), _GPU_BESIDE,
    ),
    Mutant(
        "a shared expert begins before its tokens are there", "runtime/side_stream.py",
        (Edit("run_on_side_stream", "$side.wait_stream(torch.cuda.current_stream($device))", ""),), _GPU_BESIDE,
    ),
)  # fmt: skip

# Mistakes in kernels and in what packs and orders for them, made again for the tests of a GPU to see.
_ON_GPU: dict[str, tuple[str, ...]] = {
    "kernels/grouped_gemm.py": _GPU,
    "kernels/activation.py": ("tests/gpu/test_experts.py::test_every_activation",),
    "kernels/w4a8.py": _GPU_FOUR,
    "kernels/low_rank.py": ("tests/gpu/test_low_rank.py",),
    "kernels/tiles.py": _GPU_CLOSE,
    "kernels/weighted_sum.py": (*_GPU_CLOSE, *_GPU_SMALL),
    "kernels/route.py": _GPU_SMALL,
    "kernels/prefill.cu": _GPU_LARGE,
    "kernels/w4_epilogue.cuh": ("tests/gpu/test_w4_prefill.py",),
    "kernels/w4_decode.cuh": ("tests/gpu/test_w4_prefill.py",),
    "kernels/w4_decode_bf16.cuh": ("tests/gpu/test_w4_prefill.py",),
    "kernels/w4_pipeline.cuh": ("tests/gpu/test_w4_prefill.py",),
    "kernels/quantize.py": (*_GPU_SMALL, _GPU_NVFP4),
    "kernels/scales.py": _GPU_SMALL,
    "experts/triton/packing/bnb4.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/fp8.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/gguf.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/integers.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/interleave.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/mx.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/plain.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packing/units.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/pack_experts.py": ("tests/gpu/test_static_scales.py", *_GPU_SMALL, *_GPU),
    "experts/triton/packed.py": (
        "tests/gpu/test_middle_scales.py",
        "tests/gpu/test_low_rank.py",
        "tests/gpu/test_static_scales.py",
        _GPU_NVFP4,
        *_GPU_SMALL,
        *_GPU,
    ),
    "experts/triton/packing/w4a8.py": _GPU_FOUR,
}
GPU_MUTANTS: tuple[Mutant, ...] = (
    *_DEVICE,
    *(
        m._replace(name=f"{m.name} (on a GPU)", tests=_ON_GPU[m.file])
        for m in MUTANTS
        # What a checkpoint's scales mean is no matter of the device.
        if m.file in _ON_GPU and not m.name.startswith("compressed-tensors")
    ),
)
