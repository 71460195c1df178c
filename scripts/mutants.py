"""Inject one known kind of mistake at a time into a copy of the source, and demand that a test fails.

Every mutant is a replacement of text that occurs exactly once. The tests that could see it are run until one fails; a
mutant that passes them all survives, and that is a missing test. What killed what is in docs/mutants.md.

    python scripts/mutants.py                 run all (about a quarter of an hour on one core), write the table
    python scripts/mutants.py --only clamp    those whose name or file holds the text
    python scripts/mutants.py --gpu --jobs 12     those of the kernels; on a machine with a GPU
    python scripts/mutants.py --page          write docs/mutants.md anew from the committed results
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tracked import ROOT

__all__ = ["GPU_MUTANTS", "MUTANTS", "PAGE", "RESULTS", "Mutant", "applied", "main", "page"]

RESULTS = ROOT / "benchmarks" / "results" / "mutants.csv"
PAGE = ROOT / "docs" / "mutants.md"
_SOURCE = ROOT / "src" / "collegium"
_LIMIT = 300  # seconds a mutant's tests may take


class Mutant(NamedTuple):
    """One mistake: what is wrong, in which file below src/collegium, the text and what replaces it, and who may see it.

    edits: (before, after) pairs, each ``before`` exactly once in the file. tests: pytest arguments, likeliest first.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


_HOST = ("tests/cpu/test_activation.py", "tests/cpu/test_layer.py")
_CPU = ("tests/cpu/test_cpu_grouped.py", "tests/cpu/test_verify.py")
_LOAD = ("tests/cpu/test_loader.py",)
_STATIC = ("tests/cpu/test_static_scales.py",)
_WHOLE_GGUF = ("tests/cpu/test_whole_gguf.py",)
_KERNEL = tuple(
    f"tests/cpu/test_grouped_gemm.py::{name}"
    for name in (
        "test_experts_against_the_reference",
        "test_every_activation",
        "test_int4_groups_and_scale_dtypes",
        "test_zero_points_of_every_width_group_and_dtype_of_rows",
    )
)
_BLOCKS = tuple(
    f"tests/cpu/test_grouped_gemm.py::test_{name}"
    for name in ("every_kind_of_gguf_block_and_dtype_of_rows", "halves_and_sums_of_columns_end_with_their_row")
)
_ORDERS = ("tests/cpu/test_grouped_gemm.py::test_columns_are_those_of_each_rows_expert",)
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
_PREFILL = ("tests/cpu/test_prefill_products.py", "tests/cpu/test_prefill.py")
_GPU_SMALL = ("tests/gpu/test_small_kernels.py", "tests/gpu/test_layer.py")
_GPU_BESIDE = ("tests/gpu/test_layer.py::test_gpu_a_shared_expert_runs_beside_the_others",)
_GPU_CLOSE = ("tests/gpu/test_direct.py",)
_SMALL = ("tests/cpu/test_small_kernels.py",)
_FOUR = ("tests/cpu/test_w4a8.py",)
_DIRECT = ("tests/cpu/test_direct.py",)
_FUSED = ("tests/cpu/test_cpu_fused.py",)
_NAN = ("tests/cpu/test_nan.py",)
_RANKS = ("tests/cpu/test_all_to_all.py",)
_MEGA = ("tests/cpu/test_mega.py::test_passes_have_the_bits_of_one_rank",)
_MEGA_FULL = ("tests/cpu/test_mega.py::test_a_pass_of_as_many_tokens_as_were_planned_has_the_bits_of_one_rank",)
_MEGA_LOST = ("tests/cpu/test_mega.py::test_a_rank_that_does_not_come_is_named_and_nobody_gets_a_number",)
_REDUCED = ("tests/cpu/test_reduced.py",)
_MOVE = ("tests/cpu/test_mover.py::test_packed_formats_move_without_changing_a_bit",)
_ROUNDS = ("tests/cpu/test_mover.py::test_rounds_reach_any_placement_and_never_lose_an_expert",)
_SUM = ("tests/cpu/test_mover.py::test_a_checksum_follows_the_position_across_its_pieces",)

