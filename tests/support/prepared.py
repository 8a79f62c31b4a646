"""What the tests of prepared functions compare: outputs by their bits and by their noise, gradients, recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxquant as jq

from .equality import check_equal

_ACTIVATIONS = jq.Rule(operands="activations", activation=jq.Activation("int8"))

RECIPES = {
    "w8a8_dynamic": jq.recipes.w8a8_dynamic(),
    "w8a8_static": jq.recipes.w8a8_static(),
    "weight_only_int8": jq.recipes.weight_only_int8(),
    "weight_only_int4": jq.recipes.weight_only_int4(block=4),
    "gptq": jq.recipes.gptq(block=4),
    "weight_only_fp8": jq.recipes.weight_only_fp8(),
    "fp8_dynamic": jq.recipes.fp8_dynamic(),
    "mxfp8": jq.recipes.mxfp8(),
    "mxfp4": jq.recipes.mxfp4(),
    "nvfp4": jq.recipes.nvfp4(activations="float4_e2m1fn", calibrator=jq.calibration.minmax),
    "gguf": jq.recipes.gguf(),
    "w4a8": jq.recipes.w4a8(),
    "onednn": jq.recipes.onednn(),
    "onnx_runtime": jq.recipes.onnx_runtime(),
    "activations": (_ACTIVATIONS, *jq.recipes.w8a8_dynamic()),
}


def find_ranges(prepared: Any, params: Any, *inputs: Any) -> Any:
    """Return the static ranges of one batch; NaN for a branch that it does not take."""
    if not prepared.static_ranges:
        return {}

    # The parameters may hold leaves that are not arrays.
    @jax.jit
    def run(*inputs: Any) -> Any:
        return prepared.finalize(prepared.observe(prepared.init(), params, *inputs))

    return run(*inputs)


def convert_and_apply(prepared: Any, params: Any, ranges: Any, *inputs: Any) -> Any:
    """Return the result on codes, computed by one program."""

    @jax.jit
    def run(params: Any, ranges: Any, *inputs: Any) -> Any:
        # The barrier keeps XLA from simplifying how codes are stored together with how they are read. It could then
        # contract floats, where there are such contractions, in another layout, and add them in another order.
        return prepared.apply(lax.optimization_barrier(prepared.convert(params, ranges)), *inputs)

    return run(params, ranges, *inputs)


def differentiate(function: Callable[..., Any], params: Any, *inputs: Any) -> tuple[Any, Any]:
    """Return the result of a function, and the gradients of the sum of squares of its floats."""
    places = tuple(place for place, x in enumerate((params, *inputs)) if _is_float(x) or place == 0)

    def loss(*arguments: Any) -> tuple[jax.Array, Any]:
        result = function(*arguments)
        squares = [jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(result) if _is_float(x)]
        return sum(squares, jnp.zeros(())), result

    (_, result), gradients = jax.jit(jax.value_and_grad(loss, places, has_aux=True))(params, *inputs)
    return result, gradients


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def same_trees(actual: Any, expected: Any) -> None:
    """Check that two trees have the same structure, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for pair in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        check_equal(*pair)


def find_sqnr(actual: Any, expected: Any) -> float:
    """Return the least ratio, in dB, of the squares of an array of floats to the squares of its error."""
    return min((_compute_ratio(*pair) for pair in _pair_floats(actual, expected)), default=np.inf)


def _pair_floats(actual: Any, expected: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs if _is_float(b)]


def _compute_ratio(actual: np.ndarray, expected: np.ndarray) -> float:
    error = np.sum((actual - expected) ** 2)
    with np.errstate(divide="ignore"):
        return float("inf") if error == 0 else float(10 * np.log10(np.sum(expected**2) / error))


def check_gradients(actual: Any, expected: Any, cosine: float) -> None:
    """Check that gradients are finite, reach the same arrays as float gradients, and have about their direction."""
    for a, b in _pair_floats(actual, expected):
        assert np.isfinite(a).all()
        assert a.any() == b.any()
        if b.any():
            assert np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)) > cosine
