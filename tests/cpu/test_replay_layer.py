"""Layers whose passes are repeated from their recorded launches, with the real kernels in Triton's interpreter.

A stand-in for Triton's C function turns addresses back into the tensors that stand there, and knows no others: an
address that should have been exchanged, or that nobody keeps alive, is not found.
"""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from collegium import (
    DeviceFacts,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
)
from collegium.ops import linear, permute, quantize, rms_norm, route, route_wide, scatter, weighted_sum
from collegium.runtime import launch as launching, replay
from collegium.runtime.memory import Arena, Workspaces, shared_workspaces
from collegium.stages.call import Call
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from grids import exhaustive

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
HOPPER = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
E, H, INNER, K = 3, 128, 128, 2
FEW, SORTED = 2, 10  # tokens: as many as run unsorted, and more
pytest.importorskip("triton")
# The interpreter computes lanes that are masked afterwards, and NumPy warns of a division by zero in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Machine:
    """Every tensor that a kernel was given, by address and dtype."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def see(self, *tensors: torch.Tensor) -> None:
        self.tensors.update({(tensor.data_ptr(), tensor.dtype): tensor for tensor in tensors})


class Launcher:
    """Triton's launcher in Python: it calls a C function with the kernel's arguments as one sequence."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, rest[4:])


class Compiled:
    """A kernel compiled for arguments of the kinds of ``args``."""

    def __init__(self, machine: Machine, kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.function, self.packed_metadata = 0, ()
        self._machine, self._kernel, self._keywords = machine, kernel, keywords
        self._recorded = args
        self.run = Launcher(self._launch)

    def _launch(self, x: int, y: int, z: int, stream: int, function: int, arguments: Any) -> None:
        args = [self._tensor(*pair) for pair in zip(self._recorded, arguments, strict=False)]
        with _disable_current_modes():  # what the interpreter asks of torch is the kernel's own
            self._kernel[x, y, z](*args, **self._keywords)

    def _tensor(self, recorded: Any, argument: Any) -> Any:
        """Return ``argument`` with the tensors of its addresses, which are of the dtypes of ``recorded``."""
        if isinstance(recorded, tuple):
            fields = map(self._tensor, recorded, argument)
            return type(recorded)(*fields)
        if isinstance(argument, torch.Tensor):
            self._machine.see(argument)
            return argument
        dtype = getattr(recorded, "dtype", None)
        return argument if dtype is None else self._machine.tensors[argument, dtype]


class Loaded:
    """Compiled, and loaded when it is asked for what runs it."""

    run: Any = None


class Kernel:
    def __init__(self, machine: Machine, kernel: Any) -> None:
        self.machine, self.kernel, self.arg_names = machine, kernel, kernel.arg_names

    def warmup(self, *args: Any, grid: tuple[int, ...], **keywords: Any) -> Any:
        return Loaded()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def start(*args: Any, **keywords: Any) -> Compiled:
            self.kernel[grid](*args, **keywords)
            return Compiled(self.machine, self.kernel, args, keywords)

        return start


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    kernels: dict[int, Kernel] = {}

    def started(kernel: Any, *rest: Any, **options: Any) -> None:
        known = kernels.setdefault(id(kernel), Kernel(made, kernel))
        launching.launch(known, *rest, **options)

    for module in (linear, permute, quantize, rms_norm, route, route_wide, scatter, weighted_sum):
        monkeypatch.setattr(module, "on_device", lambda *_: True)
    for module in ("linear", "permute", "quantize", "rms_norm", "route_device", "scatter", "weighted_sum"):
        monkeypatch.setattr(f"collegium.ops.{module}.launch", started)
    monkeypatch.setattr("collegium.experts.triton.grouped.launch", started)
    monkeypatch.setattr(launching, "_direct", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return made


def layer_of(
    weights: str,
    activations: str | None,
    *,
    shared: bool = False,
    gated: bool = False,
    latent: int | None = None,
    on_input: bool = False,
    after_expert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **rule: Any,
) -> MoELayer:
    """Return a layer of random weights; latent: the width of its experts, after which there is a norm."""
    wide = latent or H
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K, weight_on_input=on_input, **rule),
        weight_format=weights,
        shared=SharedSpec(intermediate_size=INNER, gated=gated) if shared else None,
        latent_size=latent,
        latent_norm_eps=None if latent is None else 1e-5,
    )
    problem = Problem(spec=spec, device=HOPPER, limits=Limits(max_tokens=SORTED))
    chosen = plan(problem, Overrides(activation_format=activations))
    layer = MoELayer(
        encode_experts(random_experts(E, 2, INNER, wide, seed=1), weights),
        chosen,
        router=RouterWeights(
            weight=heavy_tailed(E, H, seed=2), expert_scale=torch.rand(E) + 0.5 if rule.get("expert_scale") else None
        ),
        shared=SharedWeights(
            experts=encode_experts(random_experts(1, 2, INNER, H, seed=3), weights),
            gate=heavy_tailed(1, H, seed=4) / H**0.5 if gated else None,
        )
        if shared
        else None,
        latent=LatentWeights(
            down=heavy_tailed(wide, H, seed=5) / H**0.5,
            up=heavy_tailed(H, wide, seed=6) / wide**0.5,
            norm=torch.rand(wide) + 0.5,
            norm_eps=1e-5,
        )
        if latent
        else None,
        after_expert=after_expert,
    )
    layer.workspaces = Workspaces(CPU)
    layer.workspaces.reserve(chosen.workspace_bytes)
    return layer


