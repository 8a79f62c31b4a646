"""The NNX modules that contract: each stands in for a function of `jax.lax`, and holds what a layer's ranges need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, reshard

from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import QuantSpec
from ..._arrays.static_text import StaticText
from ..._contractions.conv import conv_general_dilated
from ..._contractions.dot import dot_general
from ..._contractions.einsum import einsum
from ..._contractions.take import take
from ..._core import checks, sharding
from ..._core.granularity import PerFeature, PerTensor
from ..._training.backward import Backward, Int8Backward
from ..._training.conv_general_dilated import quantized_conv_general_dilated
from ..._training.dot_general import quantized_dot_general
from ..._training.einsum import quantized_einsum
from ..._training.quantizer import Quantizer
from .. import _layer_operand
from .._layer_operand import Site
from ..linen.contraction import ROUNDING
from ..linen.contraction import promote_dtype as promoted
from ..ranges import Dynamic, Observed, Source

_NAME = "flax.nnx"
ROWS = (-2,)  # the output features of a table: `attend` has an output for each row
_Operands = TypeVar("_Operands", bound=tuple[Any, ...])


def promote_dtype(operands: _Operands, *, dtype: Any = None, inexact: bool = True) -> _Operands:
    """(inputs, kernel, bias) = flax's `promote_dtype` of inputs and bias; the kernel keeps its dtype.

    As `jq.flax.promote_dtype`, for layers of NNX, which give it a tuple.

    Args:
        operands: (inputs, kernel, bias). The kernel is a float array or a QuantizedArray; the bias may be None.
        dtype: Static. That of the computation; None finds it from the three.
        inexact: Static. Whether integers become floats.

    Returns:
        (inputs, kernel, bias).

    Raises:
        ValueError: dtype is no float, and inexact is True.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import nnx as qnnx
        >>> kernel = jq.quantize(jnp.array([[127.0, 0.5]]), jq.QuantSpec(jnp.int8))  # 0.5 is half a step
        >>> inputs, same, bias = qnnx.promote_dtype((jnp.ones(1), kernel, None), dtype=jnp.bfloat16)
        >>> inputs.dtype, same is kernel, bias
        (dtype(bfloat16), True, None)

    Source: flax.nnx.nn.dtypes.promote_dtype.
    """
    is_three = isinstance(operands, tuple) and len(operands) == 3
    expected = "a tuple of inputs, kernel and bias"
    checks.require(is_three, f"{_NAME}.promote_dtype", "operands", expected, type(operands).__name__)
    inputs, kernel, bias = operands
    return promoted(inputs, kernel, bias, dtype=dtype, inexact=inexact)  # type: ignore[return-value]


class Ranges(nnx.Variable):
    """What was seen of a layer's activations: a calibrator's state, and of a converted layer their scale."""


class Scale(nnx.Variable):
    """A scale that is learned, or a zero point. An optimizer takes `wrt=nnx.Any(nnx.Param, qnnx.Scale)`."""


class Codes(nnx.Variable):
    """What `convert` puts in the place of a kernel: a QuantizedArray; of a partitioned one, an array of it."""


class Partitioned(nnx.Pytree):
    """What `convert` puts in the place of a partitioned kernel: its codes and its scale lie on devices each as it is.

    Attributes:
        codes: `Codes` with an array; likewise `scale`, and `zero_point` or None.
        static: Static. What the QuantizedArray is beside its arrays.
    """

    def __init__(self, q: QuantizedArray, box: Callable[[jax.Array], nnx.Variable]) -> None:
        self.codes, self.scale = box(q.codes), box(q.scale)
        self.zero_point = nnx.data(None if q.zero_point is None else box(q.zero_point))
        self.static = (q.dtype, q.block_size, q.codebook)

    def get_value(self) -> QuantizedArray:
        """Returns the QuantizedArray."""
        dtype, size, book = self.static
        point = None if self.zero_point is None else self.zero_point[...]
        return QuantizedArray(self.codes[...], self.scale[...], point, dtype=dtype, block_size=size, codebook=book)

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Returns what the index picks, all of it for `...`, as a variable does."""
        return self.get_value()[index]


class How(NamedTuple):
    """What a layer is told of quantization."""

    weight_spec: QuantSpec
    activation_spec: QuantSpec | None
    weight_range: Source
    activation_range: Source
    backward: Backward
    use_running_average: bool


