"""Operators that map each of the 256 codes to a code: the table of the results, and its lookup."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core import dtypes, recording, sharding
from ..._core.granularity import PerTensor
from ..._kernels.affine import dequantize_affine, quantize_affine
from ._arguments import Encoding


def requantize_codes(x: jax.Array, x_encoding: Encoding, y_encoding: Encoding) -> jax.Array:
    """Return codes with another scale and zero point; the codes themselves if both are the same."""
    table = encode_values(list_values(x_encoding), y_encoding)
    # ONNX Runtime copies such codes, whatever the scale. The scales may be traced, so the table is computed anyway.
    is_same = (x_encoding.scale == y_encoding.scale) & (x_encoding.steps == y_encoding.steps)
    return look_up(jnp.where(is_same, list_codes(y_encoding.dtype), table), x)


def list_codes(dtype: np.dtype) -> np.ndarray:
    """Return all codes of int8 or uint8 in the order of their bits read as uint8: 0 ... 127, -128 ... -1 for int8."""
    return np.arange(256, dtype=np.uint8).view(dtype)


def list_values(encoding: Encoding) -> jax.Array:
    """Return the float32 values of `list_codes`."""
    codes = jnp.asarray(list_codes(encoding.dtype))
    return dequantize_affine(codes, encoding.scale, encoding.steps, PerTensor(), dtypes.FLOAT32)


def encode_values(values: jax.Array, encoding: Encoding) -> jax.Array:
    """Return the codes of float32 values, rounded before the zero point is added."""
    return quantize_affine(values, encoding.scale, encoding.steps, PerTensor(), encoding.dtype, dtypes.FLOAT32)


def _batch_lookup(mapped: dict[str, bool], table: jax.Array, x: jax.Array) -> jax.Array | None:
    return None if mapped["table"] else look_up(table, x)


@recording.mark("look_up", lambda table, x: (x.shape, table.dtype), _batch_lookup)
def look_up(table: jax.Array, x: jax.Array) -> jax.Array:
    """Return the entry of a table of 256 for each code of x, int8 or uint8."""
    places = lax.bitcast_convert_type(x, jnp.uint8)
    # With shardings in types, JAX asks for that of the result: it is that of x.
    out_sharding = jax.typeof(x).sharding if sharding.is_placed(x) else None
    # A byte cannot be outside of 256 entries, so XLA need not clamp it.
    return table.at[places].get(mode="promise_in_bounds", out_sharding=out_sharding)


def look_up_stored(table: jax.Array, x: jax.Array) -> jax.Array:
    """Return the same as `look_up`, from a table in memory.

    XLA:CPU fuses the operations that compute a table with its lookup, and repeats them for each element. That is faster
    if they are few, and slower if they are many. Reading a table of 32 bits takes vector instructions, one of bytes
    does not.
    """
    return look_up(lax.optimization_barrier(table.astype(jnp.int32)), x).astype(table.dtype)
