"""A packed module that a plan determines: building what runs it, its options, copies and pickles."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..adapters import PackedAdapters
from ..errors import InputError
from ..experts import PackedWeights
from ..experts.measured import with_measured_tiles
from ..parallel import Dispatcher
from ..parallel.input_check import InputCheck
from ..planning import Plan
from ..runtime.memory import Memory, Workspaces
from ..runtime.packed_module import PackedModule
from ..stages.call import Call
from ..stages.latent import Latent
from ..stages.modules import InputTransform, SharedModule, name_of
from ..stages.router import Choose, Router
from ..stages.shared import SharedExpert
from ..types import MoESpec, RouterModule, RouterWeights
from .context import ExecutionContext, build_context
from .executor import Executor
from .layer_comparison import LayerParts, compare_with_ranks

__all__ = ["PlannedModule"]

_LOG = logging.getLogger("collegium")

# Attributes that belong to one process and are not pickled.
_PROCESS_STATE = ("dispatcher", "_context", "_executor", "_input_check")


class PlannedModule(PackedModule):
    """Base of ``MoELayer``: packed weights, options, and the executor that runs calls with them.

    A constructor sets the weights and options, then calls ``_build`` and ``identify``. Assigning an option later
    creates another executor.

    plan: with the token ranges of the packed experts. workspaces: lends the memory of passes on a GPU to all layers of
    the device; None: every pass allocates fresh memory. caller_modules: names of the functions and modules that the
    caller computes, by what they stand for: gate, shared_experts, routed_input_transform.
    """

    packed_names = ("experts", "shared", "router", "gate", "latent", "adapters")
    caller_modules: dict[str, str]
    plan: Plan
    spec: MoESpec
    experts: PackedWeights
    shared: SharedExpert | SharedModule | None
    router: RouterWeights | None
    gate: RouterModule | None
    latent: Latent | InputTransform | None
    adapters: PackedAdapters | None
    choose: Choose | None
    after_expert: Callable[[Tensor], Tensor] | None
    checked: bool
    dispatcher: Dispatcher
    workspaces: Workspaces | Any
    _device: torch.device
    _context: ExecutionContext
    _executor: Executor
    _input_check: InputCheck | None

    def _build(self, plan: Plan) -> None:
        """Build what runs ``self.experts`` according to ``plan``; all ranks that share the experts call it together."""
        plan = plan.with_caller_modules(self.caller_modules)
        compare_with_ranks(plan, self._compared_parts(), checked=self.checked)
        context = build_context(plan, self.experts, self._device, self.after_expert)
        self.__dict__.update(
            plan=self._with_options(context.plan),
            spec=context.plan.problem.spec,
            dispatcher=context.dispatcher,
            workspaces=context.workspaces(),
            _context=context,
            _input_check=context.input_check(checked=self.checked),
        )
        self._renew_executor()
        if plan.groups:
            _LOG.info("MoE layer with kernel %s: %s", plan.kernel, plan.problem.placement)

    def _with_options(self, plan: Plan) -> Plan:
        """Return ``plan`` with the options of the layer that it prints and does not decide."""
        functions = {"choose": self.choose, "after_expert": self.after_expert}
        names = tuple((name, name_of(function)) for name, function in functions.items() if function is not None)
        return replace(plan, caller_functions=names, checked=self.checked)

    def _compared_parts(self) -> LayerParts:
        """Return what ranks compare when they build the layer."""
        return LayerParts(
            experts=self.experts,
            router=self.router,
            shared=self.shared,
            latent=self.latent,
            options={
                "checked": self.checked,
                "modules of the caller": tuple(sorted(self.caller_modules)),
                "choose given": self.choose is not None,
                "after_expert given": self.after_expert is not None,
            },
        )

    def _renew_executor(self) -> None:
        """Create an executor for the layer's present options, without recorded launches."""
        executor = Executor(
            self._context,
            router=Router(
                spec=self.spec, weights=self.router, module=self.gate, choose=self.choose, checked=self.checked
            ),
            shared=self.shared,
            latent=self.latent,
            adapters=self.adapters,
            workspaces=self.workspaces,
            input_check=self._input_check,
        )
        if "_executor" in self.__dict__:
            executor.captured = self._executor.captured
        self.__dict__["_executor"] = executor

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute and forget recorded launches: with another option, other kernels may be launched."""
        built = "_executor" in self.__dict__
        if built and name in ("experts", "after_expert", "adapters"):
            raise InputError(
                f"{name}: a layer's passes are built from it and would go on with the old one; use swap(weights) for "
                "other experts, set_adapters(adapters) for other adapters, and build another layer for another function"
            )
        super().__setattr__(name, value)
        if built and name == "checked":
            self.__dict__["_input_check"] = self._context.input_check(checked=self.checked)
        if built:
            self.__dict__["plan"] = self._with_options(self.plan)
            self._renew_executor()

    @property
    def has_shared(self) -> bool:
        """Whether the layer has a shared expert, maybe the caller's, which another rank may add."""
        return self.spec.shared is not None or "shared_experts" in self.caller_modules

    def replan(self, plan: Plan, experts: PackedWeights) -> None:
        """Continue with ``experts``, packed for ``plan``, which may differ from the layer's plan in its placement.

        All ranks of the new placement call it together. CUDA graphs that captured the layer before are invalid. Raises
        InputError for a plan with another kernel, other formats or other sizes of an expert: ``swap`` packs experts.
        """
        old, new = (_packing(layer_plan, shared=self.has_shared) for layer_plan in (self.plan, plan))
        different = [f"{name} {new[name]}, not {value}" for name, value in old.items() if new[name] != value]
        if different:
            raise InputError(
                f"replan: the plan has {'; '.join(different)} as the packed experts. It may differ in its placement; "
                "call swap(weights, overrides) to pack experts for another kernel or format"
            )
        self._continue_with(plan, experts)

    def _continue_with(self, plan: Plan, experts: PackedWeights) -> None:
        """Continue with ``experts``, packed for ``plan``, and the same adapters."""
        if self.adapters is not None:
            plan = plan.with_adapters(self.adapters.sizes)
        previous = self.experts
        self.__dict__["experts"] = with_measured_tiles(experts, plan.problem)
        try:
            self._build(plan)
        except Exception:
            self.__dict__["experts"] = previous
            raise

    def compute(self, tensors: tuple[Any, ...], memory: Memory | None = None) -> None:
        """Run the call with ``tensors``, in the order of ``Call``, without checks; for the custom operator and warm-up.

        memory: where buffers are allocated; None: in a workspace.
        """
        self._executor.run(Call(*tensors), memory)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: weights, plan and options. Raises InputError for a layer over ranks."""
        if self.plan.groups:
            raise InputError(
                f"a layer over ranks cannot be pickled ({self.plan.problem.placement}): it needs the process groups of "
                "this process, and every rank has different experts. Load it in each process with device=Ranks.of(...)"
            )
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _PROCESS_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied layer, or build what runs an unpickled one."""
        super().__setstate__(state)
        if "_context" in self.__dict__:
            self._renew_executor()
            return
        workspaces = self.workspaces
        self._build(self.plan)
        self.workspaces = workspaces


def _packing(plan: Plan, *, shared: bool) -> dict[str, object]:
    """Return, by name, what packed experts depend on, except how many there are and how large batches are.

    shared: whether the layer has a shared expert.
    """
    problem = plan.routed_problem.routed
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    for name in ("experts", "tokens", "rows", "device"):
        values.pop(name)
    if shared:
        values["slice of the shared expert"] = plan.shared_slice if plan.adds_shared else None
    return {"kernel": plan.kernel, **values}