MUTANTS: tuple[Mutant, ...] = (
    # Gate and up swapped.
    Mutant(
        "gate and up swapped", "ops/activation.py",
        (("_gated(wide[:, 0], wide[:, 1], spec)", "_gated(wide[:, 1], wide[:, 0], spec)"),), _HOST,
    ),
    Mutant(
        "gate and up swapped", "experts/cpu/grouped.py",
        (("gate, up = inner.chunk(2, dim=-1)", "up, gate = inner.chunk(2, dim=-1)"),), _CPU,
    ),
    Mutant(
        "gate and up swapped", "kernels/grouped_gemm.py",
        (("activate(gate if PARTS == 2 else up, up, KIND", "activate(up, gate if PARTS == 2 else up, KIND"),), _KERNEL,
    ),
    Mutant(
        "gate and up swapped on loading", "checkpoint/loader.py",
        (("made[field][slot].put(half,", "made[field][slot].put(layer.spec.gate_up_parts - 1 - half,"),), _LOAD,
    ),
    Mutant(
        "interleaved rows: odd is gate", "checkpoint/layout.py",
        (("(int(second), 2) if table.interleaved", "(int(not second), 2) if table.interleaved"),), _LOAD,
    ),
    Mutant(
        "gate and up swapped on writing", "commands/quantize.py",
        (("return encoded, (lost", "return (*encoded[-2::-1], encoded[-1]), (lost"),), _WRITE,
    ),
    # Identity, threads and refusals of a layer.
    Mutant(
        "a workspace lent twice", "runtime/memory.py",
        (("                space = free.pop()\n", "                space = free[-1]\n"),),
        ("tests/cpu/test_workspace.py",),
    ),
    Mutant(
        "a copy keeps its original's identity", "runtime/packed_module.py",
        (
            (' if name != "handle"}', "}"),
            ("        self.identify(place, self._kind_of_input)\n", "        place.type\n"),
        ),
        ("tests/cpu/test_compiled_models.py",),
    ),
    Mutant(
        "a gradient is not refused", "runtime/packed_module.py",
        (("if tensor is not None and tensor.requires_grad and", "if tensor is not None and tensor.is_meta and"),),
        ("tests/cpu/test_inference_only.py",),
    ),
    Mutant(
        "every experts module has the first one's handle", "integrations/transformers/plugin.py",
        (("        if found is not None and _handle(found).data_ptr() == address:\n            return found\n",
          "        if found is not None:\n            return next(iter(_MODULES.values()))() or found\n"),),
        ("tests/cpu/test_compiled_models.py",),
    ),
    Mutant(
        "autocast reaches the router", "stages/router.py", (("return torch.autocast(device.type, enabled=False) if", "return nullcontext() if"),),
        ("tests/cpu/test_inference_only.py",),
    ),
    # Between ranks.
    Mutant(
        "rows come back in the order of experts", "parallel/all_to_all.py",
        (("found.index_select(0, order)", "found.index_select(0, order).sort().values"),), _RANKS,
    ),
    Mutant(
        "scales of another token", "parallel/message_format.py",
        (("found.pop(0).contiguous()", "found.pop(0).flip(0).contiguous()"),), _RANKS,
    ),
    Mutant(
        "a token without room adds nothing", "parallel/all_to_all_fixed.py",
        (("row = torch.where(found < 0, -2,", "row = torch.where(found < 0, -1,"),), _RANKS,
    ),
    Mutant(
        "a graph without room is not told", "parallel/all_to_all_fixed.py",
        (("self.missed.add_(", "self.missed.mul_("),), _RANKS,
    ),
    Mutant(
        "codes that are weighted later", "planning.py",
        ((" and kernel.takes_codes and not problem.spec.routing.weight_on_input", " and kernel.takes_codes"),), _RANKS,
    ),
    Mutant(
        "parts of FP8 without weights", "parallel/combine.py",
        (("weighted_sum(rows, slots, weights, torch.float32)", "weighted_sum(rows, slots, None, torch.float32)"),), _REDUCED,
    ),
    Mutant(
        "a token of nobody alone is zero", "parallel/expert_parallel.py",
        (("rank.amin(dim=1, keepdim=True).clamp(max=-1)", "rank.amin(dim=1, keepdim=True).clamp(-1, -1)"),), _REDUCED,
    ),
    # The clamp.
    Mutant(
        "clamp dropped (swiglu)", "ops/activation.py",
        (("if spec.limit is not None:", 'if spec.limit is not None and spec.kind != "swiglu":'),), _HOST,
    ),
    Mutant(
        "clamp dropped (swiglu_oai)", "ops/activation.py",
        (("if spec.limit is not None:", 'if spec.limit is not None and spec.kind != "swiglu_oai":'),), _HOST,
    ),
    Mutant("clamp dropped", "experts/cpu/grouped.py", (("if spec.limit is not None:", "if False:"),), _CPU),
    Mutant("clamp dropped", "kernels/activation.py", (("if HAS_LIMIT and kind != 2:", "if HAS_LIMIT and kind > 9:"),), _ACTS),
    Mutant(
        "clamp dropped (swiglu_step)", "kernels/activation.py",
        (("gate = gate * _sigmoid(gate, FAST)\n        if HAS_LIMIT:", "gate = gate * _sigmoid(gate, FAST)\n        if kind == 9:"),), _ACTS,
    ),
    Mutant(
        "gate clamped from below too", "ops/activation.py",
        (("gate, up = gate.clamp(max=spec.limit)", "gate, up = gate.clamp(-spec.limit, spec.limit)"),), _HOST,
    ),
    Mutant("gate clamped from below too", "kernels/activation.py",
        (("gate = _below(gate, limit)\n        up = _within(up, limit)\n    if kind == 0",
          "gate = _within(gate, limit)\n        up = _within(up, limit)\n    if kind == 0"),), _ACTS),
    # Clamp after SiLU.
    Mutant(
        "clamp after SiLU", "ops/activation.py",
        (
            ('if spec.kind == "swiglu_step":', 'if spec.kind in ("swiglu", "swiglu_step"):'),
            ("return functional.silu(gate) * up", "return gate * up"),
        ),
        _HOST,
    ),
    Mutant(
        "clamp after SiLU", "experts/cpu/grouped.py",
        (
            (
                "    if spec.limit is not None:\n"
                "        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)\n"
                "    return functional.silu(gate).mul_(up)",
                "    gate = functional.silu(gate)\n    if spec.limit is not None:\n"
                "        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)\n    return gate.mul_(up)",
            ),
        ),
        _CPU,
    ),
    Mutant(
        "clamp after SiLU", "kernels/activation.py",
        (
            ("if HAS_LIMIT and kind != 2:", "if HAS_LIMIT and kind > 2:"),
            ("out = gate * _sigmoid(gate, FAST) * up", "out = tl.where(HAS_LIMIT, _below(gate * _sigmoid(gate, FAST), limit) * "
             "_within(up, limit), gate * _sigmoid(gate, FAST) * up)"),
        ),
        _ACTS,
    ),
    # SwiGLU-OAI.
    Mutant("alpha dropped", "ops/activation.py", (("torch.sigmoid(spec.alpha * gate)", "torch.sigmoid(gate)"),), _HOST),
    Mutant("alpha dropped", "kernels/activation.py", (("_sigmoid(alpha * gate, FAST)", "_sigmoid(gate, FAST)"),), _ACTS),
    Mutant("beta dropped", "ops/activation.py", (("(up + spec.beta) * (gate", "up * (gate"),), _HOST),
    Mutant("beta dropped", "kernels/activation.py", (("(up + gate_bound) * (gate", "up * (gate"),), _ACTS),
    # A scale dropped.
    Mutant(
        "a group's scale dropped", "formats/codecs.py",
        (("change(full.unflatten(-1, (-1, group)), scales[:, :whole, None])", "full.unflatten(-1, (-1, group))"),), _FORMAT,
    ),
    Mutant(
        "the last, partial group's scale dropped", "formats/codecs.py",
        (("change(values[:, whole * group :], scales[:, whole:])", "values[:, whole * group :]"),), _FORMAT,
    ),
    Mutant(
        "a row's scale dropped", "experts/cpu/grouped.py",
        (("torch.mul(result, matrix.row_scale[expert], out=out[span])", "out[span].copy_(result)"),), _CPU,
    ),
    Mutant(
        "gate's row scale dropped", "kernels/grouped_gemm.py",
        (("gate *= tl.load(row_scale + vector)[:, None]", "gate *= 1.0"),), _KERNEL,
    ),
    Mutant(
        "a block's scale dropped", "kernels/grouped_gemm.py",
        (("factors = factor[:, None] if STACKED else factor\n", "factors = 0.0 * factor + 1.0\n"),), _KERNEL,
    ),
    Mutant(
        "the tokens' scale dropped", "kernels/grouped_gemm.py",
        (("else (factor * x_scale)[None, :]", "else (factor + 0.0 * x_scale)[None, :]"),), _KERNEL,
    ),
    Mutant(
        "the tokens' scale dropped for up", "kernels/grouped_gemm.py",
        (("        up *= per_token\n", "        up *= 1.0\n"),), _KERNEL,
    ),
    # The neighbouring group's scale.
    Mutant(
        "the neighbouring group's scale", "formats/codecs.py",
        ((", scales[:, :whole, None])", ", scales.roll(1, 1)[:, :whole, None])"),), _FORMAT,
    ),
    Mutant(
        "the neighbouring group's scale (MXFP4)", "experts/cpu/decode.py",
        (
            (
                "field = self.scales[expert, span].to(torch.int16).bitwise_left_shift_(_INT16_FIELD)",
                "field = self.scales[expert, span].roll(1, -1).to(torch.int16).bitwise_left_shift_(_INT16_FIELD)",
            ),
        ),
        _CPU,
    ),
    Mutant(
        "the neighbouring group's scale (NVFP4, MXFP8)", "experts/cpu/decode.py",
        (("        scales = self.scales[expert, span]\n", "        scales = self.scales[expert, span].roll(1, -1)\n"),), _CPU,
    ),
    Mutant(
        "the neighbouring group's scale (INT4, FP8 blocks)", "experts/cpu/decode.py",
        (("factor = self.scales[expert].index_select(0, line)", "factor = self.scales[expert].index_select(0, line).roll(1, 1)"),), _CPU,
    ),
    Mutant(
        "the neighbouring row block's scale", "experts/cpu/decode.py",
        (("// height * blocks + rows % height // self.row_block", "// height * blocks + (rows % height // self.row_block + 1) % blocks"),),
        _CPU,
    ),
    Mutant(
        "the neighbouring group's scale", "kernels/decode.py",
        (("byte = (words >> (8 * QUARTER)) & 255", "byte = (words >> (8 * ((QUARTER + 1) % 4))) & 255"),), _KERNEL,
    ),
    Mutant(
        "the neighbouring group's scale (INT4)", "kernels/decode.py",
        (("f0, f1, f2, f3 = upper_scale(n0 << 16), upper_scale(n0), ", "f1, f0, f2, f3 = upper_scale(n0 << 16), upper_scale(n0), "),), _KERNEL,
    ),
    Mutant(
        "the neighbouring group's zero point", "kernels/decode.py",
        (("n1 = tl.load(scale + step) if WORDS == 4 else n0", "n1 = n0"),), _KERNEL,
    ),
    Mutant("a zero point of seven bits", "kernels/decode.py", (("zero = (word & 255)[:, None] if ZEROED else MIDDLE", "zero = (word & 127)[:, None] if ZEROED else MIDDLE"),), _KERNEL),
    Mutant("a zero point left in its scale", "kernels/decode.py", (("(words & -256).to(tl.float32", "(words & -1).to(tl.float32"),), _KERNEL),
    Mutant("a minimum of the neighbouring group", "kernels/decode.py", (("tl.join(tl.join(m0, m2), tl.join(m1, m3))", "tl.join(tl.join(m0, m1), tl.join(m2, m3))"),), _BLOCKS),
    Mutant("the step of the neighbouring group", "kernels/decode.py", (("_stepped((lanes >> 4) & 15, steps, 1)", "_stepped((lanes >> 4) & 15, steps, 2)"), ("_stepped((lanes >> 8) & 255, steps, 1)", "_stepped((lanes >> 8) & 255, steps, 2)")), _BLOCKS),
    Mutant("minima times the factor of codes", "kernels/decode.py", (("f0, f1 = _half_scale(halves), _half_scale(halves >> 16)", "f0, f1 = _half_scale(halves), _half_scale(halves)"),), _BLOCKS),
    Mutant("what rounding leaves of a sum dropped", "kernels/columns.py", (("tl.where(place == 1, total - rounded, 0.0)", "tl.where(place == 1, 0.0, 0.0)"),), _BLOCKS[1:]),
    Mutant("rows whose sums overflow", "kernels/columns.py", (("(most >> 23) - 9, 1)", "(most >> 23) - 15, 1)"),), _BLOCKS[1:]),
    Mutant("a row with NaN that is zero", "kernels/columns.py", (("tl.where(finite, (byte << 23).to(tl.float32, bitcast=True), float(\"nan\"))", "(byte << 23).to(tl.float32, bitcast=True)"),), _BLOCKS[1:]),
    Mutant("the factor of the neighbouring group", "kernels/dequantize.py", (("f[group * 4 // GROUPS], mask", "f[0], mask"),), _LARGE),
    Mutant("the factor of the neighbouring block", "kernels/dequantize.py", (("row // 128) * K_BLOCKS + block)", "row // 128) * K_BLOCKS)"),), _LARGE),
    Mutant("quarters of a block swapped", "kernels/dequantize.py", (("tl.store(to + at, a[quarter]", "tl.store(to + at, a[3 - quarter]"),), _LARGE),
    Mutant("an expert's first tokens in all of its tiles", "kernels/prefill.cu", (("inside / width, start + first,", "inside / width, start,"),), _PREFILL),
    Mutant("gate's factors for up", "kernels/prefill.cu", (("i64 part = (i64)t.expert * PARTS + (PARTS == 2 ? h : 0);", "i64 part = (i64)t.expert * PARTS;"),), _PREFILL),
    Mutant("gate and up swapped in a large tile", "kernels/prefill.cu", (("activated(d[i], d[PARTS == 2 ? i + 32 : i], z)", "activated(d[PARTS == 2 ? i + 32 : i], d[i], z)"),), _PREFILL),
    Mutant("the neighbouring row block's scale", "kernels/prefill.cu", (("(PARTS == 2 && lane == 1)) * z.scale_rows + band) * z.k_blocks", "(PARTS == 2 && lane == 1)) * z.scale_rows + (band ^ 1)) * z.k_blocks"),), _PREFILL),
    Mutant("a bias of the neighbouring expert", "kernels/prefill.cu", (("i64 i = ((i64)expert * PARTS + part) * z.n_out + c;", "i64 i = ((i64)(expert ^ 1) * PARTS + part) * z.n_out + c;"),), _PREFILL),
    Mutant("a row beyond a tile's end stored", "kernels/prefill.cu", (("if (r >= left || at_column >= z.n_out) continue;", "if (r > left || at_column >= z.n_out) continue;"),), _PREFILL),
    Mutant("a stage multiplied before it is there", "kernels/prefill.cu", (("            wait(&s.full[p.stage], p.parity);\n            next(q);", "            next(q);"),), _PREFILL),
    Mutant("a row's scale of one block's columns alone", "kernels/prefill.cu", (("most[0] = max(most[0], theirs[0]), most[1] = max(most[1], theirs[8]);", ""),), _PREFILL),
    Mutant("a counter that is left", "kernels/prefill.cu", (("counters[0] = counters[1] = 0;", "counters[0] = 0;"),), _PREFILL),
    Mutant("a repeated kernel in CUDA with the tensors of the first call", "runtime/nvrtc.py", (("given = held if addresses == first else made(addresses)", "given = held"),), ("tests/cpu/test_replay.py",)),
    Mutant("large tiles for a few rows of one expert", "experts/triton/tiles.py", (("BAND * machine.sms else 2.5)", "BAND * machine.sms else 1)"),), _PREFILL[1:]),
    Mutant("the tiles of all experts for some", "experts/triton/dequantized.py", (("tiles if turn == experts else tile_list(own, rows, tiles.tile, memory)", "tiles"),), _LARGE),
    Mutant("the sign of a step lost", "kernels/decode.py", (("((words << (24 - 8 * QUARTER)) >> 24)", "((words >> (8 * QUARTER)) & 255)"),), _BLOCKS),
    Mutant("steps of minima added", "experts/triton/lanes.py", (("kept.new_tensor([1, -1])", "kept.new_tensor([1, 1])"),), _BLOCKS),
    Mutant("sums of columns beyond a row", "kernels/columns.py", (("inside = column < tl.where(kept, columns, 0)", "inside = column >= 0"),), _BLOCKS[1:]),
    Mutant("the columns of the neighbouring expert", "kernels/columns.py", (("order + expert * columns + column", "order + (expert ^ 1) * columns + column"),), _ORDERS),
    Mutant("rows of the first product in their own order", "experts/triton/packed.py", (("        weights = _rows_moved(weights)\n", "        pass\n"),), _KERNEL),
    Mutant("a bias that stays where it was", "experts/triton/packed.py", (("None if bias is None else moved(bias)", "bias"),), _KERNEL),
    Mutant("bytes of a lane swapped", "kernels/decode.py", (("return _less(lanes & 255, n0, MIDDLE, ZEROED, HALF), _less((lanes >> 8) & 255, n1,", "return _less((lanes >> 8) & 255, n0, MIDDLE, ZEROED, HALF), _less(lanes & 255, n1,"),), _KERNEL),
    Mutant(
        "the neighbouring row block's scale", "kernels/grouped_gemm.py",
        (("(matrix * scale_rows + n_first // 128) * K_BLOCKS", "(matrix * scale_rows + tl.maximum(n_first // 128 - 1, 0)) * K_BLOCKS"),),
        _KERNEL,
    ),
    # Nibbles.
    Mutant(
        "nibbles swapped", "formats/codecs.py",
        (("torch.stack((row.repeat(16), row.repeat_interleave(16)), dim=-1)", "torch.stack((row.repeat_interleave(16), row.repeat(16)), dim=-1)"),),
        _FORMAT,
    ),
    Mutant(
        "nibbles swapped on writing", "formats/codecs.py",
        (("return codes[..., 0::2] | (codes[..., 1::2] << 4)", "return codes[..., 1::2] | (codes[..., 0::2] << 4)"),),
        ("tests/cpu/test_formats_codecs.py", *_FORMAT),
    ),
    Mutant("nibbles swapped", "experts/cpu/decode.py", (("for shift in (0, 4, 8, 12)", "for shift in (4, 0, 12, 8)"),), _CPU),
    Mutant(
        "nibbles swapped (packing NVFP4)", "formats/codecs.py",
        (("torch.stack((packed & 0xF, packed >> 4), dim=-1)", "torch.stack((packed >> 4, packed & 0xF), dim=-1)"),),
        ("tests/cpu/test_formats_codecs.py", *_CPU),
    ),
    Mutant(
        "quarters swapped (E2M1)", "experts/triton/lanes.py",
        (("a, b, c, d = codes.unbind(2)\n    lane", "b, a, c, d = codes.unbind(2)\n    lane"),), _KERNEL,
    ),
    Mutant(
        "quarters swapped (INT4)", "experts/triton/lanes.py",
        (("a, b, c, d = codes.unbind(2)\n    return a", "b, a, c, d = codes.unbind(2)\n    return a"),), _KERNEL,
    ),
    Mutant("an INT4 code of three bits", "kernels/decode.py", (("(lanes >> 8) & 15, (lanes >> 12) & 15", "(lanes >> 8) & 15, (lanes >> 12) & 7"),), _KERNEL),
    # E8M0.
    Mutant(
        "E8M0 bias off by one", "formats/codecs.py",
        (
            (
                "bits = torch.arange(256, device=device, dtype=torch.int32) << 23",
                "bits = (torch.arange(256, device=device, dtype=torch.int32) - 1).clamp(min=0) << 23",
            ),
        ),
        _FORMAT,
    ),
    Mutant("E8M0 bias off by one on writing", "formats/codecs.py", (("floor_log2(amax) - largest_exponent + 127", "floor_log2(amax) - largest_exponent + 126"),), _FORMAT),
    Mutant("E8M0 bias off by one (MXFP4)", "experts/cpu/decode.py", (('"row_scale": largest.mul_(0.5)', '"row_scale": largest'),), _CPU),
    Mutant("E8M0 bias off by one (MXFP8)", "experts/cpu/decode.py", (("_E4M3_FIELD = 247", "_E4M3_FIELD = 246"),), _CPU),
    Mutant(
        "E8M0 bias off by one", "kernels/decode.py",
        (("_as_rows(byte << (10 if HALF else 7), HALF)", "_as_rows((byte - 1) << (10 if HALF else 7), HALF)"),), _KERNEL,
    ),
    # The global scale of NVFP4.
    Mutant(
        "global scale divided instead of multiplied", "formats/nvfp4.py",
        (("torch.Tensor.div_ if self.global_divides else", "torch.Tensor.div_ if not self.global_divides else"),),
        _FORMAT,
    ),
    Mutant(
        "global scale divided instead of multiplied", "experts/cpu/decode.py",
        (("scale.reciprocal() if payload.global_divides else scale", "scale if payload.global_divides else scale.reciprocal()"),), _CPU,
    ),
    Mutant(
        "global scale divided instead of multiplied", "experts/triton/lanes.py",
        (("(own.reciprocal() if payload.global_divides else own)", "(own if payload.global_divides else own.reciprocal())"),), _KERNEL,
    ),
    Mutant(
        "compressed-tensors global scale multiplied", "experts/triton/lanes.py",
        (("(own.reciprocal() if payload.global_divides else own)", "own"),), ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "compressed-tensors read as ModelOpt", "formats/nvfp4.py",
        (('global_divides=storage == "compressed-tensors"', "global_divides=False"),),
        ("tests/cpu/test_formats_examples.py", *_LOAD),
    ),
    Mutant(
        "one global scale for both halves", "experts/cpu/stored.py",
        (
            (
                "spread = per_matrix.reshape(*shape[:-2], 1).float().expand(shape[:-1])",
                "spread = per_matrix.reshape(shape[0], -1)[:, :1].float().expand(shape[0], shape[-2] * (len(shape) - 2))",
            ),
        ),
        _CPU,
    ),
    Mutant(
        "one global scale for both halves", "experts/triton/lanes.py",
        (("row_scale = row_scale.unsqueeze(-1).expand(payload.shape[:3]).contiguous()", "row_scale = row_scale[:, :1].unsqueeze(-1).expand(payload.shape[:3]).contiguous()"),),
        _KERNEL,
    ),
    Mutant(
        "one scale for both halves (FP8)", "experts/triton/lanes.py",
        (("row_scale = scale.float().expand(payload.shape[:3]).contiguous()", "row_scale = scale[:, :1].float().expand(payload.shape[:3]).contiguous()"),),
        _KERNEL,
    ),
    Mutant(
        "one global scale for both halves", "formats/nvfp4.py",
        (
            (
                "spread = self.global_scale.reshape(-1).repeat",
                "own = self.global_scale\n        spread = (own[..., :1].expand_as(own) if own.dim() else own).reshape(-1).repeat",
            ),
        ),
        ("tests/cpu/test_formats.py", "tests/cpu/test_audit.py", *_LAYER),
    ),
    # Experts rotated by one.
    Mutant(
        "experts rotated by one", "experts/reference.py",
        (("gate_up = weights.gate_up[expert].decode()", "gate_up = weights.gate_up[(expert + 1) % weights.gate_up.shape[0]].decode()"),),
        _LAYER,
    ),
    Mutant(
        "experts rotated by one", "experts/cpu/grouped.py",
        (("matrix.tile(expert, piece, own.dtype, scratch)", "matrix.tile((expert + 1) % matrix.shape[0], piece, own.dtype, scratch)"),), _CPU,
    ),
    Mutant("experts rotated by one", "kernels/grouped_gemm.py", (("matrix = expert * PARTS", "matrix = tl.maximum(expert - 1, 0) * PARTS"),), _KERNEL),
    Mutant(
        "experts rotated by one in a file", "checkpoint/layer_view.py",
        (
            (
                "        return source_of(\n",
                "        expert = (expert + 1) % self.spec.num_experts\n        return source_of(\n",
            ),
        ),
        _LOAD,
    ),
    Mutant("experts rotated by one in a stack", "checkpoint/layout.py", (("        index=expert,", "        index=(expert + 1) % spec.num_experts,"),), _LOAD),
    Mutant(
        "experts rotated by one on writing", "commands/quantize.py",
        (
            (
                "path = names.projection(which).format(layer=layer, expert=expert)",
                "path = names.projection(which).format(layer=layer, expert=(expert + 1) % job.spec.num_experts)",
            ),
        ),
        _WRITE,
    ),
    Mutant(
        "experts rotated by one on writing a stack", "commands/quantize.py",
        (("tensor, expert if job.stacked else 0)", "tensor, (expert + 1) % job.spec.num_experts if job.stacked else 0)"),), _STACK,
    ),
    Mutant(
        "a bias of the neighbouring expert", "kernels/grouped_gemm.py",
        (("gate += tl.load(bias + vector)", "gate += tl.load(bias + n_first + column)"),), _KERNEL,
    ),
    # Routing and combining.
    Mutant(
        "router weight applied twice", "ops/weighted_sum.py",
        (("weights.float().t()[span].reshape(-1, 1), out=product)", "weights.float().t()[span].reshape(-1, 1).square(), out=product)"),),
        ("tests/cpu/test_weighted_sum.py",),
    ),
    Mutant("columns of a pair swapped (machine code)", "kernels/cpu_fused.py", (("_rounded(builder, *pair)", "_rounded(builder, *pair[::-1])"),), _FUSED),
    Mutant("zero points forgotten (machine code)", "kernels/cpu_fused.py", (("start = builder.select(zeros, builder.fsub(first, behind), first)", "start = first"),), _FUSED),
    Mutant("zero points of wide scales subtracted late (machine code)", "kernels/cpu_fused.py", (('SCALES.index("fp32")', 'SCALES.index("e8m0")'),), _FUSED),
    Mutant("E4M3 scales shifted by one (machine code)", "kernels/cpu_fused.py", (("zext(stored, _SHORTS), _word(7, _SHORTS)", "zext(stored, _SHORTS), _word(8, _SHORTS)"),), _FUSED),
    Mutant("the sign of E4M3 left in its exponent (machine code)", "kernels/cpu_fused.py", (("_word(-0x4080, _SHORTS)", "_word(-0x0080, _SHORTS)"),), _FUSED),
    Mutant("E4M3 read as integers (machine code)", "kernels/cpu_fused.py", (("own, apart == 2, table)", "own, False, table)"),), _FUSED),
    Mutant("what E4M3 in float16 leaves of a scale forgotten", "experts/cpu/fused.py", (("_LARGEST + 8)", "_LARGEST)"),), _FUSED),
    Mutant("the scale of the row block before", "experts/cpu/fused.py", (("repeat_interleave(rows, dim=-2)", "repeat_interleave(rows, dim=-2).roll(1, dims=-2)"),), _FUSED),
    Mutant("the fifth bits of the other half (machine code)", "kernels/cpu_fused.py", (("2 * half))", "2 * (1 - half)))"),), _FUSED),
    Mutant("int8 scales of the first 256 columns (machine code)", "kernels/cpu_fused.py", (("(number * spans + done // _SPAN)", "(number * spans)"),), _FUSED),
    Mutant("scales of the group before (machine code)", "kernels/cpu_fused.py", (("(number * groups + at) * line", "(number * groups + max(at - 1, 0)) * line"),), _FUSED),
    Mutant("the table of the first expert (machine code)", "kernels/cpu_fused.py", (("values = _field(job, VALUES) + expert * 4 * LANES", "values = _field(job, VALUES)"),), _FUSED),
    Mutant("half of a table looked up (machine code, AVX2)", "kernels/cpu_fused.py", (("high, low)", "low, low)"),), _FUSED),
    Mutant("rows and columns trade the wrong half (machine code)", "kernels/cpu_fused.py", (("first, second = (bit, 0) if row & bit else (0, bit)", "first, second = (0, bit) if row & bit else (bit, 0)"),), _FUSED),
    Mutant("columns of rows always the first (machine code)", "kernels/cpu_fused.py", (("_turn(codes + begin * 4,", "_turn(codes,"),), _FUSED),
    Mutant("mins of a K block added", "experts/cpu/fused.py", (("torch.tensor([1, -1]", "torch.tensor([1, 1]"),), _FUSED),
    Mutant("the order of the first expert", "experts/cpu/fused.py", (("index_select(1, order[expert])", "index_select(1, order[0])"),), _FUSED),
    Mutant("a token of the first rank", "kernels/mega.py", (("line = peer * bound + token\n", "line = token\n"),), _MEGA),
    Mutant("a row goes to the rank it comes from", "kernels/mega.py", (("apart = tl.load(deltas + peer)", "apart = tl.load(deltas + rank)"),), _MEGA),
    Mutant("rows quantised before their last piece", "kernels/mega.py", (("== up_bands - 1:", "== up_bands - 2:"),), _MEGA),
    Mutant("one token more than a rank has", "kernels/mega.py", (("brought = token < found", "brought = token <= found"),), _MEGA),
    Mutant("counters of the pass before", "kernels/mega.py", (("while start < cleared:", "while start < 0:"),), _MEGA),
    Mutant("a unit of the expert before", "kernels/mega.py", (("tl.where(last <= unit,", "tl.where(last < unit,"),), _MEGA),
    Mutant("who gave up says that it did not", "kernels/mega.py", (("publish(flags, ROWS, world, tl.where(ended >> 16 == 0, epoch << 44, -1))", "publish(flags, ROWS, world, epoch << 44)"),), _MEGA_LOST),
    Mutant("lists that overlap", "kernels/mega.py", (("capacity = world * bound * TOP_K", "capacity = bound"),), _MEGA_FULL),
    Mutant("the rest of a float16 number dropped", "experts/cpu/panels.py", (("torch.stack((upper, lower), 1)", "torch.stack((upper, 0 * lower), 1)"),), ("tests/cpu/test_cpu_fused.py::test_float16_rows_keep_all_their_bits", "tests/cpu/test_cpu_fused.py::test_an_infinite_float16_number_stays_in_its_row")),
    Mutant("a bias added for both parts of a float16 number", "experts/cpu/panels.py", (("replace(self, bias=None).multiply", "self.multiply"),), ("tests/cpu/test_cpu_fused.py::test_float16_rows_keep_all_their_bits", "tests/cpu/test_cpu_fused.py::test_an_infinite_float16_number_stays_in_its_row")),
    Mutant("what is left of an infinity is NaN", "experts/cpu/panels.py", ((".nan_to_num(0.0, 0.0, 0.0)", ""),), ("tests/cpu/test_cpu_fused.py::test_float16_rows_keep_all_their_bits", "tests/cpu/test_cpu_fused.py::test_an_infinite_float16_number_stays_in_its_row")),
    Mutant("the second K block of a step read as the first", "kernels/grouped_gemm.py", (("w = _load(up_ptr + at * k_step,", "w = _load(up_ptr,"),), _MEGA),
    Mutant("the first K block's scale for the second of a step", "kernels/grouped_gemm.py", (("us_ptr + at * s_k,", "us_ptr,"),), _MEGA),
    Mutant("tokens' scales of the first K block for the second of a step", "kernels/grouped_gemm.py", (("tl.load(xs_ptr + step * DEPTH + at)", "tl.load(xs_ptr + step * DEPTH)"),), _MEGA),
    Mutant("a rank in another call taken for one in this one", "kernels/mega.py", (("((seen >> 24) != tag) | ", ""),), ("tests/cpu/test_mega.py::test_a_rank_in_another_call_is_told_so",)),
    Mutant(
        "router weight applied on both sides", "parallel/local.py",
        (("carried = routing.topk_weights if self.weight_on_input else None", "carried = routing.topk_weights"),), _LAYER,
    ),
    Mutant(
        "router weight on the wrong side", "parallel/local.py",
        (
            ("carried = routing.topk_weights if self.weight_on_input else None", "carried = None if self.weight_on_input else routing.topk_weights"),
            ("weights=None if self.weight_on_input else routing", "weights=None if not self.weight_on_input else routing"),
        ),
        _LAYER,
    ),
    Mutant(
        "correction bias used in the weights", "ops/route.py",
        (
            (
                "weights = _weights(raw, scores, ids, spec)",
                "weights = _weights(raw, scores if bias is None else scores + bias.float(), ids, spec)",
            ),
        ),
        _ROUTE,
    ),
    Mutant("renormalize skipped", "ops/route.py", (("if spec.renormalize:", "if False:"),), _ROUTE),
    Mutant(
        "tie broken the other way", "ops/route.py",
        (
            ("reversed_ids = last - torch.arange(values.shape[1], device=values.device)", "reversed_ids = torch.arange(values.shape[1], device=values.device)"),
            ("return last - (keys.topk(count, dim=1).values & last)", "return keys.topk(count, dim=1).values & last"),
        ),
        _ROUTE,
    ),
    Mutant("routed scale dropped", "ops/route.py", (("return (weights * spec.scale)", "return weights"),), _ROUTE),
    Mutant("slots added in another order", "ops/weighted_sum.py", (("product.view(step, *total.shape).unbind()", "product.view(step, *total.shape).flip(0).unbind()"),),
        ("tests/cpu/test_weighted_sum.py",)),
    # Memory nobody wrote.
    Mutant(
        "dropped rows added to the sum", "ops/weighted_sum.py",
        (("product.masked_fill_(dropped.t()[span].reshape(-1, 1), 0.0)", "pass"),), ("tests/cpu/test_weighted_sum.py", *_LAYER),
    ),
    Mutant(
        "padding rows left uninitialised", "experts/reference.py",
        (("rows = torch.zeros(batch.source.numel()", "rows = torch.empty(batch.source.numel()"),), ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "padding columns left uninitialised", "formats/find_storage.py",
        (("out = codes.new_full((*codes.shape[:-1], size), fill)", "out = codes.new_empty((*codes.shape[:-1], size))"),),
        ("tests/cpu/test_formats.py", "tests/cpu/test_formats_parts.py"),
    ),
    Mutant(
        "a row beyond a tile's end stored", "kernels/grouped_gemm.py",
        (
            ("row = row_first + tl.where(t < row_count, t, 0)", "row = row_first + tl.where(t <= row_count, t, 0)"),
            ("store_rows(result, out, row_places, row, t < row_count", "store_rows(result, out, row_places, row, t <= row_count"),
        ),
        ("tests/cpu/test_grouped_gemm.py::test_rows_no_expert_owns_are_not_written",),
    ),
    Mutant(
        "columns beyond K not zero", "kernels/grouped_gemm.py",
        (("mask=mask, other=0.0)", "mask=mask, other=1.0)"),), _KERNEL,
    ),
    Mutant(
        "columns beyond K not zero", "experts/cpu/decode.py",
        (("x = functional.pad(x, (0, stored - self.columns))", "x = functional.pad(x, (0, stored - self.columns), value=1.0)"),), _CPU,
    ),
    # Biases, and the router weight on the input.
    Mutant("bias dropped", "experts/reference.py", (("both = both + weights.gate_up_bias[expert].float()", "both = both + 0.0"),), _LAYER),
    Mutant("down bias dropped", "experts/reference.py", (("out = out + weights.down_bias[expert].float()", "out = out + 0.0"),), _LAYER),
    Mutant("bias dropped", "experts/cpu/grouped.py", (("out[span].add_(bias[expert])", "out[span].add_(0.0)"),), _CPU),
    Mutant("bias of the neighbouring expert", "experts/cpu/grouped.py", (("out[span].add_(bias[expert])", "out[span].add_(bias[expert - 1])"),), _CPU),
    Mutant("up's bias dropped", "kernels/grouped_gemm.py", (("up += tl.load(bias + last)", "up += 0.0 * tl.load(bias + last)"),), _KERNEL),
    Mutant(
        "router weight on the input dropped", "experts/reference.py",
        (("(x.float() * batch.input_weights[span, None])", "(x.float() * 1.0)"),), _LAYER,
    ),
    Mutant(
        "router weight on the input dropped", "experts/cpu/grouped.py",
        (("(x.float() * batch.input_weights[own, None])", "(x.float() * 1.0)"),), _CPU,
    ),
    Mutant(
        "router weight on the input dropped", "experts/triton/packed.py",
        (
            (
                "            weights=batch.input_weights,\n",
                "            weights=torch.ones(batch.source.numel(), device=batch.x.device) if gathered else None,\n",
            ),
        ),
        ("tests/cpu/test_grouped_gemm.py::test_router_weight_on_the_input",),
    ),
    Mutant("norm of the latent output skipped", "stages/latent.py", (("if self.norm is not None:", "if False:"),), _LAYER),
    # The kernels around the products.
    Mutant(
        "router weight dropped", "kernels/weighted_sum.py",
        (("value * tl.where(kept, weight, absent)", "value * tl.where(kept, 1.0, absent)"),), _SMALL,
    ),
    Mutant(
        "the neighbouring slot's weight", "kernels/weighted_sum.py",
        (
            (
                "weight = tl.load(weights + token * weight_stride + k)",
                "weight = tl.load(weights + token * weight_stride + (k + 1) % TOP_K)",
            ),
        ),
        _SMALL,
    ),
    Mutant("the input row of another token, unsorted", "kernels/tiles.py", (("return row // TOP_K", "return row % TOP_K"),), _DIRECT),
    Mutant("ids of an unsorted batch not checked", "kernels/weighted_sum.py", (("(slot < (experts if IDS else count))", "(slot < (1 << 30 if IDS else count))"),), ("tests/cpu/test_direct.py::test_the_sum_by_ids_is_the_sum_by_slots",)),
    Mutant("bias used in the weights", "kernels/route.py", (("        if KEPT:\n            basis = key\n", "        score = choice\n        if KEPT:\n            basis = key\n"),), _SMALL),
    Mutant("renormalize skipped", "kernels/route.py", (("tl.div_rn(weight, tl.zeros([BLOCK_K], tl.float32) + total)", "weight"),), _SMALL),
    Mutant(
        "tie broken the other way", "kernels/route.py",
        (("chosen = tl.min(tl.where(key == most, expert, 0x7FFFFFFF), 0)", "chosen = tl.max(tl.where(key == most, expert, -1), 0)"),), _SMALL,
    ),
    Mutant("routed scale dropped", "kernels/route.py", (("    weight = weight * scale\n", ""),), _SMALL),
    Mutant("E4M3 scale of rows inverted", "kernels/scales.py", (("value * tl.expand_dims(tl.div_rn(1.0, scale), last), 0.0)", "value * tl.expand_dims(scale, last), 0.0)"),), _SMALL),
    # Products whose rows do not depend on each other.
    Mutant("all rows multiplied at once", "ops/linear.py", (("made = _in_blocks(x, weight)", "made = x.to(weight.dtype) @ weight.T"),), _LINEAR),
    Mutant(
        "the last term of a float32 weight dropped", "kernels/linear.py",
        (("        found = dot(w2, x, found, ASM)\n        found = dot(w1, x, found, ASM)", "        found = dot(w1, x, found, ASM)"),), _LINEAR,
    ),
    Mutant("the first part of a sum left out", "kernels/linear.py", (("tl.static_range(PARTS)", "tl.static_range(1, PARTS)"),), _LINEAR),
    Mutant("a part not started anew", "kernels/linear.py", (("tl.where(starts, product, part + product)", "part + product"),), _LINEAR),
    # Four-bit weights and E4M3 rows.
    Mutant(
        "row scale dropped", "kernels/w4a8.py",
        (("acc *= tl.load(row_scale + expert * (row_tiles * 64) + tl.minimum(n_first + n, last_row))[:, None]", "acc *= 1.0"),), _FOUR,
    ),
    Mutant(
        "row scale of the neighbouring row", "kernels/w4a8.py",
        (("tl.minimum(n_first + n, last_row))[:, None]", "tl.maximum(tl.minimum(n_first + n, last_row) - 1, 0))[:, None]"),), _FOUR,
    ),
    Mutant(
        "scales of two quarters swapped (INT4, E4M3 rows)", "kernels/w4a8.py",
        (("pair if quarter % 2 else pair << 16", "pair << 16 if quarter % 2 else pair"),), _FOUR,
    ),
    Mutant(
        "tokens of the neighbouring quarter (INT4, E4M3 rows)", "kernels/w4a8.py",
        (("_load_tokens(x_ptr + quarter * STEP", "_load_tokens(x_ptr + (quarter ^ 1) * STEP"),), _FOUR,
    ),
    Mutant(
        "halves of a quarter swapped (INT4, E4M3 rows)", "experts/triton/words.py",
        (("permute(0, 1, 2, 5, 3, 4, 6).flatten(2)", "permute(0, 1, 2, 5, 3, 4, 6).flip(5).flatten(2)"),), _FOUR,
    ),
    # Activation order.
    Mutant("g_idx ignored", "formats/int_affine.py", (("        return self.group_of.reshape(-1, self.shape[-1]).long()", "        return self.group_of.reshape(-1, self.shape[-1]).long().sort(-1).values"),), ("tests/cpu/test_published.py",)),
    Mutant("g_idx out of range taken", "formats/integers.py", (("if low < 0 or high >= groups:", "if False:"),), ("tests/cpu/test_published.py", "tests/cpu/test_published_scales.py")),
    # Codes that look numbers up.
    *(
        Mutant(name, file, (edit,), ("tests/cpu/test_grouped_gemm.py::test_codes_that_look_numbers_up",))
        for name, file, edit in (
            ("the smaller term of a looked up number dropped", "kernels/grouped_gemm.py", ("for term in tl.static_range(2):", "for term in tl.static_range(1):")),
            ("numbers of gate looked up for up", "kernels/grouped_gemm.py", ("STACKED,\n                SETS - 1, WHOLE", "STACKED,\n                0, WHOLE")),
            ("terms of a looked up number swapped", "experts/triton/lanes.py", ("(first.dtype), first), dim=-1)", "(first.dtype), first.flip(-1)), dim=-1)")),
            ("the scale of the neighbouring half", "kernels/decode.py", ("n2 = tl.load(scale + WORDS // 2 * step) if WORDS > 1 else n0", "n2 = tl.load(scale + WORDS // 4 * step) if WORDS > 1 else n0")),
        )
    ),
    # Sums in units of the group that is added last.
    *(
        Mutant(name, file, (edit,), ("tests/cpu/test_grouped_gemm.py",))
        for name, file, edit in (
            ("the unit of a sum forgotten", "kernels/grouped_gemm.py", ("                unit = f[quarter]\n", "")),
            ("a sum left in its unit", "kernels/grouped_gemm.py", ("        up *= up_unit * WHOLE_NUMBER\n", "        up *= WHOLE_NUMBER\n")),
            ("gate in the unit of up", "kernels/grouped_gemm.py", ("            gate *= gate_unit * WHOLE_NUMBER\n", "            gate *= up_unit * WHOLE_NUMBER\n")),
            ("codes of a group without a unit kept", "experts/triton/lanes.py", ("    return torch.where(gone, zeros, codes)\n", "    return codes\n")),
            ("the unit of a K block forgotten", "kernels/grouped_gemm.py", ("acc, unit = finished(product, ASM), f[0]", "acc = finished(product, ASM)")),
            ("minima in the unit of codes", "kernels/grouped_gemm.py", ("in_units(acc, unit, m[1], ASM), ASM), m[1]", "in_units(acc, unit, m[1], ASM), ASM), unit")),
            ("integers a 64th", "kernels/grouped_gemm.py", ("divisor(x.dtype.element_ty == tl.float16)", "1.0")),
            ("minima beside a zero half kept", "experts/triton/lanes.py", ("steps * (halves == kept).unsqueeze(1) if", "steps if")),
            ("a step of zero for a unit", "experts/triton/lanes.py", ("steps + (steps == 0)", "steps")),
            ("ones beyond the blocks of a file forgotten", "experts/triton/lanes.py", ("(0, short), value=1.0)", "(0, short))")),
        )
    ),
    # Beside float16 tokens.
    *(
        Mutant(name, file, (edit,), (f"tests/cpu/{test}.py",))
        for name, file, test, edit in (
            ("what lanes in float16 leave of a scale forgotten", "experts/triton/lanes.py", "test_grouped_gemm", ("largest / (1 if not half", "largest / (1 if half")),
            ("what lanes in float16 leave of a global scale forgotten", "experts/triton/lanes.py", "test_grouped_gemm", ("128.0 if half else 512.0", "512.0")),
            ("the power of two of a row in float16 forgotten", "experts/triton/lanes.py", "test_grouped_gemm", ("scale.copy_(power_of_two(power))", "scale.fill_(1.0)")),
            ("an exponent's bit of the third quarter lost (float16, as on a device)", "kernels/decode.py", "test_decoding_text", ("$4, 6; and.b32 a, a, 0x0E000E00;", "$4, 6; and.b32 a, a, 0x06000600;")),
            ("sign of the last quarter lost (float16, as on a device)", "kernels/decode.py", "test_decoding_text", ("shl.b32 a, $4, 2; lop3", "shl.b32 a, $4, 3; lop3")),
            ("upper codes of a byte a bit too low (as on a device)", "kernels/decode.py", "test_decoding_text", ('"upper": "0x7D007D00"', '"upper": "0x7D807D80"')),
            ("a byte read twice (as on a device)", "kernels/decode.py", "test_decoding_text", ("$2, 0, 0x4341;", "$2, 0, 0x4240;")),
            ("a byte read twice (float16, as on a device)", "kernels/decode.py", "test_decoding_text", ("$2, base, 0x5351;", "$2, base, 0x5250;")),
            ("a sixteenth of base forgotten (float16, as on a device)", "kernels/decode.py", "test_decoding_text", ("add.rn.KIND c, $8, most;", "add.rn.KIND c, $8, none;")),
            ("E4M3 a bit too low (float16, as on a device)", "kernels/decode.py", "test_decoding_text", ('"left": 7', '"left": 6')),
            ("E4M3 without a scale times 2^7 (float16, as on a device)", "kernels/decode.py", "test_decoding_text", ('"0x5C005C00"', '"0x58005800"')),
        )
    ),
    # Quarters of a K block as one product.
    *(
        Mutant(name, file, (edit,), ("tests/cpu/test_grouped_gemm.py::test_experts_against_the_reference",))
        for name, file, edit in (
            ("quarters joined in another order", "kernels/decode.py", ("both = tl.join(tl.join(a0, a2), tl.join(a1, a3))", "both = tl.join(tl.join(a0, a1), tl.join(a2, a3))")),
            ("gate read again for up ahead of its product", "kernels/grouped_gemm.py", ("u0, u1 = _load_weights(up_ptr, k[None, :], left, WIDTH, WEIGHT, EVEN_K or QUARTERS)\n                gate", "u0, u1 = w0, w1\n                gate")),
        )
    ),
    # The shared expert.
    Mutant(
        "shared expert dropped", "layer.py",
        (("shared = None if self.shared is None or many else partial(self.shared, x, memory)", "shared = None"),),
        _LAYER,
    ),
    *(
        Mutant(name, file, (edit,), (f"tests/cpu/test_merged_shared.py::test_{test}",))
        for name, file, test, edit in (
            ("merged: routed scaling factor on the shared expert", "ops/route_wide.py", "a_wide_one_is_cut_into_several", ("torch.ones_like(more)", "torch.full_like(weights[:, :merged], 2.5)")),
            ("merged: kernel doubles the shared expert", "kernels/route.py", "a_kernel_writes_the_further_slots", ("mask=given, other=1.0)", "mask=given, other=2.0)")),
            ("merged: foreign id reaches the shared expert", "ops/route_wide.py", "a_routing_of_the_callers_own_reaches_routed_experts_alone", ("(ids < -1) | (ids >= experts)", "ids < -1")),
            ("merged: kernel lets a foreign id reach the shared expert", "kernels/route.py", "a_kernel_writes_the_further_slots", ("(chosen >= -1) & (chosen < experts)", "chosen >= -1")),
            ("merged: gate and up swapped in the pieces", "stages/shared.py", "a_wide_one_is_cut_into_several", ("gate_up=shared.gate_up.rows(*own)", "gate_up=replace(shared.gate_up, **{k: t.flip(1) for k, t in shared.gate_up.tensors().items()}).rows(*own)")),
            ("merged: columns of another piece", "stages/shared.py", "a_wide_one_is_cut_into_several", ("shared.down.columns(*own)) for own", "shared.down.columns(*cuts[own == cuts[0]])) for own")),
            ("merged: other blocks taken for alike", "stages/shared.py", "weights_that_are_stored_in_another_way_are_refused", ("if kind != kinds[0]:", "if False:")),
            ("merged: a swap drops the shared expert", "stages/shared.py", "a_swap_keeps_the_shared_expert", ("if before.merged or made.merged:", "if False:")),
            ("merged: over ranks too", "sharing.py", "what_a_plan_says_of_a_merged_one", ('if dispatcher != "local":\n        return', "if False:\n        return")),
        )
    ),
    Mutant("shared expert's gate dropped", "stages/shared.py", (("if self.gate is None:", "if True:"),), _LAYER),
    # Tensor-parallel slices.
    Mutant(
        "tensor-parallel slice of the next rank", "checkpoint/loader.py",
        (
            (
                "return (placement.tp_rank * width, (placement.tp_rank + 1) * width), width",
                "start = (placement.tp_rank + 1) % placement.tp_size * width\n    return (start, start + width), width",
            ),
        ),
        _LOAD,
    ),
    Mutant(
        "tensor-parallel slice off by one row", "checkpoint/loader.py",
        (
            (
                "return (placement.tp_rank * width, (placement.tp_rank + 1) * width), width",
                "start = min(placement.tp_rank * width + 1, wide - width)\n    return (start, start + width), width",
            ),
        ),
        _LOAD,
    ),
    Mutant("down bias added on every rank", "checkpoint/loader.py", (("torch.zeros_like(down) if placement.tp_rank else down", "down"),), _LOAD),
    # Checks that look away.
    Mutant(
        "forbidden scales loaded and audited as fine", "checkpoint/layout.py",
        (("return payload, [_bad_scale(source, stored)] if bool(payload.faults()) else []", "return payload, []"),),
        ("tests/cpu/test_attacks.py", *_LOAD),
    ),
    Mutant(
        "overlapping tensors believed", "checkpoint/header.py", (("if info.start < at:", "if False:"),), ("tests/cpu/test_hostile.py",),
    ),
    Mutant(
        "expert ids not checked", "ops/route.py", (("outside = (ids < -1) | (ids >= experts)", "outside = ids < -1"),), _ROUTE,
    ),
    Mutant("queries of Mixtral left in llama.cpp's order", "integrations/transformers/gguf.py", (("if model.interleaved and kind", "if False and kind"),), _WHOLE_GGUF),
    Mutant("keys of Mixtral turned by the heads of queries", "integrations/transformers/gguf.py", (("{'_kv' * (kind == 'attn_k')}", ""),), _WHOLE_GGUF),
    Mutant("YaRN's factor left out", "integrations/transformers/gguf.py", (('rope | {"factor": config.number("rope.scaling.factor")}', 'rope | {"factor": 1.0}'),), _WHOLE_GGUF),
    Mutant("a matrix outside the experts decoded twice", "checkpoint/dense_weights.py", (("self.stored).to(device).decode(dtype)", "self.stored).to(device).decode(dtype).square()"),), ("tests/cpu/test_whole_quantised.py",)),
    # NaN, and ids that are no experts, must be seen.
    Mutant("a NaN score adds nothing", "ops/route.py", (("keepdim=True), _NO_EXPERT)", "keepdim=True), -1)"),), _ROUTE),
    Mutant("a NaN bias chooses experts", "ops/route.py", (("scores if bias is None else choice, _select", "scores, _select"),), _ROUTE),
    Mutant("an unknown token adds nothing", "ops/route.py", (("outside.unsqueeze(1), _NO_EXPERT)", "outside.unsqueeze(1), -1)"),), _ROUTE),
    Mutant("an unknown entry of the hash table adds nothing", "ops/route.py", (("(ids >= experts), _NO_EXPERT)", "(ids >= experts), -1)"),), _ROUTE),
    Mutant("infinite logits clamped before they are scored", "ops/route.py", (("    raw = logits.to(torch.float32)\n", "    raw = logits.to(torch.float32).clamp(-_LARGEST, _LARGEST)\n"),), _ROUTE),
    Mutant("checked lets a NaN row through", "ops/route.py", (("        _refuse_bad_rows(", "        _ = (")  ,), _ROUTE),
    Mutant("an id that is no expert adds nothing", "ops/permute.py", (("torch.where(ids == -1, -1, -2)", "torch.where(ids == -1, -1, -1)"),), ("tests/cpu/test_permute.py", *_NAN)),
    Mutant("an id that is no expert adds nothing", "ops/weighted_sum.py", (("torch.where(lost, torch.nan, 0.0)", "torch.where(lost, 0.0, 0.0)"),), ("tests/cpu/test_weighted_sum.py", *_NAN)),
    Mutant("a NaN weight adds nothing", "ops/weighted_sum.py", (("weights.float().t()[span]", "weights.float().nan_to_num(0.0).t()[span]"),), ("tests/cpu/test_weighted_sum.py", *_NAN)),
    Mutant("a NaN weight on the input adds nothing", "ops/permute.py", (("to(torch.float32).masked_fill(dropped, 0.0)", "to(torch.float32).nan_to_num(0.0).masked_fill(dropped, 0.0)"),), _NAN),
    Mutant("a NaN score adds nothing", "kernels/route.py", (("chosen = tl.where(poisoned, -2, chosen)", "chosen = tl.where(poisoned, -1, chosen)"),), _SMALL),
    Mutant("a NaN bias chooses experts", "kernels/route.py", (("        judged = choice\n", "        judged = score\n"),), _SMALL),
    Mutant("an unknown entry of the hash table adds nothing", "kernels/route.py", (("(table < experts), table, -2)", "(table < experts), table, -1)"),), _SMALL),
    Mutant("an id that is no expert adds nothing", "kernels/permute.py", (("tl.where(found == -1, -1, -2)", "tl.where(found == -1, -1, -1)"),), _SMALL),
    Mutant("an id that is no expert adds nothing, among many", "kernels/permute.py", (("(tl.where(kept, expert, absent).to(tl.int64) << 32)", "(tl.where(kept, expert, -1).to(tl.int64) << 32)"),), _SMALL),
    Mutant("an id that is no expert adds nothing", "kernels/weighted_sum.py", (("tl.where(slot == -1, 0.0, float(\"nan\"))", "tl.where(slot == -1, 0.0, 0.0)"),), (*_SMALL, *_DIRECT)),
    Mutant("NaN in a group of rows hidden", "ops/quantize.py", (("scales = scale.masked_fill(~finite, torch.nan)", "scales = scale"),), ("tests/cpu/test_quantize.py", *_NAN)),
    Mutant("NaN in a group of rows hidden", "kernels/quantize.py", (("tl.where(finite, scale, float(\"nan\"))", "scale"),), (*_SMALL, *_DIRECT)),
    Mutant("a format without a kernel written as another", "ops/quantize.py", (("there is none.\"\"\"\n        raise _no_kernel(self)\n", "there is none.\"\"\"\n        _CASTS[0].write(given, made)\n"),), ("tests/cpu/test_small_kernels.py::test_an_activation_format_without_a_kernel_is_refused",)),
    # Activations in eight bits.
    Mutant(
        "activations left in 32 bits", "experts/reference.py",
        (("inner = between.round_trip(activate(both, packed.activation))", "inner = activate(both, packed.activation)"),),
        ("tests/cpu/test_proofs.py",),
    ),
    Mutant(
        "input left in 32 bits", "experts/reference.py", (("x = form.round_trip(x)", "x = x.float()"),),
        ("tests/cpu/test_proofs.py",),
    ),
    Mutant("scales across of the first K block", "kernels/w4a8.py", (("xs_ptr += DEPTH * scale_step", "xs_ptr += 0 * scale_step"),), _FOUR),
    Mutant("tokens of a step's first K block", "kernels/w4a8.py", (("x_ptr + at * (2 * HALF), valid, BLOCK_T)", "x_ptr + 0 * (2 * HALF), valid, BLOCK_T)"),), _FOUR),
    Mutant("the last of an odd number of K blocks dropped", "kernels/w4a8.py", (("REST: tl.constexpr = K_BLOCKS % DEPTH", "REST: tl.constexpr = 0"),), _FOUR),
    Mutant("scales across in the order of the tokens", "experts/triton/packed.py", (("across(x_scale, source, used", "across(x_scale, None, used"),), _FOUR),
    # Scales of activations that a checkpoint has.
    Mutant("the calibrated scale of gate and up used for down", "ops/quantize.py", (("form.within(reach[1])", "form.within(reach[0])"),), _STATIC),
    Mutant(
        "the calibrated scale of gate and up used for down", "experts/triton/packed.py",
        (("inner_format(self.forms[1], self", "inner_format(self.forms[0], self"),), _STATIC,
    ),
    Mutant(
        "the smallest calibrated scale of all experts", "checkpoint/activation_scales.py",
        (("max(found.gate_up) * first, max(found.down) * second", "min(found.gate_up) * first, min(found.down) * second"),), _STATIC,
    ),
    Mutant(
        "a calibrated scale that divides multiplied", "checkpoint/activation_scales.py",
        (("values.reciprocal() if name", "values if name"),), _STATIC,
    ),
    Mutant(
        "a rank's own calibrated scales", "loading.py",
        (("(source for _, source in layer.sources())", "(source for e, source in layer.sources() if e in held.expert_ids)"),), _STATIC,
    ),
    Mutant(
        "an expert without a calibrated scale left out", "checkpoint/activation_scales.py",
        (("    if found.missing:\n        raise", "    if found.missing and not found.down:\n        raise"),), _STATIC,
    ),
    Mutant(
        "a row's own scale instead of the calibrated one", "kernels/scales.py",
        (("        scale = tl.where(finite, fixed, scale)\n", "        scale = scale + 0.0 * fixed\n"),),
        ("tests/cpu/test_small_kernels.py::test_codes_of_a_calibrated_scale",),
    ),
    # Experts that move.
    Mutant(
        "a checksum that forgets the pieces before", "balance/checksum.py",
        (("torch.arange(at + start + 1, at + start + 1 + own.numel(), device=own.device)",
          "torch.arange(start + 1, start + 1 + own.numel(), device=own.device)"),), _SUM,
    ),
    Mutant(
        "a checksum of what arrived compared with itself", "balance/mover.py",
        (("(checksum(parts) == sums[move.expert]).all()", "(checksum(parts) == checksum(parts)).all()"),), _MOVE,
    ),
    Mutant(
        "the slot of the destination sent", "balance/mover.py",
        (("packed.take(move.source_slot if send else move.slot)", "packed.take(move.slot)"),), _MOVE,
    ),
    Mutant(
        "an expert dropped before its copy is there", "balance/mover.py",
        (("for expert in own if expert in target}", "for expert in target}"),), _ROUNDS,
    ),
    Mutant(
        "a switch that keeps the number of copies", "parallel/expert_map.py",
        (("            self.copies.copy_(copies)\n", ""),), ("tests/cpu/test_expert_map.py",),
    ),
    Mutant(
        "scales of rows left behind", "experts/triton/matrix.py",
        (('"values", "scale", "row_scale", "bias"', '"values", "scale", "bias"'),), ("tests/cpu/test_slots.py",),
    ),
)  # fmt: skip

