"""Every reason that a row of a table can refuse for is given by some plan: none is there that can never be."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collegium import (
    DeviceFacts,
    Limits,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RoutingSpec,
    SharedSpec,
    plan,
)
from collegium.experts import KERNELS
from collegium.experts.cpu import panels
from collegium.experts.triton import table, tiling
from collegium.parallel import DISPATCHERS
from collegium.parallel.expert_parallel import refuse_split
from collegium.parallel.placement import linear, tensor_parallel
from collegium.parallel.slices import SlicesKind
from collegium.pipelines import PIPELINES, mega
from collegium.planning import _cannot_capture  # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

CPU = DeviceFacts(kind="cpu", threads=1)
HOPPER = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, sms=132, peers=4)
SPEC = MoESpec(hidden_size=7168, intermediate_size=512, num_experts=8, routing=RoutingSpec(top_k=2))
FOUR = replace(SPEC, weight_format="mxfp4")
SPLIT = linear(8, 1, 4)


def asked(spec: MoESpec = SPEC, device: DeviceFacts = HOPPER, **more: Any) -> Problem:
    return Problem(spec=spec, device=device, **more)


def routed(spec: MoESpec = SPEC, **changes: Any) -> MoESpec:
    return replace(spec, routing=replace(spec.routing, **changes))


def on(*capability: int, **more: Any) -> DeviceFacts:
    return replace(HOPPER, capability=capability or None, **more)


FP8 = Overrides(activation_format="fp8_token")
MEGA = replace(FP8, pipeline="mega")
BLOCKS = replace(MEGA, activation_format="fp8_group128")
ASKS: list[tuple[Problem, Overrides | None]] = [
    (asked(device=CPU), None),
    (asked(), None),
    (asked(device=CPU, activation_format="fp8_token"), None),
    (asked(replace(SPEC, weight_format="gguf"), CPU), None),
    (asked(replace(SPEC, weight_format="bnb4", hidden_size=65), CPU), None),
    (asked(FOUR, CPU, dtype="fp32"), None),
    (asked(FOUR, CPU), None),
    *[(asked(FOUR, device), FP8) for device in (CPU, on(7, 0), on(8, 0), HOPPER)],
    (asked(device=CPU, graph=True), None),
    (asked(), Overrides(combine="reduced")),
    (asked(placement=Placement(expert_ids=(0, 1))), None),
    (asked(placement=SPLIT), None),
    (asked(device=CPU, placement=SPLIT), None),
    (asked(placement=SPLIT), Overrides(dispatcher="partial", combine="reduced")),
    (asked(replace(SPEC, shared=SharedSpec(intermediate_size=64)), placement=SPLIT), Overrides(dispatcher="partial")),
    (asked(replace(SPEC, latent_size=64, latent_norm_eps=1e-5), placement=SPLIT), Overrides(dispatcher="partial")),
    (
        asked(placement=Placement(world_size=2, expert_ids=(), ranks=((), (*range(8),)))),
        Overrides(dispatcher="partial"),
    ),
    (asked(placement=replace(SPLIT, ranks=())), None),
    (asked(placement=Placement(rank=0, world_size=2, expert_ids=tuple(range(8)), ranks=(tuple(range(8)), ()))), None),
    (asked(placement=Placement(rank=0, world_size=2, expert_ids=(0, 1), ranks=((0, 1), (2,)))), None),
    (asked(replace(SPEC, num_experts=130), placement=linear(130, 1, 65)), None),
    (asked(placement=SPLIT), Overrides(combine="reduced_fp8")),
    (asked(device=replace(HOPPER, peers=2), placement=SPLIT), None),
    (asked(placement=tensor_parallel(8, 1, 2)), None),
    (asked(placement=replace(SPLIT, tp_size=2)), None),
    (asked(routed(top_k=1, weight_on_input=True)), None),
    (asked(routed(top_k=8), limits=Limits(max_tokens=8)), None),
    (asked(FOUR, CPU, placement=SPLIT), MEGA),
    (asked(FOUR, placement=SPLIT), replace(MEGA, dispatcher="all_gather")),
    (asked(placement=SPLIT), Overrides(pipeline="mega")),
    (asked(replace(SPEC, weight_format="fp8_block", hidden_size=7176), placement=SPLIT), BLOCKS),
    (asked(FOUR, on(), placement=SPLIT), MEGA),
    (asked(FOUR, on(10, 0), placement=SPLIT), MEGA),
    (asked(routed(FOUR, top_k=1, weight_on_input=True), placement=SPLIT), MEGA),
    (asked(FOUR, placement=SPLIT), replace(MEGA, combine="reduced")),
    (asked(FOUR, placement=SPLIT, limits=Limits(max_tokens=1 << 20)), MEGA),
    (asked(FOUR, placement=SPLIT, limits=Limits(max_tokens=64)), FP8),
    (asked(FOUR, placement=replace(SPLIT, spare=1), limits=Limits(max_tokens=8)), FP8),
    (asked(replace(FOUR, weight_format="nvfp4"), placement=SPLIT, limits=Limits(max_tokens=8)), FP8),
    (asked(replace(FOUR, down_format="fp8_tensor"), placement=SPLIT), MEGA),
    (asked(replace(FOUR, down_format="int4_ordered")), None),
    (asked(replace(FOUR, down_format="fp32")), None),
    (asked(replace(FOUR, down_format="int4_affine")), FP8),
]  # fmt: skip


def functions() -> list[Callable[..., Any]]:
    """Return everything that gives a reason: of each row, and what rows share."""
    rows = [*KERNELS, *DISPATCHERS, *PIPELINES, SlicesKind]
    own = [(row if inspect.isclass(row) else type(row)).refuse for row in rows]
    shared = [refuse_split, tiling.refuse_machine, mega._slower, _cannot_capture]  # pyright: ignore[reportPrivateUsage]
    shared.append(table._refuse_down)  # pyright: ignore[reportPrivateUsage]
    return list(dict.fromkeys([*own, *shared]))


def reasons(function: Callable[..., Any]) -> list[tuple[range, str]]:
    """Return the lines of each text that ``function`` returns, and the text as written."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    texts = [
        value for value in found if isinstance(value, ast.JoinedStr) or isinstance(getattr(value, "value", None), str)
    ]
    return [(range(first + t.lineno - 1, first + (t.end_lineno or t.lineno)), ast.unparse(t)) for t in texts]