def given(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = heavy_tailed(tokens, H, seed=seed).bfloat16()
    return x, uneven_ids(tokens, K, E, seed=seed), torch.rand(tokens, K), torch.empty_like(x)


@pytest.mark.each_choice
@pytest.mark.parametrize("tokens", [FEW, SORTED])
@pytest.mark.parametrize(
    ("weights", "activations", "more"),
    [
        ("fp8_block", "fp8_group128", {}),
        ("mxfp4", "fp8_token", {"shared": True}),
        ("bf16", None, {"on_input": True}),
        ("bf16", None, {"latent": 64, "shared": True, "gated": True}),
        *exhaustive(
            ("mxfp4", None, {}),
            ("bf16", None, {"shared": True}),
            ("bf16", None, {"shared": True, "gated": True}),
            ("mxfp4", "fp8_token", {"shared": True, "gated": True}),
            ("bf16", None, {"latent": 64}),
        ),
    ],
    ids=str,
)
def test_replayed_passes_match_computed_bitwise(
    weights: str,
    activations: str | None,
    more: dict[str, Any],
    tokens: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No operation of torch is part of a pass: the second call is recorded, and the next ones are repeated."""
    repeated: list[int] = []
    start = replay._start
    monkeypatch.setattr(replay, "_start", lambda *args: (repeated.append(1), start(*args)))
    torch.manual_seed(3)
    layer = layer_of(weights, activations, **more)
    torch.manual_seed(3)
    plain = layer_of(weights, activations, **more)
    plain.workspaces = None
    pipelines = ("split",) if "on_input" in more else ("direct", "split")
    assert layer.plan.pipelines == pipelines
    assert [stretch.pipeline for stretch in layer.plan.token_ranges if stretch.tokens <= tokens][-1] == (
        pipelines[0] if tokens == FEW else "split"
    )
    kept: list[object] = []
    for call in range(4):
        x, ids, chosen, out = given(tokens, call)
        machine.see(x, ids, chosen, out)
        kept += [x, ids, chosen, out]
        routing = Routing(topk_ids=ids, topk_weights=chosen)
        layer.workspaces._free[-1].block.fill_(255)
        assert torch.equal(layer(x, routing=routing, out=out), plain(x, routing=routing))
        assert [isinstance(found, tuple) for found in layer._executor.replay._kinds.values()] == [call > 0]
    assert len(repeated) == 2


def test_chunks_beyond_max_tokens_are_replayed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[int] = []
    start = replay._start
    monkeypatch.setattr(replay, "_start", lambda *args: (repeated.append(1), start(*args)))
    layer, plain = layer_of("mxfp4", None, shared=True), layer_of("mxfp4", None, shared=True)
    plain.workspaces = None
    most = layer.plan.problem.limits.max_tokens
    x, ids, chosen, out = given(5 * most + 1, 3)
    machine.see(*(piece for whole in (x, ids, chosen, out) for piece in whole.split(most)))
    routing = Routing(topk_ids=ids, topk_weights=chosen)
    assert torch.equal(layer(x, routing=routing, out=out), plain(x, routing=routing))
    assert len(repeated) == 3, "one pass compiles, one is recorded, and the last one is of another kind"
    layer.checked = True
    layer(x, routing=Routing(topk_ids=ids.clamp(-1, E - 1), topk_weights=chosen), out=out)
    assert len(repeated) == 3


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"round_logits": True, "id_dtype": "int32"},
        {"shared": True, "gated": True},
        {"score": "sparsemixer", "renormalize": False, "jitter": 0.2},
        *exhaustive({"input_norm_eps": 1e-6, "expert_scale": True}, {"renormalize_floor": 0.9, "score": "sigmoid"}),
    ],
    ids=str,
)
def test_passes_with_a_router_are_repeated(rule: dict[str, Any], machine: Machine) -> None:
    torch.manual_seed(3)
    layer = layer_of("mxfp4", None, **rule)
    torch.manual_seed(3)
    plain = layer_of("mxfp4", None, **rule)
    plain.workspaces = None
    kept: list[object] = []
    for call in range(4):
        x, _, _, out = given(2, call)
        # What the router reads where the model normalises another input than the experts'.
        seen = None if layer.spec.routing.input_norm_eps is None else x * 3 + 1
        machine.see(x, out, *(() if seen is None else (seen,)))
        kept += [x, out, seen]
        layer.workspaces._free[-1].block.fill_(255)
        assert torch.equal(layer(x, router_input=seen, out=out), plain(x, router_input=seen))
    assert [isinstance(found, tuple) for found in layer._executor.replay._kinds.values()] == [True]
    # Whose kernels wrote what: logits of the input's dtype or of float32, ids as asked.
    spare = Arena(layer.workspaces._free[-1].block, layer._context.memory_map)
    x = given(2, 9)[0]
    chosen = layer._executor.router(Call(x, router_input=x), spare)
    assert chosen.topk_ids.dtype == getattr(torch, rule.get("id_dtype", "int64"))
    dtypes = {name: dtype for name, _, dtype in spare.part("router")._buffers}
    assert dtypes["out"] == (torch.bfloat16 if rule.get("round_logits") else torch.float32)


def test_swapped_experts_are_recorded_again(machine: Machine) -> None:
    layer = layer_of("mxfp4", None)
    for seed, weights in ((1, "mxfp4"), (4, "mxfp4"), (5, "bf16")):
        plain, made = layer_of(weights, None), encode_experts(random_experts(E, 2, INNER, H, seed=seed), weights)
        plain.swap(made)
        plain.workspaces = None
        if seed > 1:
            recorded = layer._executor.replay
            assert [isinstance(found, tuple) for found in recorded._kinds.values()] == [True]
            layer.swap(made)
            assert layer._executor.replay is not recorded
            layer.workspaces = Workspaces(CPU)
            layer.workspaces.reserve(layer.plan.workspace_bytes)
        kept: list[object] = []
        for call in range(4):
            x, _, _, out = given(2, call)
            machine.see(x, out)
            kept += [x, out]
            assert torch.equal(layer(x, out=out), plain(x))


def test_layers_with_workspaces_copy_and_pickle(machine: Machine) -> None:
    layer = layer_of("mxfp4", None, shared=True)
    x, ids, chosen, _ = given(2, 0)
    routing = Routing(topk_ids=ids, topk_weights=chosen)
    wanted = layer(x, routing=routing)
    for own in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert own.workspaces is shared_workspaces(CPU)
        assert torch.equal(own(x, routing=routing), wanted)


@pytest.mark.parametrize("what", ["checked", "choose", "after_expert"])
def test_custom_or_checked_passes_not_replayed(what: str, machine: Machine) -> None:
    seen: list[int] = []

    def after(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape[0])
        return rows

    layer = layer_of("bf16", None, after_expert=after if what == "after_expert" else None)
    if what == "checked":
        layer.checked = True
    elif what == "choose":
        layer.choose = lambda x, logits, k: (seen.append(len(x) * k), *logits.topk(k)[::-1])[1:]
    for call in range(3):
        x, *_ = given(FEW, call)
        layer(x)
    assert not any(isinstance(found, tuple) for found in layer._executor.replay._kinds.values())
    assert seen == ([] if what == "checked" else [FEW * K] * 3)
