"""Flax NNX's layers with quantized weights and activations: same names, same arguments, same parameters.

Imported by hand: `from jaxquant.flax import nnx as qnnx`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._training.backward import Backward, FloatBackward
from .. import _layer_operand
from ..ranges import Dynamic, Observed, Source
from .calibrate import calibrate as calibrate
from .calibrate import calibration_view as calibration_view
from .calibrate import check_calibrated as check_calibrated
from .contraction import Codes as Codes
from .contraction import Contraction, ConvGeneralDilated, DotGeneral, How, Product, Table
from .contraction import Ranges as Ranges
from .contraction import Scale as Scale
from .contraction import promote_dtype as promote_dtype
from .convert import convert as convert
from .convert import find_feature_axes
from .convert import fold_batch_norm as fold_batch_norm
from .convert import start as start

_NAME = "flax.nnx"
_OWN = ("dot_general", "dot_general_cls", "conv_general_dilated", "einsum_op", "promote_dtype")


def dot_general(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
    use_running_average: bool = False,
    kernel_shape: Sequence[int] | None = None,
) -> DotGeneral:
    """layer(x) = quantized_dot_general(x, kernel, ...) + bias, where layer = nnx.Linear(..., dot_general=this).

    For every layer of flax that takes a `dot_general`. The layer needs `promote_dtype=qnnx.promote_dtype`, too: flax's
    own rounds a kernel to bfloat16 before it is quantized, and takes no converted one.

    Args:
        weight_spec: how the kernel, the right operand, is quantized.
        activation_spec: how the left operand is, or None.
        rngs: for Int8Backward(stochastic_rounding=True), which draws from its stream "rounding" in training mode.
        weight_range: Static. `Dynamic()` or `Learned()`.
        activation_range: Static. `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. `jq.FloatBackward()` or `jq.Int8Backward()`.
        use_running_average: Static. Whether ranges are only read; `model.train()` and `model.eval()` set it.
        kernel_shape: Static. That of the kernel, where its scales are learned and there are several.

    Returns:
        A module with variables, for one layer. Layers that share it share their ranges.

    Raises:
        TypeError: an argument has a wrong type, or a spec is none that a layer can serve.
        ValueError: specs contradict their ranges.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> dot_general = qnnx.dot_general(jq.QuantSpec(jnp.int8, jq.PerFeature()))
        >>> layer = nnx.Linear(3, 2, dot_general=dot_general, promote_dtype=qnnx.promote_dtype, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((1, 3))
        >>> bool((qnnx.convert(layer)(x) == layer(x)).all())
        True

    Source: flax.nnx.Linear, `dot_general`.
    """
    how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
    return DotGeneral("flax.nnx.dot_general", how, rngs, None, kernel_shape)


def conv_general_dilated(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
    use_running_average: bool = False,
    kernel_shape: Sequence[int] | None = None,
) -> ConvGeneralDilated:
    """layer(x) = quantized_conv_general_dilated(x, kernel, ...) + bias, of nnx.Conv(conv_general_dilated=this).

    As `dot_general`, for flax's convolutions.

    Args:
        weight_spec: how the kernel is quantized.
        activation_spec: how the images are, or None.
        rngs: for Int8Backward(stochastic_rounding=True).
        weight_range: Static. `Dynamic()` or `Learned()`.
        activation_range: Static. `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. `jq.FloatBackward()` or `jq.Int8Backward()`.
        use_running_average: Static. Whether ranges are only read.
        kernel_shape: Static. That of the kernel, where its scales are learned and there are several.

    Returns:
        A module with variables, for one layer.

    Raises:
        TypeError: an argument has a wrong type, or a spec is none that a layer can serve.
        ValueError: specs contradict their ranges.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> conv = qnnx.conv_general_dilated(jq.QuantSpec(jnp.int8, jq.PerFeature()), jq.QuantSpec(jnp.uint8))
        >>> given = {"conv_general_dilated": conv, "promote_dtype": qnnx.promote_dtype}
        >>> layer = nnx.Conv(1, 2, (3,), **given, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 4, 1))).shape, int(conv.activation_batches[...])
        ((1, 4, 2), 1)

    Source: flax.nnx.Conv, `conv_general_dilated`.
    """
    how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
    return ConvGeneralDilated("flax.nnx.conv_general_dilated", how, rngs, None, kernel_shape)


def _check_arguments(layer: Any, given: Mapping[str, Any]) -> None:
    with _layer_operand.prefix_errors(type(layer).__name__):
        for name in _OWN:
            checks.require(name not in given, _NAME, name, "none: this layer brings its own", "one")
        expected = "None: converted weights take no mask"
        checks.require(given.get("mask") is None, _NAME, "mask", expected, "an array")


def _make_contraction(layer: Any, module: type[Contraction], kernel: nnx.Variable, how: How, rngs: Any) -> Any:
    """Returns what a layer contracts with. It knows no path: errors call it by its class and its kernel's shape."""
    shape = tuple(kernel[...].shape)
    features = find_feature_axes(layer, len(shape))
    return module(f"{type(layer).__name__}{shape}", how, rngs, kernel, shape, features)


