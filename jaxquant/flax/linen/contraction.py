"""The Linen modules that contract: each stands in for a function of `jax.lax`, and holds what a layer's ranges need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import meta
from flax.linen import dtypes

from ..._arrays.quantize import find_parameters
from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import QuantSpec
from ..._arrays.static_text import StaticText
from ..._contractions.conv import conv_general_dilated
from ..._contractions.dot import dot_general
from ..._contractions.einsum import einsum
from ..._core import checks
from ..._training.backward import Backward, FloatBackward, Int8Backward
from ..._training.conv_general_dilated import quantized_conv_general_dilated
from ..._training.dot_general import quantized_dot_general
from ..._training.einsum import quantized_einsum
from ..._training.quantizer import Quantizer
from .. import _layer_operand
from .._layer_operand import Site
from ..ranges import Dynamic, Observed, Source
from .record import NAME, Record

RANGES, SCALES, ROUNDING = "ranges", "scales", "rounding"


def promote_dtype(inputs: Any, kernel: Any, bias: Any = None, *, dtype: Any = None, inexact: bool = True) -> Any:
    """(inputs, kernel, bias) = flax's `promote_dtype` of inputs and bias; the kernel keeps its dtype.

    A kernel is quantized as it is stored, so that training and serving have the same codes. One that is converted
    passes through.

    Args:
        inputs: of the layer, or None.
        kernel: a float array, or a QuantizedArray.
        bias: or None.
        dtype: Static. That of the computation; None finds it from the three.
        inexact: Static. Whether integers become floats.

    Returns:
        (inputs, kernel, bias).

    Raises:
        ValueError: dtype is no float, and inexact is True.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> kernel = jq.quantize(jnp.array([[127.0, 0.5]]), jq.QuantSpec(jnp.int8))  # 0.5 is half a step
        >>> inputs, same, bias = jq.flax.promote_dtype(jnp.ones(1), kernel, jnp.zeros(2), dtype=jnp.bfloat16)
        >>> inputs.dtype, same is kernel, bias.dtype
        (dtype(bfloat16), True, dtype(bfloat16))

    Source: flax.linen.dtypes.promote_dtype.
    """
    given = [x for x in (inputs, bias) if x is not None]
    found = dtypes.canonicalize_dtype(*given, jax.numpy.zeros((), kernel.dtype), dtype=dtype, inexact=inexact)
    inputs, bias = (None if x is None else jax.numpy.asarray(x, found) for x in (inputs, bias))
    return inputs, kernel, bias


class Contraction(nn.Module):
    """The base class of the modules that contract.

    Attributes:
        weight_spec: how the weights are quantized.
        activation_spec: how the activations are, or None.
        weight_range: where the range of the weights comes from.
        activation_range: where that of the activations comes from.
        backward: how the gradient is contracted.
        kernel_name: what the weights are called in "params", in the module around this.
    """

    weight_spec: QuantSpec
    activation_spec: QuantSpec | None = None
    weight_range: Source = Dynamic()
    activation_range: Source = Observed()
    backward: Backward = FloatBackward()
    kernel_name: str = "kernel"

    @nn.nowrap
    def place(self) -> str:
        """Returns the path of the layer around this, for errors."""
        return "/".join(self.path[:-1]) or type(self.parent if isinstance(self.parent, nn.Module) else self).__name__

    @nn.nowrap
    def sites(self) -> tuple[Site, Site | None]:
        """Returns where something is quantized."""
        return _layer_operand.check_layer(
            "flax", self.weight_spec, self.activation_spec, self.weight_range, self.activation_range
        )

    @nn.nowrap
    def contracted(
        self, x: jax.Array, kernel: Any, features: Sequence[int], training: Callable[..., Any],
        serving: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Returns `serving(x, kernel)` with x quantized for a converted kernel, else `training(x, kernel, ...)`.

        `features` are the axes of the kernel that the contraction keeps, counted from the back.
        """
        with _layer_operand.prefix_errors(self.place()):
            weight, activation = self.sites()
            weight = _layer_operand.resolve_features(weight, features)
            if isinstance(kernel, QuantizedArray):
                self.check_converted(weight, activation, kernel)
                return serving(x if activation is None else self._served(activation, x), kernel)
            self._record(weight, activation, kernel)
            specs = (self._quantizer(activation, x), self._quantizer(weight, kernel))
            draws = isinstance(self.backward, Int8Backward) and self.backward.stochastic_rounding
            has_key = self.has_rng(ROUNDING) or self.has_rng("params")  # flax takes that one instead
            key = self.make_rng(ROUNDING) if draws and has_key and not self.is_initializing() else None
            return training(x, kernel, specs, {"backward": self.backward, "key": key})

    @nn.nowrap
    def check_converted(self, weight: Site, activation: Site | None, kernel: QuantizedArray) -> None:
        """Requires variables that were converted with the specs and the range sources that this layer has."""
        for site, name in ((weight, "weight"), (activation, "activation")):
            text = _layer_operand.describe_converted(site)
            entry = f"{name}_spec"
            record = self.get_variable(RANGES, entry) if self.has_variable(RANGES, entry) else None
            known = record.text if isinstance(record, StaticText) else text
            checks.require(known == text, "flax", entry, f"what the variables were converted with: {known}", text)
        _layer_operand.check_converted(weight, kernel)
        # Variables without those texts, as another program may write them, must fit as far as their arrays tell.
        is_stored = self.has_variable(RANGES, "activation")
        is_static = activation is not None and not isinstance(activation.source, Dynamic)
        expected = "a spec with activation_range=Observed() or Learned(): the variables hold a static range"
        got = "None" if activation is None else "Dynamic()"
        checks.require(is_static or not is_stored, "flax", "activation_spec", expected, got)

    @nn.nowrap
    def _quantizer(self, site: Site | None, x: jax.Array) -> Quantizer | None:
        return None if site is None else _layer_operand.make_quantizer(site, x, self._given(site, x))

    @nn.nowrap
    def _given(self, site: Site, x: jax.Array) -> tuple[jax.Array, Any] | None:
        """Returns a scale and a zero point from the variables, or None where x has its own."""
        if isinstance(site.source, Dynamic):
            return None
        if isinstance(site.source, Observed):
            return self._observed(site, x)
        names = _layer_operand.list_names(site)
        if not all(self.has_variable(SCALES, name) for name in names):
            self._require_mutable(SCALES, site)
            for name, start in zip(names, _layer_operand.find_initial(site, x), strict=True):
                self.variable(SCALES, name, self._boxed, site, start)
        parts = [meta.unbox(self.get_variable(SCALES, name)) for name in names]
        return _layer_operand.read_learned(site, tuple(parts))

    @nn.nowrap
    def _observed(self, site: Site, x: jax.Array) -> tuple[jax.Array, Any]:
        is_mutable = self.is_mutable_collection(RANGES)
        if not self.has_variable(RANGES, site.of):
            self._require_mutable(RANGES, site)
        state = self.variable(RANGES, site.of, _layer_operand.make_state, site, x)
        is_one = isinstance(state.value, Mapping) and "state" in state.value
        expected = "the state of a calibrator, as init makes it for a float kernel"
        checks.require(is_one, "flax", site.of, expected, "the constants of a converted one")
        if self.is_initializing():  # which sees no batch: x has the range of its own
            return find_parameters("quantize", x, site.spec, None, None)[:2]
        if is_mutable:
            state.value = _layer_operand.update_state(site, state.value, x)
        batches = state.value["batches"]
        holds = checks.is_traced(batches) or bool((np.asarray(batches) > 0).all())
        expected = f'a range: apply(..., mutable=["{RANGES}"]) with data, and what that returns among the variables'
        checks.require(holds, "flax", site.of, expected, "no data")
        return _layer_operand.finalize_state(site, state.value, x.shape)

    @nn.nowrap
    def _require_mutable(self, collection: str, site: Site) -> None:
        expected = (
            f'it in the collection "{collection}", or apply(..., mutable=["{collection}"]) with data to start it '
            f"(nn.scan and nn.vmap have to be told of it in variable_axes)"
        )
        checks.require(self.is_mutable_collection(collection), "flax", site.of, expected, "neither")

    @nn.nowrap
    def _boxed(self, site: Site, start: jax.Array) -> Any:
        """Returns a learned scale with the partitioning of its weights, where those have one."""
        box = self._stored()
        names = getattr(box, "names", None)
        if site.of != "weight" or not isinstance(box, meta.AxisMetadata) or names is None:
            return start
        return dataclasses.replace(box, value=start, names=_layer_operand.find_part_names(names, start.shape))  # type: ignore[call-arg]

    @nn.nowrap
    def _stored(self) -> Any:
        """Returns the weights as "params" has them."""
        parent = self.parent
        has = isinstance(parent, nn.Module) and parent.has_variable("params", self.kernel_name)
        return parent.get_variable("params", self.kernel_name) if has else None  # type: ignore[union-attr]

    @nn.nowrap
    def _record(self, weight: Site, activation: Site | None, kernel: jax.Array) -> None:
        parent, stored = self.parent, meta.unbox(self._stored())
        is_ready = getattr(parent, "promote_dtype", promote_dtype) is promote_dtype
        expected = (
            "promote_dtype=jq.flax.promote_dtype in the layer: flax's own rounds the kernel before it is quantized"
        )
        same = stored is None or stored.dtype == kernel.dtype
        checks.require_type(same, "flax", "kernel", expected, f"{kernel.dtype} of {getattr(stored, 'dtype', None)}")
        if self.is_mutable_collection(RANGES):
            shape, dtype = tuple(kernel.shape), kernel.dtype
            outer = getattr(parent, "parent", None)
            attention = type(outer).__name__ if isinstance(outer, nn.MultiHeadDotProductAttention) else None
            record = Record(weight, activation, self.kernel_name, shape, dtype, is_ready, attention)
            self.put_variable(RANGES, NAME, record)
            return
        record = self.get_variable(RANGES, NAME) if self.has_variable(RANGES, NAME) else None
        for site, name in ((weight, "weight"), (activation, "activation")):
            known = getattr(record, name, site)
            expected = f'what the variables were made with (a call with mutable=["{RANGES}"] makes them anew)'
            checks.require(_layer_operand.is_alike(site, known), "flax", f"{name}_spec", f"{expected}: {known}", site)

    @nn.nowrap
    def _served(self, site: Site, x: jax.Array) -> QuantizedArray:
        if isinstance(site.source, Dynamic):
            return _layer_operand.quantize_operand(site, x, None)
        stored = self.get_variable(RANGES, site.of) if self.has_variable(RANGES, site.of) else None
        expected = 'its range in the collection "ranges", as jq.flax.convert makes it'
        is_one = isinstance(stored, Mapping) and "scale" in stored
        checks.require(is_one, "flax", site.of, expected, "none")
        assert stored is not None
        return _layer_operand.quantize_operand(site, x, (stored["scale"], stored.get("zero_point")))


