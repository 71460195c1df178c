"""Triton's interpreter without its repeated work: results are those of the unchanged interpreter."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache, cached_property
from importlib import import_module
from math import prod
from typing import Any

__all__ = ["hasten"]


@cache
def hasten() -> None:
    """Let the interpreter of this process change ``triton.language`` once a launch, and look types up once.

    Unchanged, it patches ``triton.language`` again for each call of a device function, makes the types of each tensor
    anew, and checks integers for overflow without reading the result: three quarters of the time of a test.

    It also takes bounds of a loop from memory then, as the compiler does; NumPy 2.4 refuses the interpreter's way.
    Called once Triton may be imported.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    interpreter._patch_lang = _Patching(interpreter._patch_lang, interpreter.tl)
    interpreter._patch_lang_tensor = _with_bounds(interpreter._patch_lang_tensor)
    interpreter._get_np_dtype = _once_for_each_type(interpreter._get_np_dtype, interpreter.tl)
    interpreter._convert_float = _looked_up(interpreter._convert_float, import_module("numpy"))
    # Its check for overflow is computed for each integer operation, and its result is only read in debug mode.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _make_types_once(interpreter.tl.core)


def _make_types_once(core: Any) -> None:
    """Look up shapes and names of types in ``triton.language``, which makes them anew for each tensor."""
    known = _Shapes(core)

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        self.shape, self.numel, self.name = known.block(sizes, str(element_ty))

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = known.tensor(tuple(type.shape.values) if type.is_block() else ())

    def new_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    core.block_type.__init__ = new_block_type
    core.tensor.__init__ = new_tensor
    core.tuple.__init__ = new_tuple
    # The type of a tuple is rarely read.
    core.tuple.type = cached_property(lambda self: core._type_for_tuple_values(self.values))
    core.tuple.type.__set_name__(core.tuple, "type")


class _Shapes:
    """Shapes as types and tensors have them, by the sizes they consist of; nobody changes a shape."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.block = cache(self.new_block)
        self.tensor = cache(self.new_tensor)

    def new_block(self, sizes: tuple[int, ...], element: str) -> tuple[Any, int, str]:
        """Return shape, number of elements and name of the type of blocks of ``element``."""
        shape = self.core.tuple(self.core._unwrap_shape(sizes))
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return shape, self.core.validate_block_shape(shape), f"<{shape}, {element}>"

    def new_tensor(self, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        """Return shape and number of elements of a tensor, which are constants of the program."""
        constants = [self.core.constexpr(size) for size in sizes]
        return self.core.tuple(constants), self.core.constexpr(prod(sizes))


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


def _looked_up(convert: Any, numpy: Any) -> Any:
    """Return ``convert`` that looks up what it makes of numbers of 8 and 16 bits, and does so for all of them once."""

    @cache
    def table(source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        return convert(numpy.arange(1 << bits, dtype=f"uint{bits}"), source, target, rounding)

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.primitive_bitwidth > 16:
            return convert(data, source, target, rounding)
        codes = data.view(f"uint{source.primitive_bitwidth}")
        return numpy.asarray(table(source, target, rounding)[codes])

    return converted
