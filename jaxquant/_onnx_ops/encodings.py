"""What ONNX Runtime's operators on codes share: their scales and zero points, and tables of all 256 codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, dtypes, entry_point, recording, sharding
from .._core.entry_point import convert_float32_scale
from .._core.granularity import PerTensor
from .._kernels.affine import dequantize_affine, quantize_affine

# The scales and zero points of one tensor, which these operators share: scalars, checked and converted.


# ONNX Runtime treats an array of shape (1,) as a scalar.
_SINGLE = ((), (1,))


class Encoding(NamedTuple):
    """The numbers that relate codes and values: value = (code - center) * scale.

    Attributes:
        scale: float32, a scalar.
        center: the zero point, an int32 scalar.
        dtype: the dtype of the codes, int8 or uint8.
    """

    scale: jax.Array
    center: jax.Array
    dtype: np.dtype


def convert_numbers(function: str, x: object, **parameters: object) -> tuple[Any, ...]:
    """Return scales and zero points, told apart by their names, with Python numbers as arrays; x has the codes' dtype.

    Call it before the compiled program: it raises for a number that its dtype cannot hold.
    """
    result = []
    for name, value in parameters.items():
        if name.endswith("scale"):
            result.append(convert_float32_scale(function, name, value))
        else:
            result.append(entry_point.convert_operand_zero_point(function, name, value, x))
    return tuple(result)


def read_encoding(
    function: str, prefix: str, scale: jax.Array, zero_point: jax.Array | None, dtype: np.dtype
) -> Encoding:
    """Check the arguments {prefix}_scale and {prefix}_zero_point; None as a zero point means 0."""
    return read_named(function, (f"{prefix}_scale", f"{prefix}_zero_point"), scale, zero_point, dtype)


def read_named(
    function: str, names: tuple[str, str], scale: Any, zero_point: jax.Array | None, dtype: np.dtype
) -> Encoding:
    """Check a scale and a zero point with names of their own; None as a zero point means 0."""
    name = names[0]
    checks.check_array(function, name, scale, (dtypes.FLOAT32,))
    checks.require(scale.shape in _SINGLE, function, name, "a scalar", f"shape {scale.shape}")
    if zero_point is None:
        return Encoding(scale.reshape(()), jnp.zeros((), jnp.int32), dtype)
    name = names[1]
    checks.check_same_dtype(function, name, zero_point, dtype, "the dtype of the codes")
    checks.require(zero_point.shape in _SINGLE, function, name, "a scalar", f"shape {zero_point.shape}")
    return Encoding(scale.reshape(()), zero_point.astype(jnp.int32).reshape(()), dtype)


def convert_two(function: str, *arguments: object) -> tuple[Any, ...]:
    """Return the arguments of an operator of two arrays, with Python numbers among scales and zero points as arrays.

    The arguments are a, its scale and its zero point, the same of b, and the scale and the zero point of the result.
    """
    a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point = arguments
    left = convert_numbers(function, a, a_scale=a_scale, a_zero_point=a_zero_point)
    right = convert_numbers(function, b, b_scale=b_scale, b_zero_point=b_zero_point)
    return a, *left, b, *right, *convert_numbers(function, a, c_scale=c_scale, c_zero_point=c_zero_point)


def read_two(function: str, *arguments: Any) -> tuple[Encoding, Encoding, Encoding]:
    """Check the arguments of `convert_two`, and return the encodings of a, of b and of the result."""
    a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point = arguments
    dtype = check_eight_bits(function, "a", a)
    checks.check_same_dtype(function, "b", b, dtype, "a's")
    left = read_encoding(function, "a", a_scale, a_zero_point, dtype)
    right = read_encoding(function, "b", b_scale, b_zero_point, dtype)
    return left, right, read_encoding(function, "c", c_scale, c_zero_point, dtype)


def infer_one(function: str, x: jax.Array, **arguments: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of a recorded result of one array of codes, after the checks of the arguments.

    While an exporter records an operation, its arithmetic, which checks the arguments otherwise, is not traced.
    """
    dtype = check_eight_bits(function, "x", x)
    for name in ("x", "y"):
        read_encoding(function, name, arguments[f"{name}_scale"], arguments[f"{name}_zero_point"], dtype)
    return x.shape, dtype


