"""The recording of operations for an exporter.

While an exporter traces a function, each marked operation is one equation of the traced program, with its static
arguments as they are. Any other program contains the arithmetic of the operation and no trace of the mark.

The switch is a user context of JAX. It is part of the key of JAX's caches, so that functions that were traced before
are traced again inside of it, and nothing stays in the caches afterwards. Other threads do not see it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

_Function = TypeVar("_Function", bound=Callable[..., Any])
_recording = jax.make_user_context(None)
_analyzing = jax.make_user_context(None)
# Stands for an array among the arguments of a mark.
OPERAND = "<operand>"
# The name scope of a product of floats and codes, by which the analysis of a program knows it.
WEIGHT_ONLY = "jaxquant.weight_only"


def is_recording() -> bool:
    """Return whether an exporter is tracing."""
    return _recording.value is not None


@contextlib.contextmanager
def record() -> Iterator[None]:
    """Return a context in which marked operations are traced as marks."""
    with _recording(True):
        yield


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Return a context in which marked operations are traced as their arithmetic."""
    with _recording(None):
        yield


def is_analyzing() -> bool:
    """Return whether a program is traced to find its contractions, which must then be JAX's own primitives.

    Otherwise a contraction may have a form that runs faster and is no contraction for who reads the program.
    """
    return _analyzing.value is not None


@contextlib.contextmanager
def analyze() -> Iterator[None]:
    """Return a context in which float contractions are traced as JAX's own primitives."""
    with _analyzing(True):
        yield


@dataclasses.dataclass(frozen=True)
class Mark:
    """What an equation of the primitive records, its only parameter.

    Attributes:
        name: the operation.
        function: the arithmetic of the operation.
        arguments: pairs of the name of an argument and its static value, or `OPERAND` for an array.
        results: the shape and the dtype of each result; a shape may have symbolic dimensions.
        is_single: whether the function returns an array, and not a tuple of arrays.
        batch: the rule for `jax.vmap`, or None.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    results: tuple[tuple[tuple[Any, ...], np.dtype], ...]
    is_single: bool
    batch: Callable[..., Any] | None

    def bind_arguments(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Return all arguments by name, with the operands."""
        rest = iter(operands)
        return {name: next(rest) if value is OPERAND else value for name, value in self.arguments}

    def run_arithmetic(self, *operands: jax.Array) -> list[Any]:
        """Return the results of the arithmetic, in which marks of a lower level may occur."""
        results = self.function(**self.bind_arguments(operands))
        return [results] if self.is_single else list(results)

    def evaluate(self, *operands: ArrayLike) -> list[Any]:
        """Return the results of known operands, computed as any other program computes them."""
        arrays = [_read_known(x) for x in operands]
        with pause():
            compiled = _compile(self, tuple((x.shape, x.dtype) for x in arrays))
            return list(compiled(*arrays))


def _read_known(x: ArrayLike) -> Any:
    """Return an array as numpy holds it, on no device, if it can; `jnp.asarray` would trace it within a trace."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    array = np.asarray(x)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


# In `jax.ensure_compile_time_eval` a jitted function would be traced with its constants folded, among them the
# condition that keeps XLA from replacing a division by a product. So the program that runs is compiled already.
@functools.lru_cache(maxsize=1024)
def _compile(mark: Mark, operands: tuple[tuple[Any, Any], ...]) -> Any:
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    return jax.jit(mark.run_arithmetic).lower(*specs).compile()


@functools.cache
def _make_primitive() -> Any:
    """Return the primitive of all marks. Only recording needs it, and `jax.extend` takes a fifth of the import time."""
    from jax.extend.core import Primitive

    primitive = Primitive("jaxquant_mark")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, mark: mark.evaluate(*operands))
    primitive.def_abstract_eval(_infer)
    batching.primitive_batchers[primitive] = _batch
    lowering = mlir.lower_fun(lambda *operands, mark: mark.run_arithmetic(*operands), True)
    mlir.register_lowering(primitive, lowering)
    ad.primitive_jvps[primitive] = _differentiate
    return primitive


def _infer(*operands: object, mark: Mark) -> list[Any]:
    del operands
    return [ShapedArray(shape, dtype) for shape, dtype in mark.results]


def _batch(operands: Sequence[Any], dimensions: Sequence[Any], *, mark: Mark) -> tuple[Any, Any]:
    """Return the results of mapped operands: by the rule of the operation, or else by its arithmetic."""
    axes = list(dimensions)  # None for an operand that is not mapped
    if mark.batch is map_elements:
        return _batch_elements(operands, axes, mark)
    if mark.batch is not None:
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
        is_mapped = [axis is not None for axis in axes]
        names = [name for name, value in mark.arguments if value is OPERAND]
        results = mark.batch(dict(zip(names, is_mapped, strict=True)), **mark.bind_arguments(moved))
        if results is not None:
            results = [results] if mark.is_single else list(results)
            return results, [0] * len(results)
    results = jax.vmap(mark.run_arithmetic, in_axes=axes)(*operands)
    return results, [0] * len(results)


def map_elements(*_: object, **__: object) -> None:
    """Stand for the rule of element-wise operations: operands and result have the same shape."""


def _batch_elements(operands: Sequence[Any], axes: Sequence[int | None], mark: Mark) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = tuple(((size, *shape), dtype) for shape, dtype in mark.results)
    outputs = _make_primitive().bind(*moved, mark=dataclasses.replace(mark, results=results))
    return outputs, [0] * len(outputs)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, mark: Mark) -> tuple[Any, Any]:
    """Return the results and their derivatives, by differentiating the arithmetic."""
    zeros = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(mark.run_arithmetic, tuple(primals), tuple(zeros))


def mark(name: str, find_results: Callable[..., Any], batch: Callable[..., Any] | None = None) -> Any:
    """Return a decorator that records the calls of an operation.

    Arguments that are arrays are operands; all others, None among them, are static and must be hashable.

    Args:
        name: the operation, for the exporter.
        find_results: takes the arguments of a call by their names, and returns the shape and the dtype of the result,
            or a list of such pairs if the operation returns a tuple. Shapes may be symbolic, so JAX is not asked.
        batch: takes a dict that says which operand is mapped, along its first dimension, and the arguments by name;
            returns the mapped results, or None to map the arithmetic.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call_or_bind(*positional: Any, **named: Any) -> Any:
            if _recording.value is None:
                return function(*positional, **named)
            bound = signature.bind(*positional, **named)
            bound.apply_defaults()
            arguments = bound.arguments
            results = find_results(**arguments)
            is_single = not isinstance(results, list)
            is_array = {key: isinstance(value, jax.Array | np.ndarray | np.generic) for key, value in arguments.items()}
            statics = tuple((key, OPERAND if is_array[key] else value) for key, value in arguments.items())
            pairs = tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in ([results] if is_single else results))
            operands = [jnp.asarray(value) for key, value in arguments.items() if is_array[key]]
            outputs = _make_primitive().bind(*operands, mark=Mark(name, function, statics, pairs, is_single, batch))
            return outputs[0] if is_single else tuple(outputs)

        return call_or_bind  # type: ignore[return-value]

    return decorate