class Contraction(nnx.Module):
    """The base class of the modules that contract. Their variables have one shape from the start, whatever the inputs.

    Attributes:
        layer: what errors call the layer.
        sites: Static. Where something is quantized: the weights, and the activations or None.
        backward: Static. How the gradient is contracted.
        kernel_shape: Static. That of the weights, or None where it is not known.
        use_running_average: Static. Whether ranges are only read, as BatchNorm has it: `model.train()` and
            `model.eval()` set it.
        calibrating: Static. Whether ranges move whatever `use_running_average` says: `calibration_view` sets it.
        is_starting: Static. Whether learned scales are taken from what comes in, as they are by `start`.
        rngs: what a gradient that is rounded by chance draws from, or None.
        activation_range: the calibrator's state, or None; `activation_batches` counts the batches.
        weight_scale: learned, or None; likewise `weight_zero_point`.
        activation_scale: learned, or what a converted layer has, or None; likewise `activation_zero_point`.
        converted_specs: of a converted layer, the specs that it was converted with, as a text.
    """

    def __init__(
        self, layer: str, how: How, rngs: Any, kernel: nnx.Variable | None, kernel_shape: Sequence[int] | None,
        features: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        with _layer_operand.prefix_errors(layer):
            checks.check_flag(_NAME, "use_running_average", how.use_running_average)
            weight, activation = _layer_operand.check_layer(_NAME, *how[:4])
            if features is not None:
                weight = _layer_operand.resolve_features(weight, features)
            self.layer, self.sites = layer, (weight, activation)
            self.backward = how.backward
            self.kernel_shape = None if kernel_shape is None else tuple(kernel_shape)
            self.use_running_average, self.is_starting = bool(how.use_running_average), False
            self.calibrating = False
            self.rngs: Any = nnx.data(self._stream(rngs))
            self.activation_range: Any = nnx.data(None)
            self.activation_batches: Any = nnx.data(None)
            self.weight_scale: Any = nnx.data(None)
            self.weight_zero_point: Any = nnx.data(None)
            self.activation_scale: Any = nnx.data(None)
            self.activation_zero_point: Any = nnx.data(None)
            self.converted_specs: Any = nnx.data(None)
            for site in self.sites:
                if site is not None:
                    self._make(site, kernel)

    def set_view(self, use_running_average: bool | None = None, calibrating: bool | None = None) -> None:
        """Sets what `nnx.view` is told.

        Args:
            use_running_average: whether ranges are only read.
            calibrating: whether they move all the same.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
        if calibrating is not None:
            self.calibrating = calibrating

    def contracted(
        self, x: jax.Array, kernel: Any, features: Sequence[int], training: Callable[..., Any],
        serving: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Returns `serving(x, kernel)` with x quantized for a converted kernel, else `training(x, kernel, ...)`.

        `features` are the axes of the kernel that the contraction keeps, counted from the back.
        """
        weight, activation = self.sites
        weight = _layer_operand.resolve_features(weight, features)
        with _layer_operand.prefix_errors(self.layer):
            if isinstance(kernel, QuantizedArray):
                self.check_converted(weight, kernel)
                return serving(x if activation is None else self._served(activation, x), kernel)
            specs = (self.quantizer(activation, x), self.quantizer(weight, kernel))
            # An evaluation leaves the stream where it is: the model may be a constant of what is traced.
            key = None if self.rngs is None or self.use_running_average else self.rngs()
            return training(x, kernel, specs, {"backward": self.backward, "key": key})

    def describe_specs(self) -> StaticText:
        """Returns what must stay as it is once the layer is converted."""
        return StaticText("; ".join(map(_layer_operand.describe_converted, self.sites)))

    def check_converted(self, weight: Site, kernel: QuantizedArray) -> None:
        """Requires the specs and the range sources with which the state of this layer was converted."""
        own = self.describe_specs().text
        known = own if self.converted_specs is None else self.converted_specs.get_value().text
        expected = f"the weight_spec and activation_spec that the state was converted with: {known}"
        checks.require(known == own, _NAME, "specs", expected, own)
        _layer_operand.check_converted(weight, kernel)

    def quantizer(self, site: Site | None, x: jax.Array) -> Quantizer | None:
        """Returns how x is quantized there."""
        if site is None:
            return None
        if isinstance(site.source, Dynamic):
            return _layer_operand.make_quantizer(site, x, None)
        given = self._observed(site, x) if isinstance(site.source, Observed) else self._learned(site, x)
        return _layer_operand.make_quantizer(site, x, given)

    def _stream(self, rngs: Any) -> Any:
        if not isinstance(self.backward, Int8Backward) or not self.backward.stochastic_rounding:
            return None
        if isinstance(rngs, nnx.RngStream):
            return rngs.fork()
        expected = f'rngs, whose stream "{ROUNDING}" Int8Backward(stochastic_rounding=True) draws from'
        checks.require_type(isinstance(rngs, nnx.Rngs), _NAME, "rngs", expected, type(rngs).__name__)
        checks.require(ROUNDING in rngs or "default" in rngs, _NAME, "rngs", expected, "neither it nor a default")
        return rngs[ROUNDING].fork()

    def _make(self, site: Site, kernel: nnx.Variable | None) -> None:
        """Makes the variables of a site."""
        if isinstance(site.source, Dynamic):
            return
        spec, shape, dtype = site.spec, (1,), np.dtype(np.float32)
        is_one = spec.granularity == spec.zero_point_granularity == PerTensor()
        if site.of == "activation":
            expected = "PerTensor(), or activation_range=Dynamic(): the variables have one shape, whatever the inputs"
            checks.require(is_one, _NAME, site.argument, expected, spec)
        elif self.kernel_shape is not None:
            expected = "PerAxis(...): of this layer it is not known yet which axes of the kernel are output features"
            checks.require(PerFeature() != spec.granularity, _NAME, site.argument, expected, spec)
            shape, dtype = self.kernel_shape, dtype if kernel is None else kernel[...].dtype
        else:
            checks.require(is_one, _NAME, "kernel_shape", "that of the kernel: its scales are learned", "None")
        if isinstance(site.source, Observed):
            seen = _layer_operand.make_state(site, jax.ShapeDtypeStruct((1, 1), dtype))  # type: ignore[arg-type]
            self.activation_range, self.activation_batches = Ranges(seen["state"]), Ranges(seen["batches"])
            return
        parts = jax.eval_shape(lambda x: _layer_operand.find_initial(site, x), jax.ShapeDtypeStruct(shape, dtype))
        for name, part in zip(_layer_operand.list_names(site), parts, strict=True):
            value = jnp.full(part.shape, np.float32(np.nan))  # which shows in every result until it is started
            metadata = find_partitioning(kernel, part.shape, 0) if kernel is not None and site.of == "weight" else {}
            setattr(self, name, Scale(value, **metadata))

    def _observed(self, site: Site, x: jax.Array) -> tuple[jax.Array, Any]:
        state = {"state": self.activation_range.get_value(), "batches": self.activation_batches[...]}
        if self.calibrating or not self.use_running_average:
            # One range for all of it: the variables need not know its rank.
            state = _layer_operand.update_state(site, state, _flatten_rows(sharding.place_whole(x)))
            self.activation_range.set_value(state["state"])
            self.activation_batches.set_value(state["batches"])
        batches = state["batches"]
        expected = "a range: jaxquant.flax.nnx.calibrate(model, batches) finds it, or a call after model.train()"
        holds = checks.is_traced(batches) or bool((np.asarray(batches) > 0).all())
        checks.require(holds, _NAME, site.of, expected, "no data")
        return _layer_operand.finalize_state(site, state, x.shape)

    def _learned(self, site: Site, x: jax.Array) -> tuple[jax.Array, Any]:
        variables = [getattr(self, name) for name in _layer_operand.list_names(site)]
        if self.is_starting:
            for variable, start in zip(variables, _layer_operand.find_initial(site, x), strict=True):
                shape = variable[...].shape
                expected = f"scales of shape {shape}: is kernel_shape that of the kernel?"
                checks.require(start.size == variable[...].size, _NAME, site.of, expected, f"shape {start.shape}")
                variable.set_value(start.astype(jnp.float32).reshape(shape))
        parts = tuple(variable[...] for variable in variables)
        holds = all(map(_layer_operand.is_finite, parts))
        expected = "finite numbers: jaxquant.flax.nnx.start(model, batch) starts it"
        checks.require(holds, _NAME, f"{site.of}_scale", expected, "NaN or an infinity")
        return _layer_operand.read_learned(site, parts)

    def _served(self, site: Site, x: jax.Array) -> QuantizedArray:
        if isinstance(site.source, Dynamic):
            return _layer_operand.quantize_operand(site, x, None)
        scale, point = self.activation_scale, self.activation_zero_point
        expected = "its scale, as jaxquant.flax.nnx.convert makes it of a range"
        checks.require(isinstance(scale, Ranges), _NAME, site.of, expected, "none")
        return _layer_operand.quantize_operand(site, x, (scale[...], None if point is None else point[...]))


def find_partitioning(kernel: nnx.Variable, shape: tuple[int, ...], depth: int) -> dict[str, Any]:
    """Returns the kernel's partitioning for a part of this shape with `depth` axes of layers, none for shared axes."""
    placed = kernel.get_metadata("out_sharding", None)
    names = placed.spec if isinstance(placed, NamedSharding) else placed
    if not isinstance(names, tuple | PartitionSpec) or not len(names):
        return {}
    there = [*names, *(None,) * (len(shape) - len(names))]
    own = tuple(name if n != 1 or a < depth else None for a, (name, n) in enumerate(zip(there, shape, strict=True)))
    spec = own if isinstance(names, tuple) and not isinstance(names, PartitionSpec) else PartitionSpec(*own)
    out = NamedSharding(placed.mesh, PartitionSpec(*own)) if isinstance(placed, NamedSharding) else spec
    more = {name: kernel.get_metadata(name, None) for name in ("mesh", "sharding_rules")}
    return {"out_sharding": out, **{name: value for name, value in more.items() if value is not None}}


def _flatten_rows(x: jax.Array) -> jax.Array:
    """Returns x as a matrix of its rows: of a flat one XLA:CPU takes each index apart in the loop that makes x."""
    last = x.shape[-1] if x.ndim else 1
    return x.reshape(-1, last) if last else x.reshape(0, 0)


def _place_output(y: jax.Array, out_sharding: Any) -> jax.Array:
    return y if out_sharding is None else reshard(y, out_sharding)


class DotGeneral(Contraction):
    """`jax.lax.dot_general(activations, weights, ...)` in integers."""

    def __call__(
        self, lhs: jax.Array, rhs: Any, dimension_numbers: Any, precision: Any = None,
        preferred_element_type: Any = None, *, out_sharding: Any = None,
    ) -> jax.Array:  # fmt: skip
        """Returns the contraction."""
        static = {"precision": precision, "preferred_element_type": preferred_element_type or lhs.dtype}

        def training(lhs: Any, rhs: Any, specs: Sequence[Any], more: dict[str, Any]) -> jax.Array:
            return quantized_dot_general(
                lhs, rhs, dimension_numbers, lhs_spec=specs[0], rhs_spec=specs[1], **static, **more
            )

        (_, contracted), _ = dimension_numbers
        features = _layer_operand.find_kept_axes(rhs.ndim, contracted)
        serving = functools.partial(dot_general, dimension_numbers=dimension_numbers, **static)
        y = self.contracted(lhs, rhs, features, training, serving)
        return _place_output(y, out_sharding)


class ConvGeneralDilated(Contraction):
    """`jax.lax.conv_general_dilated(activations, weights, ...)` in integers."""

    def __call__(
        self, lhs: jax.Array, rhs: Any, *static: Any, preferred_element_type: Any = None, out_sharding: Any = None,
        **more: Any,
    ) -> jax.Array:  # fmt: skip
        """Returns the convolution."""
        named = {**more, "preferred_element_type": preferred_element_type or lhs.dtype}

        def training(lhs: Any, rhs: Any, specs: Sequence[Any], more: dict[str, Any]) -> jax.Array:
            return quantized_conv_general_dilated(
                lhs, rhs, *static, lhs_spec=specs[0], rhs_spec=specs[1], **named, **more
            )

        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, more.get("dimension_numbers"))
        features = (numbers.rhs_spec[0] - rhs.ndim,)
        y = self.contracted(lhs, rhs, features, training, lambda x, w: conv_general_dilated(x, w, *static, **named))
        return _place_output(y, out_sharding)