class DotGeneral(Contraction):
    """`jax.lax.dot_general(activations, weights, ...)` in integers."""

    @nn.compact
    def __call__(
        self, lhs: jax.Array, rhs: Any, dimension_numbers: Any, precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:  # fmt: skip
        """Returns the contraction."""
        static = {"precision": precision, "preferred_element_type": preferred_element_type or lhs.dtype}

        def training(lhs: Any, rhs: Any, specs: Sequence[Any], more: dict[str, Any]) -> jax.Array:
            return quantized_dot_general(
                lhs, rhs, dimension_numbers, lhs_spec=specs[0], rhs_spec=specs[1], **static, **more
            )

        (_, contracted), _ = dimension_numbers
        features = _layer_operand.find_kept_axes(rhs.ndim, contracted)
        return self.contracted(
            lhs, rhs, features, training, lambda x, w: dot_general(x, w, dimension_numbers, **static)
        )


class ConvGeneralDilated(Contraction):
    """`jax.lax.conv_general_dilated(activations, weights, ...)` in integers."""

    @nn.compact
    def __call__(self, lhs: jax.Array, rhs: Any, *static: Any, precision: Any = None, **more: Any) -> jax.Array:
        """Returns the convolution."""
        named = {**more, "precision": precision, "preferred_element_type": lhs.dtype}

        def training(lhs: Any, rhs: Any, specs: Sequence[Any], more: dict[str, Any]) -> jax.Array:
            return quantized_conv_general_dilated(
                lhs, rhs, *static, lhs_spec=specs[0], rhs_spec=specs[1], **named, **more
            )

        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, more.get("dimension_numbers"))
        features = (numbers.rhs_spec[0] - rhs.ndim,)
        return self.contracted(lhs, rhs, features, training, lambda x, w: conv_general_dilated(x, w, *static, **named))


