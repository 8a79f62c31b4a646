"""How the result of an operation on codes is quantized, and the end of a contraction: its bias and its codes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point, recording, sharding
from .._core.granularity import PerTensor
from .._kernels import accumulator, affine


class ScaledSpec(Protocol):
    """A spec with a scale and a zero point, such as a `Quantizer`."""

    @property
    def spec(self) -> QuantSpec:
        """How to quantize."""
        ...

    @property
    def scale(self) -> Any:
        """The value per step."""
        ...

    @property
    def zero_point(self) -> Any:
        """The code of 0.0, or None for the one that the spec fixes."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("scale", "zero_point"), meta_fields=("dtype",)
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Affine:
    """The relation of the codes of one array to its values: value = (code - zero_point) * scale.

    Attributes:
        scale: float32, a scalar.
        zero_point: a scalar in the dtype of the codes, or None for 0.
        dtype: Static. The dtype of the codes, int8 or uint8.
    """

    scale: Any
    zero_point: Any
    dtype: np.dtype

    def make_center(self) -> jax.Array:
        """Return the zero point as an int32 scalar."""
        return jnp.zeros((), jnp.int32) if self.zero_point is None else self.zero_point.astype(jnp.int32)


def read_output(function: str, output: Any) -> Affine:
    """Return the scale and the zero point of a result; raise unless runtimes have kernels for such codes.

    Args:
        function: the name of the public function, for errors.
        output: a `ScaledSpec`, or a QuantizedArray with the scale and the zero point of the result.
    """
    if isinstance(output, QuantizedArray):
        q = quantized_array.check_array(function, "output", output, supports=("packing",))
        # Unpacked, narrow integers could not be told from codes of 8 bits, whose bounds the result would have.
        expected = "codes of int8 or uint8, the dtypes that integer kernels return"
        checks.require_type(q.packing is None, function, "output", expected, q.format)
        return read_affine(function, "output", q)
    spec = getattr(output, "spec", None)
    expected = "a Quantizer with a scale, or a QuantizedArray whose scale the result gets"
    is_scaled = isinstance(spec, QuantSpec) and hasattr(output, "zero_point")
    checks.require_type(is_scaled, function, "output", expected, checks.describe_value(output))
    assert isinstance(spec, QuantSpec)
    check_output_spec(function, "output.spec", spec)
    checks.require(output.scale is not None, function, "output.scale", "a scale, because it is not found here", "None")
    scale = entry_point.convert_float32_scale(function, "output.scale", _unwrap_scalar(output.scale))
    checks.check_array(function, "output.scale", scale, (dtypes.FLOAT32,))
    entry_point.check_positive_scale(function, "output.scale", scale)
    zero_point = _read_zero_point(function, spec, output.zero_point)
    return Affine(_read_scalar(function, "output.scale", scale), zero_point, spec.carrier)


def check_output_spec(function: str, argument: str, spec: QuantSpec) -> None:
    """Raise unless runtimes have kernels with results that a spec quantizes: 8 bits, per tensor, all codes."""
    # Not the carrier: narrow integers are held in 8 bits, but the kernels saturate at the bounds of these.
    is_known = spec.dtype in dtypes.EIGHT_BITS
    expected = "a spec of int8 or uint8, the dtypes that integer kernels return"
    checks.require_type(is_known, function, argument, expected, spec.dtype)
    is_single = spec.granularity == spec.zero_point_granularity == PerTensor()
    expected = "PerTensor(), because integer kernels return codes with one scale and one zero point"
    checks.require(is_single, function, argument, expected, spec.granularity)
    expected = "narrow_range=False, because integer kernels saturate at the lowest code of the dtype"
    checks.require(not spec.narrow_range, function, argument, expected, "narrow_range=True")
    expected = "reduce_range=False, because integer kernels return codes of 8 bits"
    checks.require(not spec.reduce_range, function, argument, expected, "reduce_range=True")
    expected = "offset=False, because integer kernels return codes with a zero point"
    checks.require(not spec.offset, function, argument, expected, "offset=True")
    expected = "no scale_spec, because integer kernels return codes with a scale that is one float"
    checks.require(spec.scale_spec is None, function, argument, expected, f"scale_spec={spec.scale_spec!r}")
    expected = "scale_dtype=float32, the dtype in which integer kernels multiply"
    checks.require(spec.scale_dtype == dtypes.FLOAT32, function, argument, expected, spec.scale_dtype)


def _read_zero_point(function: str, spec: QuantSpec, value: Any) -> Any:
    """Return a zero point as a scalar in the dtype of the codes, or None for 0."""
    name, value = "output.zero_point", _unwrap_scalar(value)
    if value is None:
        fixed = spec.fixed_zero_point
        checks.require(fixed is not None, function, name, "a zero point, because the spec is not symmetric", "None")
        return np.asarray(fixed, spec.carrier) if fixed else None
    if type(value) is int:
        return entry_point.fit_number(function, name, value, spec.carrier)
    checks.check_array(function, name, value, (spec.carrier, dtypes.FLOAT32))
    if value.dtype == dtypes.FLOAT32:  # a learned zero point
        entry_point.check_rounded_zero_point(function, name, value, dtypes.read_bounds(spec.carrier))
        value = affine.encode_steps(jnp.asarray(value), None, spec.carrier)
    return _read_scalar(function, name, value)