def infer_two(function: str, **arguments: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of a recorded result of two arrays of codes, after the checks of the arguments."""
    names = [name for x in ("a", "b", "c") for name in (x, f"{x}_scale", f"{x}_zero_point") if name != "c"]
    read_two(function, *(arguments[name] for name in names))
    a, _ = broadcast_operands(function, ("a", "b"), (arguments["a"], arguments["b"]))
    return a.shape, a.dtype


def check_eight_bits(function: str, argument: str, x: Any) -> np.dtype:
    """Return the dtype of codes; raise unless they are an array of int8 or uint8."""
    checks.check_array(function, argument, x, dtypes.EIGHT_BITS)
    return np.dtype(x.dtype)


def broadcast_operands(function: str, names: tuple[str, ...], operands: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Return arrays broadcast against each other by numpy's rules; raise if their shapes do not fit."""
    shapes = [x.shape for x in operands]
    try:
        shape = jnp.broadcast_shapes(*shapes)
    except ValueError:
        got = " and ".join(str(s) for s in shapes)
        checks.refuse(function, ", ".join(names), "shapes that broadcast against each other", got)
        raise
    # jnp would broadcast them too, but refuses different ranks if the user has forbidden that.
    return tuple(lax.broadcast_in_dim(x, shape, range(len(shape) - x.ndim, len(shape))) for x in operands)


# Operators that map each of the 256 codes to a code: the table of the results, and its lookup.


def requantize_codes(x: jax.Array, x_encoding: Encoding, y_encoding: Encoding) -> jax.Array:
    """Return codes with another scale and zero point; the codes themselves if both are the same."""
    table = encode_values(list_values(x_encoding), y_encoding)
    # ONNX Runtime copies such codes, whatever the scale. The scales may be traced, so the table is computed anyway.
    is_same = (x_encoding.scale == y_encoding.scale) & (x_encoding.center == y_encoding.center)
    return look_up(jnp.where(is_same, list_codes(y_encoding.dtype), table), x)


def list_codes(dtype: np.dtype) -> np.ndarray:
    """Return all codes of int8 or uint8 in the order of their bits read as uint8: 0 ... 127, -128 ... -1 for int8."""
    return np.arange(256, dtype=np.uint8).view(dtype)


def list_values(encoding: Encoding) -> jax.Array:
    """Return the float32 values of `list_codes`."""
    codes = jnp.asarray(list_codes(encoding.dtype))
    return dequantize_affine(codes, encoding.scale, encoding.center, PerTensor(), dtypes.FLOAT32)


def encode_values(values: jax.Array, encoding: Encoding) -> jax.Array:
    """Return the codes of float32 values, rounded before the zero point is added."""
    return quantize_affine(values, encoding.scale, encoding.center, PerTensor(), encoding.dtype, dtypes.FLOAT32)


def _batch_lookup(mapped: dict[str, bool], table: jax.Array, x: jax.Array) -> jax.Array | None:
    return None if mapped["table"] else look_up(table, x)


@recording.mark("look_up", lambda table, x: (x.shape, table.dtype), _batch_lookup)
def look_up(table: jax.Array, x: jax.Array) -> jax.Array:
    """Return the entry of a table of 256 for each code of x, int8 or uint8."""
    indices = lax.bitcast_convert_type(x, jnp.uint8)
    # With shardings in types, JAX asks for the sharding of the result: `x.sharding`.
    out_sharding = jax.typeof(x).sharding if sharding.is_placed(x) else None
    # A byte cannot be outside of 256 entries, so XLA need not clamp it.
    return table.at[indices].get(mode="promise_in_bounds", out_sharding=out_sharding)


def look_up_stored(table: jax.Array, x: jax.Array) -> jax.Array:
    """Return the same as `look_up`, from a table in memory.

    XLA:CPU fuses the operations that compute a table with its lookup, and repeats them for each element. That is faster
    if they are few, and slower if they are many. Reading a table of 32 bits takes vector instructions, one of bytes
    does not.
    """
    return look_up(lax.optimization_barrier(table.astype(jnp.int32)), x).astype(table.dtype)