class Product(Contraction):
    """`jax.numpy.einsum(subscripts, activations, weights)` in integers."""

    @nn.compact
    def __call__(self, subscripts: str, lhs: jax.Array, rhs: Any, precision: Any, preferred: Any) -> jax.Array:
        """Returns the contraction."""
        static = {"precision": precision, "preferred_element_type": preferred or lhs.dtype}

        def training(lhs: Any, rhs: Any, specs: Sequence[Any], more: dict[str, Any]) -> jax.Array:
            return quantized_einsum(subscripts, lhs, rhs, specs=specs, **static, **more)

        features = _layer_operand.find_kept_in_einsum(subscripts, rhs.ndim)
        return self.contracted(lhs, rhs, features, training, lambda x, w: einsum(subscripts, x, w, **static))


@dataclasses.dataclass(frozen=True)
class Injected:
    """What a layer of flax's contracts with: its `dot_general`, or its `dot_general_cls`. It may be given to many.

    No module itself, but it makes one in the layer that calls it. Equal where its arguments are.
    """

    module: type[Contraction]
    weight_spec: QuantSpec
    activation_spec: QuantSpec | None
    weight_range: Source
    activation_range: Source
    backward: Backward

    def __call__(self, *operands: Any, **static: Any) -> Any:
        """Returns the contraction of the operands; without operands the module that contracts."""
        made = self.module(
            self.weight_spec, self.activation_spec, self.weight_range, self.activation_range, self.backward
        )
        expected = "a layer of Linen's to call it (of NNX: jaxquant.flax.nnx.dot_general, conv_general_dilated)"
        checks.require(made.scope is not None or not operands, "flax", self.module.__name__, expected, "none")
        return made(*operands, **static) if operands else made
