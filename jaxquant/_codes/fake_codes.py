"""Floats that are exactly what codes represent, with a gradient: what flows between integer layers in training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantized_array import QuantizedArray
from .._arrays.saved_programs import register_tree
from .._arrays.spec import QuantSpec
from .._contractions.output import Affine, ScaledSpec, make_array, read_affine
from .._core import dtypes
from .._core.granularity import PerTensor
from .._kernels.affine import quantize_affine
from .._kernels.barriers import replace_value
from .._training.fake_quantize import Quantizer


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values", "scale", "zero_point"), meta_fields=("codes_dtype",)
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class FakeQuantizedArray:
    """An array of floats that 8-bit codes represent exactly, with their scale and zero point.

    values = (codes - zero_point) * scale

    A layer with an output spec returns one in training, and a `QuantizedArray` with the same codes when it serves. The
    functions over quantized arrays, such as `jq.codes.add`, take both. Gradients pass through `values`.

    The constructor checks nothing, because JAX also builds pytrees of objects that are not arrays.

    Attributes:
        values: float32.
        scale: float32, a scalar.
        zero_point: the code of 0.0, a scalar in the dtype of the codes, or None for 0.
        codes_dtype: Static. The dtype of the codes, int8 or uint8.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jq.codes.FakeQuantizedArray(jnp.array([0.5, 1.5]), jnp.float32(0.5), None, jnp.dtype("uint8"))
        >>> output = jq.Quantizer(jq.QuantSpec(jnp.uint8), 1.0, 0)
        >>> add = lambda values: jq.codes.add(x.replace_values(values), x, output=output)
        >>> add(x.values).values, add(x.values).quantize().codes
        (Array([1., 3.], dtype=float32), Array([1, 3], dtype=uint8))
        >>> jax.grad(lambda values: add(values).values.sum())(x.values)
        Array([1., 1.], dtype=float32)
    """

    values: Any
    scale: Any
    zero_point: Any
    codes_dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The rank of the values."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def dequantize(self) -> jax.Array:
        """Return the values."""
        return self.values

    def quantize(self) -> QuantizedArray:
        """Return the codes, which have no gradient."""
        values, scale = jax.lax.stop_gradient((self.values, self.scale))
        affine = Affine(scale, self.zero_point, self.codes_dtype)
        # The quotient is an integer but for a relative error of 2**-23, so that rounding it finds the code again.
        codes = quantize_affine(values, scale, affine.make_center(), PerTensor(), self.codes_dtype, dtypes.FLOAT32)
        return make_array(codes, affine, dtypes.FLOAT32)

    def make_quantizer(self) -> Quantizer:
        """Return a Quantizer with which the values are quantized to their codes again."""
        # Asymmetric, so that it takes any zero point.
        spec = QuantSpec(self.codes_dtype, symmetric=False)
        zero_point = np.zeros((), self.codes_dtype) if self.zero_point is None else self.zero_point
        return Quantizer(spec, jax.lax.stop_gradient(self.scale), zero_point)

    def replace_values(self, values: jax.Array) -> FakeQuantizedArray:
        """Return other values with the same scale and zero point."""
        return dataclasses.replace(self, values=values)


register_tree(FakeQuantizedArray, lambda static: np.dtype(static[0]).name, lambda name: (np.dtype(name),))
Codes = QuantizedArray | FakeQuantizedArray
Output = ScaledSpec | Codes


def has_fake(*arrays: object) -> bool:
    """Return whether an array carries floats."""
    return any(isinstance(array, FakeQuantizedArray) for array in arrays)


def read_fake(q: Codes) -> FakeQuantizedArray:
    """Return an array that carries floats as it is, and a QuantizedArray with its values."""
    if isinstance(q, FakeQuantizedArray):
        return q
    affine = read_affine("QuantizedArray", "q", q)
    return FakeQuantizedArray(q.dequantize().astype(jnp.float32), affine.scale, affine.zero_point, affine.dtype)


def train_codes(
    compute: Callable[..., QuantizedArray], differentiate: Callable[..., jax.Array], arrays: Sequence[Any], output: Any
) -> FakeQuantizedArray:
    """Return the result of an operation on codes, with the gradient of the operation on floats.

    Args:
        compute: the operation, of QuantizedArrays and of the output.
        differentiate: the operation on floats.
        arrays: the operands; QuantizedArrays among them have no gradient.
        output: a Quantizer, a QuantizedArray or a FakeQuantizedArray.
    """
    fakes = [read_fake(array) for array in arrays]
    y = differentiate(*(fake.values for fake in fakes))
    quantizer = output if hasattr(output, "spec") else read_fake(output).make_quantizer()
    # The gradient goes through `differentiate` and the rounding of its result; the kernels of codes have none.
    fixed = jax.tree.map(lambda part: jax.lax.stop_gradient(part) if isinstance(part, jax.Array) else part, quantizer)
    exact = compute(*(fake.quantize() for fake in fakes), fixed)
    return finish_training(y, quantizer, exact)


def finish_training(y: jax.Array, quantizer: Quantizer, exact: QuantizedArray) -> FakeQuantizedArray:
    """Return the values of codes, with the gradient of floats that the quantizer rounds."""
    affine = read_affine("codes.FakeQuantizedArray", "output", exact)
    values = replace_value(quantizer(y), exact.dequantize())
    return FakeQuantizedArray(values, affine.scale, affine.zero_point, affine.dtype)