class Linear(nnx.Linear):
    """y = dot_general(quantize(x), quantize(kernel)) + bias, `flax.nnx.Linear` with quantized operands.

    A float kernel is quantized on the way in and trained; one that `convert` made is served, in integers. The numbers
    are the same, and they are those of the Linen layers. All arguments of flax's layer are there, and its `nnx.Param`
    have its names and shapes; what is learned beside them is in `Scale`, what is observed in `Ranges`.

    `calibrate(model, batches)` finds static ranges and changes nothing else. They also move with every call while
    `use_running_average` is False, as BatchNorm's do: `model.train()` and `model.eval()` set it. Learned scales are NaN
    until `start(model, batch)` has been called.

    A layer whose static range was never found raises. Under `nnx.jit`, where JAX can raise nothing for a value, it
    returns NaN: call `check_calibrated(model)` once before. The same holds for all layers here.

    Args:
        in_features: as of flax's layer.
        out_features: likewise.
        weight_spec: how the kernel is quantized: `QuantSpec(jnp.int8, PerFeature())` has a scale for each output
            feature, whatever the layer's kernel looks like.
        activation_spec: how the inputs are, or None for weights only.
        weight_range: `Dynamic()`, from the kernel as it is; or `Learned()`.
        activation_range: `Observed()`, static; `Dynamic()`, for example `PerToken()`; or `Learned()`. The first and
            the last are `PerTensor()`.
        backward: `jq.FloatBackward()`, or `jq.Int8Backward()`, which draws from the rngs' "rounding" where it is told.
        use_running_average: whether ranges are only read.
        rngs: as of flax's layer.
        **given: as of flax's layer.

    Raises:
        TypeError: an argument has a wrong type, or a spec is none that a layer can serve.
        ValueError: specs contradict their ranges; when it is called, a range is missing, or an activation cannot be
            contracted in integers.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(0))
        >>> x = jnp.array([[-1.0, 0.0, 1.55]])
        >>> qnnx.calibrate(layer, [x])
        >>> serving = qnnx.convert(layer)
        >>> serving.kernel.get_value()
        QuantizedArray(int8[3,2], scale=float32[1,2], zero_point=None, dtype=float32, nbytes=14)
        >>> layer.eval()
        >>> bool((serving(x) == layer(x)).all())
        True
    """

    def __init__(
        self, in_features: int, out_features: int, *, weight_spec: QuantSpec, activation_spec: QuantSpec | None = None,
        weight_range: Source = Dynamic(), activation_range: Source = Observed(), backward: Backward = FloatBackward(),
        use_running_average: bool = False, rngs: nnx.Rngs, **given: Any,
    ) -> None:  # fmt: skip
        _check_arguments(self, given)
        super().__init__(in_features, out_features, promote_dtype=promote_dtype, rngs=rngs, **given)
        how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
        self.dot_general = nnx.data(_make_contraction(self, DotGeneral, self.kernel, how, rngs))