class Product(Contraction):
    """`jax.numpy.einsum(subscripts, activations, weights)` in integers."""

    def __call__(
        self, subscripts: str, lhs: jax.Array, rhs: Any, *, precision: Any = None, preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:  # fmt: skip
        """Returns the contraction."""
        static = {"precision": precision, "preferred_element_type": preferred_element_type or lhs.dtype}

        def training(lhs: Any, rhs: Any, specs: Sequence[Any], more: dict[str, Any]) -> jax.Array:
            return quantized_einsum(subscripts, lhs, rhs, specs=specs, **static, **more)

        features = _layer_operand.find_kept_in_einsum(subscripts, rhs.ndim)
        y = self.contracted(lhs, rhs, features, training, lambda x, w: einsum(subscripts, x, w, **static))
        return _place_output(y, out_sharding)


class Table(Contraction):
    """What an `Embed` does with its table, whose range is one for both."""

    def rows(self, table: Any, indices: jax.Array, dtype: Any, out_sharding: Any) -> jax.Array:
        """Returns rows of the table, NaN beyond it."""
        with _layer_operand.prefix_errors(self.layer):
            if isinstance(table, QuantizedArray):
                self.check_converted(self.sites[0], table)
                found = take(table, indices, axis=0, mode="fill")
            else:
                quantizer = self.quantizer(self.sites[0], table)
                assert quantizer is not None
                found = jnp.take(quantizer(table), indices, axis=0)
        return _place_output(found.astype(dtype), out_sharding)

    def products(self, query: jax.Array, table: Any, out_sharding: Any) -> jax.Array:
        """Returns the products of a query with every row."""
        numbers = (((query.ndim - 1,), (1,)), ((), ()))
        static = {"preferred_element_type": query.dtype}

        def training(lhs: Any, rhs: Any, specs: Any, more: dict[str, Any]) -> jax.Array:
            return quantized_dot_general(lhs, rhs, numbers, lhs_spec=specs[0], rhs_spec=specs[1], **static, **more)

        serving = functools.partial(dot_general, dimension_numbers=numbers, **static)
        y = self.contracted(query, table, ROWS, training, serving)
        return _place_output(y, out_sharding)