# What only a GPU runs: the device form of decoding, beside which the interpreter runs a plain one, and large batches.
_DEVICE: tuple[Mutant, ...] = (
    Mutant("quarters swapped (device)", "kernels/decode.py", (("0x81C081C0; fma.rn.KIND $1, b, $6, none;", "0x81C081C0; fma.rn.KIND $1, a, $6, none;"),), _GPU),
    Mutant("the neighbouring group's scale (device)", "kernels/decode.py", (("fma.rn.KIND $2, b, $7, none;", "fma.rn.KIND $2, b, $6, none;"),), _GPU),
    Mutant("sign of the last quarter dropped (device)", "kernels/decode.py", (("shl.b32 b, $4, 1; and", "shl.b32 b, $4, 2; and"),), _GPU),
    Mutant("zero points twice (device)", "kernels/decode.py", (("* -0.015625)", "* -0.03125)"),), _GPU),
    Mutant("a byte read twice (device)", "kernels/decode.py", (("$2, 0, 0x4341;", "$2, 0, 0x4240;"),), _GPU),
    Mutant("a byte read twice in float16 (device)", "kernels/decode.py", (("$2, base, 0x5351;", "$2, base, 0x5250;"),), _GPU),
    Mutant("a step of the neighbouring group (device)", "kernels/decode.py", (("base, 0x5{q}5{q};", "base, 0x515{q};"),), _GPU),
    Mutant("a sixteenth of a step forgotten (device)", "kernels/decode.py", (("\"mul.rn.f16x2 b, b, part;\"", "\"\""),), _GPU),
    Mutant("E4M3 bias off by one (device)", "kernels/decode.py", (("\"0x7B807B80\"", "\"0x7C007C00\""),), _GPU),
    Mutant("sign of the second half dropped (MXFP4, E4M3 rows, device)", "kernels/w4a8.py", (("shl.b32 s, $W, 4;", "shl.b32 s, $W, 5;"),), _GPU_FOUR),
    Mutant("scale of the neighbouring exponent (MXFP4, E4M3 rows, device)", "kernels/w4a8.py", (("d * 0x01010101 + 0x1C181410", "d * 0x01010101 + 0x1C181418"),), _GPU_FOUR),
    Mutant("-8 read as -7 (INT4, E4M3 rows, device)", "kernels/w4a8.py", (("b, 0xCACCCED0, 0xB8C0C4C8, {0};", "b, 0xCACCCECE, 0xB8C0C4C8, {0};"),), _GPU_FOUR),
    Mutant("second operand dropped (NVFP4, E4M3 rows, device)", "kernels/w4a8.py", (("sub.u32 $3, $1, b;", "sub.u32 $3, $1, $1;"),), _GPU_FOUR),
    Mutant("the neighbouring group's scale (E4M3 rows, device)", "kernels/w4a8.py", (("[scales, which + 0x4440]", "[scales, (which ^ 1) + 0x4440]"),), _GPU_FOUR),
    Mutant("the sum does not wait for a shared expert beside it", "runtime/side_stream.py", (("torch.cuda.current_stream(device).wait_stream(side)", "pass"),), _GPU_BESIDE),
    Mutant("a shared expert begins before its tokens are there", "runtime/side_stream.py", (("    side.wait_stream(torch.cuda.current_stream(device))\n", ""),), _GPU_BESIDE),
)  # fmt: skip

