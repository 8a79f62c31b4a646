"""One place of a layer where something is quantized: its weights, or its activations. Knows neither Linen nor NNX."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import scale_from_range
from .._arrays.quantize import find_parameters, quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, sharding, small_floats
from .._core.granularity import PerAxis, PerFeature, PerTensor
from .._training.estimators import LSQ, LSQPlus, StraightThrough
from .._training.fake_quantize import read_parts
from .._training.quantizer import Quantizer
from .._training.rounding_vjp import Config, make_array, round_zero_point
from ..calibration import Calibrator
from ..integer import _operands
from .ranges import Dynamic, Learned, Observed, Partial, Source

# Granularities of activations whose ranges have one shape whatever the batch.
_STORABLE = {PerTensor(), PerFeature(), PerAxis(-1)}
_NEGATIVE = "its own zero point for unsigned codes is 0, and what is negative becomes 0"


class Site(NamedTuple):
    """What is static of a place: static and hashable.

    Attributes:
        spec: how to quantize.
        source: where the range comes from.
        of: "weight" or "activation".
    """

    spec: QuantSpec
    source: Source
    of: str

    @property
    def argument(self) -> str:
        """The argument of a layer that the spec was given as, for errors."""
        return f"{self.of}_spec"


@contextlib.contextmanager
def prefix_errors(path: str) -> Iterator[None]:
    """Puts the path of a layer before the errors of what it calls."""
    try:
        yield
    except (checks.ContractValueError, checks.ContractTypeError) as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise type(error)(f"{path}: {error}") from error


def check_layer(
    layer: str, weight_spec: Any, activation_spec: Any, weight_range: Any, activation_range: Any
) -> tuple[Site, Site | None]:
    """Requires specs that a layer can train and serve, and returns its sites."""
    expected = "a QuantSpec (without one it is flax's own layer)"
    checks.require_type(
        isinstance(weight_spec, QuantSpec), layer, "weight_spec", expected, checks.describe_value(weight_spec)
    )
    known = activation_spec is None or isinstance(activation_spec, QuantSpec)
    expected = "a QuantSpec, or None for float activations"
    checks.require_type(known, layer, "activation_spec", expected, checks.describe_value(activation_spec))
    ways = (("weight", weight_range, Dynamic | Learned, "Dynamic() or Learned()"),
            ("activation", activation_range, Source, "Observed(), Dynamic() or Learned()"))  # fmt: skip
    for name, source, types, expected in ways:
        checks.require_type(isinstance(source, types), layer, f"{name}_range", expected, checks.describe_value(source))
    sites = [(Site(weight_spec, weight_range, "weight"))]
    if activation_spec is not None:
        sites.append(Site(activation_spec, activation_range, "activation"))
        for site in sites:
            _check_integers(layer, site.argument, site.spec)
    for site in sites:
        if site.of == "activation" and not isinstance(site.source, Dynamic):
            expected = (
                "PerTensor(), PerFeature(), or activation_range=Dynamic(): a stored range with an entry for each index "
                "of any other axis fits no other batch size"
            )
            is_storable = {site.spec.granularity, site.spec.zero_point_granularity} <= _STORABLE
            checks.require(is_storable, layer, site.argument, expected, site.spec.granularity)
        if isinstance(site.source, Learned):
            expected = "a spec without power_of_two: a learned scale moves by less"
            checks.require(not site.spec.power_of_two, layer, site.argument, expected, site.spec)
            expected = f"a signed dtype, symmetric=True, or Learned(LSQPlus()): {_NEGATIVE}"
            fits = site.of == "activation" or not _is_unsigned_at_zero(site)
            checks.require(fits, layer, site.argument, expected, site.spec)
    return sites[0], sites[1] if len(sites) == 2 else None


def resolve_features(site: Site, axes: Sequence[int]) -> Site:
    """Returns the site of weights with `PerFeature()` as the axes of their kernel that are output features.

    Args:
        site: of the weights.
        axes: the axes of the kernel that the contraction keeps, counted from the back: other axes may be stacked in
            front of them.
    """
    spec = site.spec
    if PerFeature() not in (spec.granularity, spec.zero_point_granularity):
        return site
    features = PerAxis(tuple(axes)) if axes else PerTensor()
    granularities = {
        name: features if getattr(spec, name) == PerFeature() else getattr(spec, name)
        for name in ("granularity", "zero_point_granularity")
    }
    return site._replace(spec=dataclasses.replace(spec, **granularities))


def find_kept_axes(rank: int, contracted: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of a kernel that a contraction keeps, counted from the back."""
    gone = {axis % rank for axis in contracted}
    return tuple(axis - rank for axis in range(rank) if axis not in gone)


