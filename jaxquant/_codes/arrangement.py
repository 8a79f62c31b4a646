"""Operations that move codes: `concatenate`, `reshape`, `transpose` and `pad` of quantized arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._arrays import concatenate as joined
from .._arrays import quantized_array
from .._contractions.output import make_array, read_affine, read_output
from .._core import checks, dtypes
from .._onnx_ops.selection import qlinear_concat
from .fake_codes import Codes, FakeQuantizedArray, Output, has_fake, train_codes


def concatenate(arrays: Sequence[Any], axis: int = 0, *, output: Output | None = None) -> Any:
    """Return quantized arrays joined along an axis, with their own scales or with one scale for all of them.

    Without `output`, the codes, scales and zero points do not change, and q.dequantize() is `jax.numpy.concatenate` of
    what the arrays dequantize to, bit for bit. Along `axis`, each array consists of blocks of elements that share an
    entry of the scale: the blocks of a blocked scale, one block as long as the array, or blocks of length 1. The result
    has the longest block size that divides the lengths of all these blocks evenly, and one entry for each of its own
    blocks.

    With `output`, the result has its scale and its zero point. The codes are what `qlinear_concat` returns; an
    array with the scale and zero point of `output` keeps its codes.

    Do not join the arrays with `jax.tree.map(lambda *parts: jnp.concatenate(parts), *arrays)`. The joined scale is
    read as blocks of equal length, which gives wrong numbers if the arrays differ in length or end in a short block.
    Stacking them part by part with `jnp.stack` is correct, because it adds a new axis.

    Args:
        arrays: one or more arrays with equal shapes except along `axis`. The dtypes of their codes, of their
            scales and of what `dequantize` returns must be equal, and so must their codebooks. If any of them has a
            zero point, a missing zero point counts as zeros. With `output`, the codes are int8 or uint8, and each array
            has one scale and one zero point.
        axis: Static. The dimension along which the arrays are joined; a negative one counts from the back.
        output: how the result is quantized: a `Quantizer` with a scale and the dtype of the codes; a
            QuantizedArray, for its scale and zero point; or None, which keeps the scales.

    Returns:
        A QuantizedArray.

    Raises:
        TypeError: `arrays` is not a list or tuple of QuantizedArrays, `axis` is not an int, or dtypes or codebooks
            differ.
        ValueError: there are no arrays, `axis` is out of range, the shapes of the arrays do not fit each other, or,
            with `output`, an array has several scales.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> query = jq.quantize(jnp.array([[-63.5, 0.25], [0.75, 2.0]]), jq.QuantSpec(jnp.int8))  # scale 0.5, two ties
        >>> key = jq.quantize(jnp.array([[254.0], [-3.0]]), jq.QuantSpec(jnp.int8))  # scale 2, a tie
        >>> q = jq.concatenate([query, key], axis=1)
        >>> q.scale, q.dequantize()
        (Array([[0.5, 2. ]], dtype=float32), Array([[-63.5,   0. , 254. ],
               [  1. ,   2. ,  -4. ]], dtype=float32))
        >>> jq.concatenate([query, key], axis=1, output=key).dequantize()
        Array([[-64.,   0., 254.],
               [  0.,   2.,  -4.]], dtype=float32)

    Source: `jax.numpy.concatenate`; with `output`, ONNX Runtime's com.microsoft QLinearConcat-1.
    """
    if isinstance(arrays, list | tuple) and has_fake(*arrays):
        # Floats that carry codes have one scale, and joined ones need one for all.
        expected = "an output, which training needs (a Quantizer or a QuantizedArray)"
        checks.require(output is not None, "concatenate", "output", expected, "None")
        return train_codes(
            lambda *parts: concatenate(parts[:-1], axis, output=parts[-1]),
            lambda *values: jnp.concatenate(values, axis), arrays, output,
        )  # fmt: skip
    if output is None:
        return joined.concatenate(arrays, axis)
    checked = joined.check_arrays(arrays, axis)
    result = read_output("concatenate", output)
    inputs: list[Any] = []
    for i, q in enumerate(checked):
        # The kernel has no offsets and no negative scales, which joined arrays with scales of their own may have.
        q = quantized_array.check_lazy("concatenate", f"arrays[{i}]", q)
        affine = read_affine("concatenate", f"arrays[{i}]", q)
        expected = f"codes of {affine.dtype}, as arrays[{i}] has"
        checks.require_type(affine.dtype == result.dtype, "concatenate", "output", expected, result.dtype)
        inputs += [q.codes, affine.scale, affine.zero_point]
    codes = qlinear_concat(result.scale, result.zero_point, *inputs, axis=axis)
    return make_array(codes, result, checked[0].dtype)


def reshape(q: Codes, shape: int | Sequence[int]) -> Any:
    """Return the same elements in another shape, in which elements that share an entry must still be neighbors.

    Args:
        q: the array.
        shape: Static. The new shape, in which one dimension may be -1.

    Returns:
        A QuantizedArray with the codes of q.

    Raises:
        TypeError: q is not a QuantizedArray, or a dimension is not an int.
        ValueError: the size differs, or no scale or zero point of the new rank can be shared by the same elements.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.codes.reshape(jq.quantize(jnp.ones((2, 3)), jq.QuantSpec(jnp.int8)), (3, -1)).shape
        (3, 2)

    Source: `jax.numpy.reshape`.
    """
    if isinstance(q, FakeQuantizedArray):
        return q.replace_values(jnp.reshape(q.values, shape))
    return quantized_array.check_lazy("codes.reshape", "q", q, supports=quantized_array.FORMS).reshape(shape)


def transpose(q: Codes, axes: Sequence[int] | None = None) -> Any:
    """Return the array with its dimensions in another order.

    Args:
        q: the array.
        axes: Static. The order of the dimensions; None reverses them.

    Returns:
        A QuantizedArray with the codes of q.

    Raises:
        TypeError: q is not a QuantizedArray, or an axis is not an int.
        ValueError: the axes are not a permutation of the dimensions.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.codes.transpose(jq.quantize(jnp.ones((2, 3, 4)), jq.QuantSpec(jnp.int8)), (0, 2, 1)).shape
        (2, 4, 3)

    Source: `jax.numpy.transpose`.
    """
    if isinstance(q, FakeQuantizedArray):
        return q.replace_values(jnp.transpose(q.values, axes))
    return quantized_array.check_lazy("codes.transpose", "q", q, supports=quantized_array.FORMS).transpose(axes)


def pad(q: Codes, pad_width: int | Sequence[int] | Sequence[Sequence[int]]) -> Any:
    """Return the array with zeros around it; the code of 0.0 is the zero point.

    Args:
        q: integer codes, with one scale and one zero point along each dimension that is padded.
        pad_width: Static. (before, after) for each dimension, one pair for all of them, or an int for all ends.

    Returns:
        A QuantizedArray with the scale and the zero point of q.

    Raises:
        TypeError: q is not a QuantizedArray of integers, or pad_width does not consist of ints.
        ValueError: pad_width is negative or does not fit the rank, or the scale varies along a dimension that is
            padded.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([-1.0, 0.5, 1.55]), jq.QuantSpec(jnp.uint8))
        >>> jq.codes.pad(q, (1, 2)).codes
        Array([100,   0, 150, 255, 100, 100], dtype=uint8)

    Source: `jax.numpy.pad`.
    """
    if isinstance(q, FakeQuantizedArray):
        return q.replace_values(jnp.pad(q.values, pad_width))
    q = quantized_array.check_lazy("codes.pad", "q", q, supports=("signed_scale",))
    is_integer = q.codebook is None and q.codes.dtype in dtypes.INTEGERS
    checks.require_type(is_integer, "codes.pad", "q", "codes of an integer dtype", q.codebook or q.codes.dtype)
    widths = _read_widths(checks.check_integers("codes.pad", "pad_width", pad_width), q.ndim)
    parts = [part for part in (q.scale, q.zero_point) if part is not None]
    for axis, pair in enumerate(widths):
        is_shared = all(part.shape[axis] == 1 for part in parts)
        expected = f"one scale and one zero point along dimension {axis}, which is padded, or q.dequantize()"
        got = " and ".join(f"shape {part.shape}" for part in parts)
        checks.require(is_shared or not any(pair), "codes.pad", "q", expected, got)
    if not any(any(pair) for pair in widths):
        return q
    config = [(low, high, 0) for low, high in widths]
    zero_point = q.zero_point
    if zero_point is None or zero_point.size == 1:
        fill = jnp.zeros((), q.codes.dtype) if zero_point is None else zero_point.reshape(())
        return q.replace(codes=lax.pad(q.codes, fill, config))
    # A zero point for each index of a dimension that is not padded: pad the distances from it.
    inside = lax.pad(jnp.ones(q.shape, bool), jnp.zeros((), bool), config)
    codes = lax.pad(q.codes, jnp.zeros((), q.codes.dtype), config)
    return q.replace(codes=jnp.where(inside, codes, jnp.broadcast_to(zero_point, codes.shape)))


def _read_widths(pad_width: object, rank: int) -> Any:
    """Return (before, after) for each dimension."""
    widths: Any = pad_width
    if isinstance(widths, int):
        widths = (widths, widths)
    # As in `jnp.pad`, two ints are one pair for all dimensions, also of a matrix.
    if isinstance(widths, tuple) and len(widths) == 2 and all(isinstance(n, int) for n in widths):
        widths = (widths,) * rank
    elif isinstance(widths, tuple) and len(widths) == 1:
        widths = widths * rank
    holds = isinstance(widths, tuple) and len(widths) == rank
    holds = holds and all(isinstance(w, tuple) and len(w) == 2 and min(w) >= 0 for w in widths)
    expected = f"an int, a pair, or {rank} pairs (before, after) of ints that are not negative"
    checks.require(holds, "codes.pad", "pad_width", expected, pad_width)
    return widths
