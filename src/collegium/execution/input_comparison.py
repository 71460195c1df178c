"""Comparing the inputs of a call between ranks before anything is sent (``parallel/input_check.py``)."""

from math import prod

from torch import Tensor

from ..errors import InputError
from ..parallel.input_check import InputCheck
from ..parallel.rendezvous import group_lock, is_known_to_all
from ..runtime.memory import is_capturing
from ..stages.call import Call, PassedInputs
from ..stages.router import Router
from .context import ExecutionContext

__all__ = ["InputComparison"]


class InputComparison:
    """Compares the inputs of one layer's calls, for ranks that all need the same inputs."""

    def __init__(self, check: InputCheck, context: ExecutionContext) -> None:
        self._check = check
        self._device = context.device
        self._groups = context.plan.groups
        self._handshake = context.handshake
        self._chunk_tokens = context.chunk_tokens
        self._top_k = context.plan.problem.spec.routing.top_k

    def is_due(self, call: Call) -> bool:
        """Return whether the ranks compare this call."""
        return self._check.due(call.x.shape[0], call.passed)

    def agreed(self, call: Call, router: Router) -> Call:
        """Return ``call`` with the experts that ``router`` chooses, once all ranks have the same inputs and experts.

        Raises the errors of the router, after the other ranks were informed, and RankError on every rank that differs.
        """
        tokens = call.x.shape[0]
        try:
            if call.needs_router:
                router.check_usable(call.router_input)
            routing = router(call)
        except Exception as error:  # ``choose`` may raise anything, and the other ranks wait
            self._exchange(tokens, call.passed, error=error)
            raise
        tensors: dict[str, Tensor | None] = {
            "x": call.x,
            "router_logits": call.router_logits,
            "topk_ids": call.topk_ids,
            "topk_weights": call.topk_weights,
            "token_ids": call.token_ids,
            "router_input": call.router_input,
        }
        if call.topk_ids is None:
            tensors["the chosen experts"] = routing.topk_ids
            tensors["the weights of the chosen experts"] = routing.topk_weights
        self._exchange(tokens, call.passed, tensors, top_k=routing.topk_ids.shape[1])
        return Call(
            call.x,
            topk_ids=routing.topk_ids,
            topk_weights=routing.topk_weights,
            out=call.out,
            shared_out=call.shared_out,
        )

    def report_refusal(self, x: object, passed: PassedInputs, error: Exception) -> None:
        """Inform ranks that wait for this call that its inputs were refused with ``error``, where it is compared."""
        tokens = prod(x.shape[:-1]) if isinstance(x, Tensor) else 0
        # As in ``checked_call``: a router input is not read next to logits or a routing.
        router_input = passed.router_input and not passed.router_logits and not passed.routing
        passed = passed._replace(router_input=router_input)
        try:
            if not is_capturing(self._device):
                with group_lock(self._groups):
                    if self._check.due(tokens, passed):
                        self._exchange(tokens, passed, error=error)
        finally:
            self.note_error(error)

    def note_error(self, error: Exception) -> None:
        """Compare the next call after an ``error`` that the other ranks do not know of."""
        if not is_known_to_all(error):
            self._check.forget()

    def _exchange(
        self,
        tokens: int,
        passed: PassedInputs,
        tensors: dict[str, Tensor | None] | None = None,
        *,
        top_k: int | None = None,
        error: Exception | None = None,
    ) -> None:
        """Exchange fingerprints of ``tensors`` with the other ranks.

        error: why this rank cannot run the call; it is raised once the others know it.
        """
        # The handshake comes first: it detects at once that a rank calls another layer.
        pass_tokens = tokens if self._chunk_tokens is None else min(tokens, self._chunk_tokens)
        try:
            self._handshake.sync_call(pass_tokens, top_k or self._top_k)
        except InputError as disagreement:
            raise (error or disagreement) from None
        self._check.compare(tokens, passed, tensors, error)