def find_kept_in_einsum(subscripts: str, rank: int) -> tuple[int, ...]:
    """Returns the axes of the second operand, of this rank, that "x,kernel->y" keeps, counted from the back."""
    operands, _, result = subscripts.replace(" ", "").partition("->")
    before, dots, after = operands.split(",")[1].partition("...")
    hidden = ["..."] * (rank - len(before) - len(after)) if dots else []
    labels = [*before, *hidden, *after]
    return tuple(axis - rank for axis, label in enumerate(labels) if label in result)


def _check_integers(layer: str, argument: str, spec: QuantSpec) -> None:
    expected = f"codes of {dtypes.list_names(_operands.DTYPES)} where both sides are quantized, or activation_spec=None"
    holds = spec.codebook is None and spec.carrier in _operands.DTYPES
    checks.require_type(holds, layer, argument, expected, spec.dtype)


# Observed ranges.


def make_state(site: Site, x: jax.Array) -> dict[str, Any]:
    """Returns the state of a calibrator that has seen nothing."""
    assert isinstance(site.source, Observed)
    state = _make_calibrator(site).init(jax.ShapeDtypeStruct(_find_observed_shape(site, x.shape), x.dtype))
    return {"state": state, "batches": jnp.zeros((), jnp.int32)}


def update_state(site: Site, state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    """Returns the state with one batch more, or as it is where it is frozen."""
    source = site.source
    assert isinstance(source, Observed)
    if x.size == 0:  # no batch
        return state
    shape = _find_observed_shape(site, x.shape)
    rows = x if shape == x.shape else sharding.place_whole(x).reshape(shape)
    new = _make_calibrator(site).update(state["state"], jax.lax.stop_gradient(rows))
    batches = state["batches"]
    if source.freeze_after is None:
        return {"state": new, "batches": batches + 1}
    open_ = batches < source.freeze_after
    kept = jax.tree.map(lambda a, b: jnp.where(open_, a, b), new, state["state"])
    return {"state": kept, "batches": batches + open_.astype(jnp.int32)}


def finalize_state(
    site: Site, state: dict[str, Any], shape: tuple[int, ...] | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale and the zero point of what a calibrator has seen; `shape` is that of the activations."""
    assert isinstance(site.source, Observed)
    lo, hi = _make_calibrator(site).finalize(state["state"], allow_zero=True)
    if shape is None:  # one range for each entry
        return scale_from_range.find_scale_and_zero_point(site.spec, lo, hi, lo.shape, lo.shape)
    lo, hi = (_align_rank(site, bound, len(shape)) for bound in (lo, hi))
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return find_parameters("quantize", like, site.spec, lo, hi)[:2]


def _find_observed_shape(site: Site, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in which a calibrator is given activations: per feature as rows, so that any rank fits."""
    if _is_per_tensor(site) or len(shape) == 0:
        return shape
    return (math.prod(shape[:-1]), shape[-1])


def _is_per_tensor(site: Site) -> bool:
    return site.spec.granularity == site.spec.zero_point_granularity == PerTensor()


def _align_rank(site: Site, part: Any, rank: int) -> Any:
    """Returns a part with an entry per feature in this rank, its features last; anything else as it is."""
    if part is None or _is_per_tensor(site) or part.ndim == rank or part.size != part.shape[-1]:
        return part
    return part.reshape(*(1,) * (rank - 1), part.size)


def _make_calibrator(site: Site) -> Calibrator:
    """Returns the site's calibrator; `Observed` and `Dynamic` have made sure that its factory takes a spec alone."""
    assert not isinstance(site.source, Learned)
    factory = site.source.calibrator
    assert factory is not None
    made = factory(site.spec)
    if not isinstance(made, Calibrator):
        name, got = type(site.source).__name__, f"{_describe_factory(factory)}, which returns {type(made).__name__}"
        checks.require_type(False, name, "calibrator", "a function from a spec to a calibrator", got)
    return made


# Learned scales.


def list_names(site: Site) -> tuple[str, ...]:
    """Returns the names of what is learned there."""
    scale = f"{site.of}_scale"
    source = site.source
    is_offset = isinstance(source, Learned) and isinstance(source.gradient, LSQPlus) and not site.spec.symmetric
    return (scale, f"{site.of}_zero_point") if is_offset else (scale,)


def find_initial(site: Site, x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what `names` are to start from."""
    assert isinstance(site.source, Learned)
    parts = site.source.gradient.initial(x, site.spec)
    known = not any(map(checks.is_traced, (x, parts[0]))) and getattr(x, "is_fully_addressable", True)
    if _is_unsigned_at_zero(site) and known and isinstance(site.source.gradient, LSQ):  # PACT clips there by intent
        # Of what is not known the docstring of `Learned` tells.
        least = float(np.asarray(x, np.float32).min(initial=0))
        expected = f"values that are not negative, symmetric=True, or Learned(LSQPlus()): {_NEGATIVE}"
        holds = not least < -float(np.asarray(parts[0]).max(initial=0)) / 2
        checks.require(holds, "flax", site.of, expected, f"{least:.3g} among them")
    return tuple(part for part in parts[: len(list_names(site))] if part is not None)


def _is_unsigned_at_zero(site: Site) -> bool:
    """Whether the codes begin at a zero point that stays 0."""
    source, spec = site.source, site.spec
    is_zero = isinstance(source, Learned) and not isinstance(source.gradient, LSQPlus) and not spec.symmetric
    return is_zero and spec.bounds[0] == 0


def is_finite(value: Any) -> bool:
    """Whether all that is known here is finite: nothing of what is traced, or on the devices of another host."""
    if checks.is_traced(value):
        return True
    known = [shard.data for shard in value.addressable_shards] if isinstance(value, jax.Array) else [value]
    return all(bool(np.isfinite(np.asarray(part)).all()) for part in known)


def read_learned(site: Site, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    """Returns the scale and the zero point as they are used."""
    # The least scale of its own dtype: to float16 the least float32 is 0.
    least = scale_from_range.find_least_scale(site.spec.scale_dtype)
    scale = jnp.maximum(jnp.abs(parts[0]), least).astype(site.spec.scale_dtype)
    if len(parts) == 2:  # fake_quantize refuses a known one that training has moved out of the codes
        point = parts[1]
        return scale, point if checks.is_traced(point) else jnp.clip(point, *map(np.float32, site.spec.bounds))
    if site.spec.symmetric:
        return scale, None
    is_alike = site.spec.zero_point_granularity == site.spec.granularity  # then nn.scan can cut one as the other
    return scale, jnp.zeros(scale.shape if is_alike else (1,) * scale.ndim, site.spec.carrier)


def is_alike(one: Site | None, other: Site | None) -> bool:
    """Whether both quantize alike: to the same codes, by ranges from the same place."""
    if one is None or other is None:
        return one is other
    ways = [(type(s.source), getattr(s.source, "calibrator", None)) for s in (one, other)]
    return one.spec == other.spec and ways[0] == ways[1]


def find_code(site: Site, zero_point: jax.Array) -> jax.Array:
    """Returns a learned zero point as the code that it is used as."""
    found = round_zero_point(site.spec, zero_point)
    assert found is not None
    return found.astype(site.spec.carrier)


def find_part_names(names: Sequence[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns how a scale or zero point is partitioned that belongs to weights with these names, perhaps too few."""
    padded = (*names, *(None,) * (len(shape) - len(names)))
    return tuple(name if n != 1 else None for name, n in zip(padded, shape, strict=True))


# What a contraction is given.


def check_shippable(function: str, site: Site, scale: jax.Array) -> None:
    """Requires a scale that can be served, as far as it is known: a finite number, and of a learned one not 0."""
    if checks.is_traced(scale):
        return
    known = np.asarray(small_floats.scale_as_float32(scale))
    name = f"scale of the {site.of}"
    checks.require(bool(np.isfinite(known).all()), function, name, "finite numbers", "NaN or an infinity")
    least = float(known.min(initial=1))
    holds = least > float(scale_from_range.find_least_scale(scale.dtype)) or not isinstance(site.source, Learned)
    checks.require(holds, function, name, "numbers that training has not brought to 0", least)


_describe_spec = functools.lru_cache(maxsize=1024)(repr)  # each call that serves compares it


def describe_converted(site: Site | None) -> str:
    """Returns what must stay as it is once variables are converted: the spec, and whether the range is stored.

    Equal in every process, so that it can be saved beside the variables.
    """
    if site is None:
        return "None"
    if site.of == "weight":
        return _describe_spec(site.spec)
    if not isinstance(site.source, Dynamic):
        return f"{_describe_spec(site.spec)} with a static range"
    return f"{_describe_spec(site.spec)} with Dynamic({_describe_factory(site.source.calibrator)})"


def describe(site: Site | None) -> str:
    """Returns how a site quantizes, and what finds its range. Equal in every process."""
    if site is None:
        return "None"
    source = site.source
    more = _describe_factory(getattr(source, "calibrator", None)), getattr(source, "freeze_after", None)
    return f"{site.spec!r} with {type(source).__name__}{more}"


def _describe_factory(factory: Any) -> str:
    if factory is None:
        return ""
    if isinstance(factory, Partial):
        inner = [_describe_factory(factory.function), *map(_describe_argument, factory.arguments)]
        named = (f"{name}={_describe_argument(value)}" for name, value in factory.keywords)
        return f"partial({', '.join([*inner, *named])})"
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))


def _describe_argument(value: Any) -> str:
    """Returns an argument of a partial; the repr of a function has an address, which differs in every process."""
    return _describe_factory(value) if callable(value) else repr(value)


def check_converted(site: Site, kernel: QuantizedArray) -> None:
    """Requires codes of the spec's dtype."""
    expected = f"codes of {site.spec.dtype}, as the layer's spec has it"
    holds = kernel.codebook == site.spec.codebook and kernel.codes.dtype == site.spec.carrier
    checks.require_type(holds, "flax", site.argument, expected, kernel.codebook or kernel.codes.dtype)
    shape = scale_from_range.find_shapes("flax", site.spec, kernel.shape)[0]
    expected = f"scales of shape {shape}, as the layer's spec has it"
    checks.require(kernel.scale.shape == shape, "flax", site.argument, expected, f"shape {kernel.scale.shape}")
    block = scale_from_range.find_stored_block_size("flax", site.spec, kernel.shape)
    checks.require(kernel.block_size == block, "flax", site.argument, f"block_size={block}", kernel.block_size)


def make_quantizer(site: Site, x: jax.Array, given: tuple[jax.Array, Any] | None) -> Quantizer:
    """Returns how x is quantized: under a scale and zero point that are given, or that it has itself."""
    source, spec = site.source, site.spec
    gradient = source.gradient
    if given is not None:
        if site.of == "activation":
            given = (_align_rank(site, given[0], x.ndim), _align_rank(site, given[1], x.ndim))
        if isinstance(gradient, LSQ | LSQPlus) and gradient.elements is None and site.of == "activation":
            gradient = dataclasses.replace(gradient, elements=_count_features(x.shape, given[0].shape))
        return Quantizer(spec, *given, gradient)
    assert isinstance(source, Dynamic)
    if source.calibrator is None:
        return Quantizer(spec, gradient=gradient)
    return Quantizer(spec, *_calibrate_batch(site, x), gradient)


def _count_features(shape: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Returns how many elements of one example share an entry of a scale."""
    example = shape[1:] if len(shape) > 1 else shape
    entries = scale[-len(example) :] if len(scale) == len(shape) and example else (1,) * len(example)
    return max(math.prod(n // max(e, 1) for n, e in zip(example, entries, strict=True)), 1)


def _calibrate_batch(site: Site, x: jax.Array) -> tuple[jax.Array, Any]:
    x = jax.lax.stop_gradient(x)
    calibrator = _make_calibrator(site)
    lo, hi = calibrator.finalize(calibrator.update(calibrator.init(x), x), allow_zero=True)
    return find_parameters("quantize", x, site.spec, lo, hi)[:2]


def quantize_operand(site: Site, x: jax.Array, given: tuple[jax.Array, Any] | None) -> QuantizedArray:
    """Returns x as the contraction has it that `quantizer` is given to."""
    if given is None and isinstance(site.source, Dynamic) and site.source.calibrator is None:
        return quantize(x, site.spec)
    made = make_quantizer(site, x, given)  # a scale that cannot be served `shippable` refuses
    labels = (site.of, f"{site.of}.scale", f"{site.of}.zero_point")
    x, scale, zero_point = read_parts("quantize", labels, x, made.scale, made.zero_point, site.spec)
    return make_array(Config(site.spec, StraightThrough()), x, scale, zero_point, None)
