"""How the weights and the activations of a layer are quantized, and the checks of the arguments that determine it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.granularity import PerAxis, PerFeature, PerTensor, PerToken
from .._training.backward_choices import Backward, FloatBackward
from .._training.estimators import LSQPlus
from .._training.range_sources import Dynamic, Learned, RangeSource
from ..calibration.calibrator import describe_factory

# Granularities of activations that give ranges of one shape for every batch.
_STORABLE = {PerTensor(), PerFeature(), PerAxis(-1)}
UNSIGNED_AT_ZERO = "otherwise the zero point of unsigned codes is 0, and negative values become 0"


class LayerOperand(NamedTuple):
    """One operand of a layer, its weights or its activations: how to quantize it. Static and hashable.

    Attributes:
        spec: how to quantize the operand.
        source: the source of its range.
        role: "weight" or "activation".
    """

    spec: QuantSpec
    source: RangeSource
    role: str

    @property
    def argument(self) -> str:
        """The name of the layer's argument that holds the spec, for errors."""
        return f"{self.role}_spec"


Operands = tuple[LayerOperand, LayerOperand | None]


def resolve_tokens(activation: LayerOperand, rank: int, contracted: Sequence[int]) -> LayerOperand:
    """Return the operand with `PerToken()` replaced by all axes that are not contracted, if several or others are.

    Args:
        activation: the activations.
        rank: the rank of the activations.
        contracted: the axes of the activations that the layer contracts.
    """
    spec, summed = activation.spec, {axis % rank for axis in contracted}
    if PerToken() not in (spec.granularity, spec.zero_point_granularity) or summed == {rank - 1}:
        return activation
    # The features of a token then lie along several axes, for example heads and their features. They share a scale,
    # because a scale that varies along a contracted axis cannot be taken out of the sum.
    kept = tuple(axis for axis in range(rank) if axis not in summed)
    tokens = PerAxis(kept) if kept else PerTensor()
    granularities = {
        name: tokens if getattr(spec, name) == PerToken() else getattr(spec, name)
        for name in ("granularity", "zero_point_granularity")
    }
    return activation._replace(spec=dataclasses.replace(spec, **granularities))


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The arguments of a layer that say how to quantize it, which all layers share.

    Attributes:
        weight_spec: how to quantize the weights.
        activation_spec: how to quantize the activations, or None to leave them in floats.
        weight_range: the source of the weights' range.
        activation_range: the source of the activations' range.
        backward: how to contract gradients.
    """

    weight_spec: QuantSpec
    activation_spec: QuantSpec | None = None
    weight_range: RangeSource = Dynamic()
    activation_range: RangeSource = Dynamic()
    backward: Backward = FloatBackward()


def check_layer(layer: str, quantization: Quantization) -> Operands:
    """Check that a layer can be trained and served with these arguments, and return its operands.

    Args:
        layer: the name of the layer or function, for errors.
        quantization: the arguments.

    Returns:
        The weights, and the activations or None.

    Raises:
        ContractTypeError: an argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ContractValueError: a spec contradicts the source of its range.
    """
    _check_types(layer, quantization)
    weight = LayerOperand(quantization.weight_spec, quantization.weight_range, "weight")
    if quantization.activation_spec is None:
        expected = "Dynamic(), the default, because activation_spec is None and the activations stay floats"
        is_unused = quantization.activation_range == Dynamic()
        checks.require(is_unused, layer, "activation_range", expected, quantization.activation_range)
        _check_source(layer, weight)
        return weight, None
    activation = LayerOperand(quantization.activation_spec, quantization.activation_range, "activation")
    for operand in (weight, activation):
        # A dtype that no layer supports is reported before a source that does not fit.
        _check_integers(layer, operand)
    for operand in (weight, activation):
        _check_source(layer, operand)
    return weight, activation


def _check_types(layer: str, quantization: Quantization) -> None:
    """Raise ContractTypeError unless the specs and the sources of ranges have the expected types."""
    weight_spec, activation_spec = quantization.weight_spec, quantization.activation_spec
    expected = "a QuantSpec (for float weights use flax's own layer)"
    got = checks.describe_value(weight_spec)
    checks.require_type(isinstance(weight_spec, QuantSpec), layer, "weight_spec", expected, got)
    expected = "a QuantSpec, or None for float activations"
    got = checks.describe_value(activation_spec)
    checks.require_type(isinstance(activation_spec, QuantSpec | None), layer, "activation_spec", expected, got)
    source = quantization.weight_range
    expected, got = "Dynamic() or Learned()", checks.describe_value(source)
    checks.require_type(isinstance(source, Dynamic | Learned), layer, "weight_range", expected, got)
    source = quantization.activation_range
    expected, got = "Dynamic(), Static(...) or Learned()", checks.describe_value(source)
    checks.require_type(isinstance(source, RangeSource), layer, "activation_range", expected, got)


def _check_integers(layer: str, operand: LayerOperand) -> None:
    """Raise ContractTypeError unless the codes of an operand can be contracted in integers."""
    spec = operand.spec
    if spec.codebook is None and spec.carrier in dtypes.CONTRACTED:
        return
    expected = (
        f"codes of {dtypes.list_names(dtypes.CONTRACTED)} if both operands are quantized, or activation_spec=None"
    )
    checks.refuse_type(layer, operand.argument, expected, spec.dtype)


def _check_source(layer: str, operand: LayerOperand) -> None:
    """Raise ContractValueError unless the source of an operand's range can hold what its spec asks for."""
    spec, source = operand.spec, operand.source
    if has_forms(operand):
        expected = "a spec without an offset and without a scale_spec, which only weights can have"
        checks.require(operand.role == "weight", layer, operand.argument, expected, spec)
        expected = "Dynamic(), because no estimator trains the offsets and the quantized scales of weight_spec"
        checks.require(source == Dynamic(), layer, "weight_range", expected, source)
    if operand.role == "activation" and not isinstance(source, Dynamic):
        expected = (
            "PerTensor(), PerFeature(), or activation_range=Dynamic(): a stored range with an entry for each index of "
            "another axis would fit only one batch size"
        )
        is_storable = {spec.granularity, spec.zero_point_granularity} <= _STORABLE
        checks.require(is_storable, layer, operand.argument, expected, spec.granularity)
    if isinstance(source, Learned):
        expected = "a spec without power_of_two, because a learned scale moves in smaller steps"
        checks.require(not spec.power_of_two, layer, operand.argument, expected, spec)
        # Activations may turn out to be non-negative; trained weights never are.
        expected = f"a signed dtype, symmetric=True, or Learned(LSQPlus()): {UNSIGNED_AT_ZERO}"
        fits = operand.role != "weight" or not is_unsigned_at_zero(operand)
        checks.require(fits, layer, operand.argument, expected, spec)