class LinearGeneral(nnx.LinearGeneral):
    """y = dot_general(quantize(x), quantize(kernel)) + bias over several axes: `flax.nnx.LinearGeneral`, as `Linear`.

    The kernel has the batch dimensions, the contracted ones and the features, in this order: `PerFeature()` has a
    scale for each index of all but the contracted ones.
    """

    def __init__(
        self, in_features: int | Sequence[int], out_features: int | Sequence[int], *, weight_spec: QuantSpec,
        activation_spec: QuantSpec | None = None, weight_range: Source = Dynamic(),
        activation_range: Source = Observed(),
        backward: Backward = FloatBackward(), use_running_average: bool = False, rngs: nnx.Rngs, **given: Any,
    ) -> None:  # fmt: skip
        _check_arguments(self, given)
        super().__init__(in_features, out_features, promote_dtype=promote_dtype, rngs=rngs, **given)
        how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
        self.dot_general = nnx.data(_make_contraction(self, DotGeneral, self.kernel, how, rngs))


class Einsum(nnx.Einsum):
    """y = einsum(einsum_str, quantize(x), quantize(kernel)) + bias: `flax.nnx.Einsum`, as `Linear`."""

    def __init__(
        self, einsum_str: str, kernel_shape: Sequence[int], bias_shape: Sequence[int] | None = None, *,
        weight_spec: QuantSpec, activation_spec: QuantSpec | None = None, weight_range: Source = Dynamic(),
        activation_range: Source = Observed(), backward: Backward = FloatBackward(),
        use_running_average: bool = False, rngs: nnx.Rngs, **given: Any,
    ) -> None:  # fmt: skip
        _check_arguments(self, given)
        shapes = (tuple(kernel_shape), None if bias_shape is None else tuple(bias_shape))
        super().__init__(einsum_str, *shapes, promote_dtype=promote_dtype, rngs=rngs, **given)
        how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
        self.einsum_op = nnx.data(_make_contraction(self, Product, self.kernel, how, rngs))


class Conv(nnx.Conv):
    """y = conv_general_dilated(quantize(x), quantize(kernel)) + bias: `flax.nnx.Conv`, as `Linear`.

    Grouped and depthwise convolutions, every padding and dilation. The kernel's features are its last axis. A `mask` is
    refused: multiply the kernel by it, once.
    """

    def __init__(
        self, in_features: int, out_features: int, kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1, *, weight_spec: QuantSpec, activation_spec: QuantSpec | None = None,
        weight_range: Source = Dynamic(), activation_range: Source = Observed(), backward: Backward = FloatBackward(),
        use_running_average: bool = False, rngs: nnx.Rngs, **given: Any,
    ) -> None:  # fmt: skip
        _check_arguments(self, given)
        sizes = (in_features, out_features, kernel_size, strides)
        super().__init__(*sizes, promote_dtype=promote_dtype, rngs=rngs, **given)
        how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
        self.conv_general_dilated = nnx.data(_make_contraction(self, ConvGeneralDilated, self.kernel, how, rngs))


class Embed(nnx.Embed):
    """y = take(quantize(embedding), indices): `flax.nnx.Embed` with a quantized table, as `Linear`.

    A converted table is looked up in its codes. `attend` quantizes the query too, where `activation_spec` says how; its
    range is the only one that there is.
    """

    def __init__(
        self, num_embeddings: int, features: int, *, weight_spec: QuantSpec, activation_spec: QuantSpec | None = None,
        weight_range: Source = Dynamic(), activation_range: Source = Observed(), backward: Backward = FloatBackward(),
        use_running_average: bool = False, rngs: nnx.Rngs, **given: Any,
    ) -> None:  # fmt: skip
        _check_arguments(self, given)
        super().__init__(num_embeddings, features, rngs=rngs, **given)
        how = How(weight_spec, activation_spec, weight_range, activation_range, backward, use_running_average)
        self.table = nnx.data(_make_contraction(self, Table, self.embedding, how, rngs))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the rows at the given indices, in the layer's dtype; NaN beyond the table."""
        is_integer = jnp.issubdtype(inputs.dtype, jnp.integer)
        with _layer_operand.prefix_errors(self.table.layer):
            checks.require_type(is_integer, _NAME, "inputs", "an integer dtype", inputs.dtype)
        if self.num_embeddings == 1:  # as flax has it: every index is the one
            inputs = jnp.zeros_like(inputs)
        return self.table.rows(self.embedding[...], inputs, self.dtype, out_sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the products of a query with every row of the table."""
        table = self.embedding[...]
        dtype = dtypes.canonicalize_dtype(query, jnp.zeros((), table.dtype), dtype=self.dtype)
        return self.table.products(query.astype(dtype), table, out_sharding)