@contextmanager
def lines_of(functions: list[Callable[..., Any]]) -> Iterator[set[tuple[Any, int]]]:
    """Note every line of ``functions`` that runs."""
    seen: set[tuple[Any, int]] = set()
    codes = {function.__code__ for function in functions}

    def inside(frame: Any, _event: str, _argument: object) -> Any:
        seen.add((frame.f_code, frame.f_lineno))
        return inside

    before = sys.gettrace()
    sys.settrace(lambda frame, _event, _argument: inside if frame.f_code in codes else None)
    try:
        yield seen
    finally:
        sys.settrace(before)


def test_every_refusal_reason_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    every = functions()
    with lines_of(every) as seen:
        for problem, force in ASKS:
            with suppress(PlanError):
                plan(problem, force)
        monkeypatch.setattr(panels, "find_spec", lambda _: None)
        monkeypatch.setattr(tiling, "find_spec", lambda _: None)
        plan(asked(FOUR, CPU))
        plan(asked())
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        plan(asked(FOUR, CPU))
    texts = [(function, *reason) for function in every for reason in reasons(function)]
    assert len(texts) > 40
    never = [
        f"{function.__qualname__}: {text}"
        for function, lines, text in texts
        if not any((function.__code__, line) in seen for line in lines)
    ]
    assert never == []