# Mistakes in kernels and in what packs and orders for them, made again for the tests of a GPU to see.
_ON_GPU: dict[str, tuple[str, ...]] = {
    "kernels/grouped_gemm.py": _GPU,
    "kernels/activation.py": ("tests/gpu/test_experts.py::test_every_activation",),
    "kernels/w4a8.py": _GPU_FOUR,
    "kernels/tiles.py": _GPU_CLOSE,
    "kernels/weighted_sum.py": (*_GPU_CLOSE, *_GPU_SMALL),
    "kernels/route.py": _GPU_SMALL,
    "kernels/prefill.cu": _GPU_LARGE,
    "kernels/quantize.py": _GPU_SMALL,
    "kernels/scales.py": _GPU_SMALL,
    "experts/triton/lanes.py": (*_GPU, "tests/gpu/test_verify.py"),
    "experts/triton/packed.py": ("tests/gpu/test_static_scales.py", *_GPU_SMALL, *_GPU),
    "experts/triton/words.py": _GPU_FOUR,
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


def applied(mutant: Mutant, text: str) -> str:
    """Return ``text`` with the mistake in it; ValueError unless every pattern occurs exactly once."""
    for before, after in mutant.edits:
        count = text.count(before)
        if count != 1 or before == after:
            msg = f"{mutant.name} in {mutant.file}: the pattern occurs {count} times, needed is once: {before!r}"
            raise ValueError(msg)
        text = text.replace(before, after)
    return text


def _tried(mutant: Mutant) -> tuple[Mutant, str, float]:
    with tempfile.TemporaryDirectory() as room:
        begun = time.monotonic()
        return mutant, _killed_by(mutant, Path(room)), time.monotonic() - begun


def _killed_by(mutant: Mutant, room: Path) -> str:
    """Run the mutant's tests until one fails and return its name, empty when the mutant survives."""
    source = room / "src"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = source / "collegium" / mutant.file
    target.write_text(applied(mutant, target.read_text(encoding="utf-8")), encoding="utf-8")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "COLUMNS": "400"}
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    if mutant in GPU_MUTANTS:
        options += ["-o", "filterwarnings=default"]  # as make gpu-test: what is installed there may warn
    tests = [test for test in mutant.tests if (ROOT / test.partition("::")[0]).exists()]
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"time limit of {_LIMIT} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"a crash, signal {-done.returncode}"  # memory that is nobody's, in the interpreter
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode != 1 or not failed:
        msg = f"{mutant.name} in {mutant.file}: the tests could not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise RuntimeError(msg)
    return failed[0].removeprefix("FAILED ").partition(" - ")[0].partition("[")[0]