def has_forms(operand: LayerOperand) -> bool:
    """Return whether an operand has offsets or quantized scales, which only a whole fake quantization finds."""
    return operand.spec.offset or operand.spec.scale_spec is not None


def is_unsigned_at_zero(operand: LayerOperand) -> bool:
    """Return whether an operand has unsigned codes and a learned scale, and keeps the zero point 0."""
    source, spec = operand.source, operand.spec
    is_zero = isinstance(source, Learned) and not isinstance(source.gradient, LSQPlus) and not spec.symmetric
    return is_zero and spec.bounds[0] == 0


def is_alike(operand: LayerOperand | None, recorded: LayerOperand | None) -> bool:
    """Return whether two operands have equal codes and ranges from the same kind of source."""
    if operand is None or recorded is None:
        return operand is recorded
    # `freeze_after` and `gradient` are not compared, because they change no codes.
    sources = [(type(o.source), getattr(o.source, "calibrator", None)) for o in (operand, recorded)]
    return operand.spec == recorded.spec and sources[0] == sources[1]


def describe_operand(operand: LayerOperand | None) -> str:
    """Return a description of how an operand is quantized and what finds its range, equal in every process."""
    if operand is None:
        return "None"
    source = operand.source
    # Checkpoints of a calibration contain this description: if it changed, they could not be resumed.
    settings = describe_factory(getattr(source, "calibrator", None)), getattr(source, "freeze_after", None)
    return f"{operand.spec!r} with {type(source).__name__}{settings}"


# Cached, because each call of a converted layer compares this description, and the repr of a spec is slow.
_describe_spec = functools.lru_cache(maxsize=1024)(repr)


def describe_converted(operand: LayerOperand | None) -> str:
    """Return a text of what must not change after conversion: the spec, and whether the range is stored.

    The text is equal in every process, so that it can be saved with the variables.
    """
    if operand is None:
        return "None"
    if operand.role == "weight":
        return _describe_spec(operand.spec)
    # Converted variables contain this description: if it changed, they would be rejected.
    if not isinstance(operand.source, Dynamic):
        return f"{_describe_spec(operand.spec)} with a static range"
    return f"{_describe_spec(operand.spec)} with Dynamic({describe_factory(operand.source.calibrator)})"


def describe_calibrator(operand: LayerOperand) -> str:
    """Return the name of the function that makes an operand's calibrator, with the arguments that are bound to it."""
    return describe_factory(getattr(operand.source, "calibrator", None))