def _unwrap_scalar(value: object) -> Any:
    """Return the array inside an object that wraps one, and a scalar of numpy as an array."""
    value = entry_point.unwrap_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _read_scalar(function: str, argument: str, value: Any) -> Any:
    """Return an array of one element as a scalar."""
    checks.require(value.size == 1, function, argument, "one element", f"shape {value.shape}")
    return value if value.ndim == 0 else value.reshape(())


def read_affine(function: str, argument: str, q: QuantizedArray) -> Affine:
    """Return the scale and the zero point of 8-bit codes that have one of each; q has been checked."""
    is_known = q.codebook is None and q.codes.dtype in dtypes.EIGHT_BITS
    expected = f"codes of int8 or uint8, which integer kernels take, or {argument}.dequantize()"
    checks.require_type(is_known, function, argument, expected, q.codebook or q.codes.dtype)
    checks.check_array(function, f"{argument}.scale", q.scale, (dtypes.FLOAT32,))
    scalars: list[Any] = []
    for name, part in (("scale", q.scale), ("zero_point", q.zero_point)):
        expected = f"one {name}, which integer kernels take, or {argument}.dequantize()"
        is_single = part is None or part.size == 1
        checks.require(is_single, function, f"{argument}.{name}", expected, f"shape {getattr(part, 'shape', None)}")
        scalars.append(None if part is None else _read_scalar(function, f"{argument}.{name}", part))
    return Affine(scalars[0], scalars[1], np.dtype(q.codes.dtype))


def make_array(codes: jax.Array, affine: Affine, dtype: np.dtype) -> QuantizedArray:
    """Return codes with a scale and a zero point of their rank; `dtype` is the dtype that `dequantize` returns."""
    ones = (1,) * codes.ndim
    scale, zero_point = (
        None if part is None else jnp.asarray(part).reshape(ones) for part in (affine.scale, affine.zero_point)
    )
    return QuantizedArray(codes, scale, zero_point, dtype=dtype)


class Epilogue(NamedTuple):
    """What follows the sums of an integer contraction.

    Attributes:
        bias: int32, in steps of the product of the scales, or None.
        output: the scale and the zero point of the result, or None for floats.
    """

    bias: Any
    output: Affine | None

    def finish(
        self, acc: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, spread: Callable[[jax.Array], jax.Array],
        axis: int | None = None,
    ) -> jax.Array:  # fmt: skip
        """Return the codes or the float32 values of an int32 accumulator.

        Args:
            acc: the sums.
            lhs_scale: float32.
            rhs_scale: float32, of a shape that broadcasts against lhs_scale's.
            spread: broadcasts scales, and arrays of the bias's shape, to acc.
            axis: the axis of the features in the sums of a convolution, or None for the last.
        """
        if recording.is_recording() and self.output is not None:
            parts = (self.bias, lhs_scale, rhs_scale)
            placed = (None if p is None else accumulator.place_part(p, acc.ndim, axis) for p in parts)
            scale, center = jnp.asarray(self.output.scale).reshape(()), self.output.make_center().reshape(())
            return accumulator.requantize_product(acc, *placed, scale, center, self.output.dtype)
        if self.bias is not None:
            acc = acc + spread(self.bias)
        ones = (1,) * lhs_scale.ndim
        scales = [lhs_scale, rhs_scale]
        if self.output is not None:
            scales.append(jnp.asarray(self.output.scale).reshape(ones))
        # Scales of rows and of columns may be sharded differently, and JAX would refuse to multiply them.
        if sharding.is_placed(acc):
            scales = [spread(scale) for scale in scales]
        if self.output is None:
            return accumulator.scale_product(acc, spread(accumulator.multiply_scales(*scales)))
        factor = spread(accumulator.compute_multiplier(*scales))
        center = spread(self.output.make_center().reshape(ones))
        return accumulator.requantize_accumulator(acc, factor, center, self.output.dtype)

    def wrap(self, y: jax.Array, dtype: Any) -> Any:
        """Return the codes of `finish` as a QuantizedArray, or its floats as they are."""
        return y if self.output is None else make_array(y, self.output, dtype)


def read_epilogue(
    function: str, bias: ArrayLike | None, output: object, preferred: DTypeLike | None, operands: tuple[Any, Any]
) -> Epilogue | None:
    """Return the epilogue of a contraction, or None if there is neither a bias nor an output.

    Args:
        function: the name of the public function, for errors.
        bias: an int32 array or None.
        output: as in `read_output`, or None.
        preferred: the dtype that the caller asked for, or None.
        operands: both operands.
    """
    if bias is None and output is None:
        return None
    argument = "output" if bias is None else "bias"
    is_integer = all(isinstance(x, QuantizedArray) for x in operands)
    checks.require_type(is_integer, function, argument, "None, because an operand is a float array", "an argument")
    if bias is not None:
        bias = entry_point.unwrap_array(bias)
        bias = entry_point.narrow_to_int32(function, "bias", bias)
        (bias,) = entry_point.convert_arrays(function, {"bias": bias})
        checks.check_same_dtype(function, "bias", bias, dtypes.INT32, "steps of the product of the scales")
    if output is None:
        expected = "float32 or None, because a bias of integers gives float32"
        checks.require_type(
            preferred in (None, dtypes.FLOAT32), function, "preferred_element_type", expected, preferred
        )
        return Epilogue(bias, None)
    return Epilogue(bias, read_output(function, output))