def _rows() -> list[dict[str, str]]:
    return list(csv.DictReader(RESULTS.read_text(encoding="utf-8").splitlines())) if RESULTS.exists() else []


def _save(found: list[tuple[Mutant, str, float]]) -> None:
    """Write results, those of mutants not run now kept, in the order of the lists."""
    rows = {(row["mutant"], row["file"]): row for row in _rows()}
    for mutant, test, seconds in found:
        key = (mutant.name, mutant.file)
        rows[key] = {"mutant": key[0], "file": key[1], "killed_by": test, "seconds": f"{seconds:.0f}"}
    keys = [(mutant.name, mutant.file) for mutant in (*MUTANTS, *GPU_MUTANTS)]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(
            file, ("mutant", "file", "killed_by", "seconds"), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows[key] for key in keys if key in rows)


def page() -> str:
    """Return docs/mutants.md as the lists and the committed results make it."""
    rows = {(row["mutant"], row["file"]): row for row in _rows()}
    killed = sum(bool(row["killed_by"]) for row in rows.values())
    lines = [
        "# Mutants",
        "",
        "Tests that cannot fail prove nothing. Each row is one known kind of mistake, injected alone into a copy of the",
        "source; the tests named beside it are the first that failed. `make mutants` runs them all and fails when one",
        "survives; `scripts/mutants.py` holds the list and writes this page. Kernels run in Triton's interpreter there; with",
        "`--gpu` their mistakes, and those in the device form of their decoding, are made again for the tests of a GPU.",
        "",
        f"{killed} of {len(rows)} mutants run were killed ([results](../benchmarks/results/mutants.csv)).",
        "",
        "| mutant | in | killed by |",
        "| --- | --- | --- |",
    ]
    for mutant in (*MUTANTS, *GPU_MUTANTS):
        row = rows.get((mutant.name, mutant.file))
        test = "not run yet" if row is None else row["killed_by"] or "**survived**"
        file, _, name = test.partition("::")
        shown = f"`{name}` in `{file}`" if name else test
        lines.append(f"| {mutant.name} | `{mutant.file}` | {shown} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run the mutants asked for; 1 when one survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="text in the name or the file")
    parser.add_argument("--gpu", action="store_true", help="the mutants for the tests of a GPU")
    parser.add_argument("--new", action="store_true", help="those alone that have no result yet")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    parser.add_argument("--page", action="store_true", help="write docs/mutants.md and stop")
    asked = parser.parse_args()
    chosen = [m for m in (GPU_MUTANTS if asked.gpu else MUTANTS) if asked.only in f"{m.name} {m.file}"]
    known = {(row["mutant"], row["file"]) for row in _rows()} if asked.new else set[tuple[str, str]]()
    chosen = [m for m in chosen if (m.name, m.file) not in known]
    found: list[tuple[Mutant, str, float]] = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutant, test, seconds in pool.map(_tried, [] if asked.page else chosen):
            found.append((mutant, test, seconds))
            print(f"{seconds:4.0f} s  {mutant.name} ({mutant.file}): {test or 'SURVIVED'}", flush=True)
            _save(found)
    PAGE.write_text(page(), encoding="utf-8")
    survivors = [mutant for mutant, test, _ in found if not test]
    print(f"{len(found) - len(survivors)} of {len(found)} mutants killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
