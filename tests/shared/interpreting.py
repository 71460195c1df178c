"""Triton's interpreter without what it does again at every call: results are those of the interpreter as it is."""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["hasten"]


@cache
def hasten() -> None:
    """Let the interpreter of this process change ``triton.language`` once a launch, and look types up once.

    It also takes bounds of a loop from memory then, as the compiler does; NumPy 2.4 refuses the way it does so.

    It does so anew for every device function that a kernel calls, a quarter of the time of a test, though what it
    changed for the kernel is still changed. Called once Triton may be imported.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    interpreter._patch_lang = _Patching(interpreter._patch_lang, interpreter.tl)
    interpreter._patch_lang_tensor = _with_bounds(interpreter._patch_lang_tensor)
    interpreter._get_np_dtype = _once_for_each_type(interpreter._get_np_dtype, interpreter.tl)


class _Patching:
    """Changes the modules that a function calls ``triton.language``, those that the launch under way did not yet."""

    def __init__(self, patch: Any, language: Any) -> None:
        self.patch, self.known = patch, (language, language.core)
        self.launch = threading.local()  # of this thread, with the modules changed for it
        self.named: dict[int, tuple[Any, set[int]]] = {}  # by the globals of a file

    def __call__(self, fn: Any) -> Any:
        """Return what ends the changes; that of a device function is never asked to."""
        modules = self.modules(fn.__globals__)
        done: set[int] | None = getattr(self.launch, "done", None)
        if done is not None:
            if not modules <= done:
                self.patch(fn)
                done |= modules
            return None
        scope = self.patch(fn)
        self.launch.done, restore = set(modules), scope.restore

        def ended() -> None:
            self.launch.done = None
            restore()

        scope.restore = ended
        return scope

    def modules(self, names: dict[str, Any]) -> set[int]:
        """Return which of the two modules a file names, by identity."""
        if id(names) not in self.named:
            found = {id(value) for value in names.values() if any(value is one for one in self.known)}
            self.named[id(names)] = (names, found)
        return self.named[id(names)][1]


def _with_bounds(patch: Any) -> Any:
    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    return patched


def _once_for_each_type(find: Any, language: Any) -> Any:
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        name = (dtype.element_ty if isinstance(dtype, language.block_type) else dtype).name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return found
