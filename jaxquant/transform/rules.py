"""Rules: which contractions of a program run in integers, and how their operands are quantized."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._arrays.spec import QuantSpec
from .._contractions.output import check_output_spec
from .._core import checks
from .._core.granularity import PerTensor
from .._training.backward_choices import Backward, FloatBackward, Int8Backward, check_backward
from .._training.range_sources import Dynamic, Learned, Static
from ..calibration.calibrator import Factory


@dataclasses.dataclass(frozen=True)
class Weight:
    """How a rule quantizes the parameters of a contraction.

    Which axes share a scale is said in terms of the contraction, because a rule is written before the axes are known.

    Attributes:
        dtype: the dtype of the codes, or a `Codebook`, as in `QuantSpec`.
        per: "output" for one scale for each output feature, that is, for each index of the axes that no use of the
            parameter sums over; "tensor" for one scale. A table that is looked up has one scale for each row.
        block: the number of inputs that share a scale, along the axis that is summed. None for all of them.
        options: further attributes of `QuantSpec`, such as {"scale_dtype": "bfloat16"}.
        scale_block: the number of blocks along that axis whose scales share a scale, with a `scale_spec` in `options`,
            whose granularity it replaces. None keeps that granularity, by default one scale of all scales.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `per` is unknown, `block` or `scale_block` is not positive, or there is a `scale_block` without
            blocks or without a `scale_spec`.
    """

    dtype: Any
    per: str = "output"
    block: int | None = None
    options: Any = ()
    scale_block: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments, and store the options in a form that can be hashed."""
        checks.check_option("Weight", "per", self.per, ("output", "tensor"))
        if self.block is not None:
            _check_block("Weight", self.block)
        options = _freeze_options("Weight", self.dtype, self.options)
        if self.scale_block is not None:
            _check_block("Weight", self.scale_block, "scale_block")
            expected = (
                "None without block= and without a scale_spec in options, because it counts blocks of their scales"
            )
            has_scales = self.block is not None and dict(options).get("scale_spec") is not None
            checks.require(has_scales, "Weight", "scale_block", expected, self.scale_block)
        object.__setattr__(self, "options", options)


@dataclasses.dataclass(frozen=True)
class Activation:
    """How a rule quantizes the activations of a contraction.

    Attributes:
        dtype: the dtype of the codes, as in `QuantSpec`.
        per: "tensor" for one scale; "row" for one scale for each index of the dimensions that the contraction does not
            sum over, such as each token; "image" for one scale for each image of a convolution. Only dynamic ranges
            can differ between rows and images.
        range: `Dynamic()`, which finds the range in each array that is quantized, or `Static(calibrator)`, such as
            `Static(jq.calibration.minmax)`, for a range that calibration finds. The other attributes of the two are
            for layers.
        options: further attributes of `QuantSpec`.
        block: the number of inputs that share a scale, along the axis that is summed. Each row then has scales of its
            own. None for all inputs. Only dynamic ranges can differ between blocks, and convolutions take none. Of
            float8 scales (`scale_spec`), times one float32 scale for all, a static range gives the latter.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `per` is unknown, `block` is not positive, or a static range differs between rows, images or blocks.
    """

    dtype: Any
    per: str = "tensor"
    range: Dynamic | Static = Dynamic()
    options: Any = ()
    block: int | None = None

    @property
    def calibrator(self) -> Factory | None:
        """The function that makes the calibrator of a static range; None for a dynamic range."""
        return self.range.calibrator

    @property
    def has_one_scale(self) -> bool:
        """Whether all activations of an operand share one scale."""
        return self.per == "tensor" and self.block is None

    def make_spec(self) -> QuantSpec:
        """Return the spec of activations with one scale."""
        return QuantSpec(self.dtype, PerTensor(), **dict(self.options))

    def __post_init__(self) -> None:
        """Check the arguments, and store the options in a form that can be hashed."""
        checks.check_option("Activation", "per", self.per, ("tensor", "row", "image"))
        _check_range(self.range)
        expected = '"tensor", because a static range is found before the rows are known'
        checks.require(self.range == Dynamic() or self.per == "tensor", "Activation", "per", expected, self.per)
        if self.block is not None:
            _check_block("Activation", self.block)
            expected = "Dynamic() with a block, because a static range is found before the blocks are known"
            holds = self.range == Dynamic() or QuantSpec(self.dtype, **dict(self.options)).has_float8_scales
            checks.require(holds, "Activation", "range", expected, self.range)
            expected = '"tensor" or "row" with a block, which is a part of a row'
            checks.require(self.per != "image", "Activation", "per", expected, self.per)
        object.__setattr__(self, "options", _freeze_options("Activation", self.dtype, self.options))


def _check_block(name: str, block: int, argument: str = "block") -> None:
    """Raise unless a number is the length of a block."""
    checks.check_integer(name, argument, block)
    checks.require(block > 0, name, argument, "a positive int or None", block)


def _check_range(source: object) -> None:
    """Raise unless a prepared function can find a range in this way."""
    expected = "Dynamic(), or Static(calibrator) such as Static(jq.calibration.minmax)"
    if isinstance(source, Learned):
        expected += " (Prepared.trainable with an estimator trains the scales of weights and of static ranges)"
    is_known = isinstance(source, Dynamic | Static)
    checks.require_type(is_known, "Activation", "range", expected, checks.describe_value(source))
    expected = "no freeze_after, no gradient, and no calibrator of Dynamic(), which only layers take"
    is_plain = source == (Static(source.calibrator) if isinstance(source, Static) else Dynamic())
    checks.require(is_plain, "Activation", "range", expected, source)


def _freeze_options(function: str, dtype: Any, options: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options of a spec as sorted pairs, after a check that a spec takes them."""
    is_mapping = isinstance(options, Mapping | tuple)  # a tuple of pairs is what the field holds, as for a replace
    checks.require_type(is_mapping, function, "options", "a dict", checks.describe_value(options))
    pairs = tuple(sorted(dict(options).items()))
    # The granularity follows from the contraction, and the dtype is an argument of its own.
    names = {field.name for field in dataclasses.fields(QuantSpec)} - {"dtype", "granularity", "_"}
    for name, _ in pairs:
        checks.check_option(function, "options", name, tuple(sorted(names)))
    with checks.name_errors(function):
        QuantSpec(dtype, **dict(pairs))
    return pairs


class SiteView(NamedTuple):
    """What a rule can look at.

    Attributes:
        name: the name of the site, as in `coverage`.
        paths: the paths of its parameters.
        operation: "dot_general", "ragged_dot", "conv_general_dilated" or "take".
        shapes: the shapes of its operands.
        dtypes: the dtypes of its operands.
        scope: the name scopes around it.
        where: its file, line and function.
    """

    name: str
    paths: tuple[str, ...]
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    scope: str
    where: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """What to do with the contractions that match. Of a sequence of rules, the first one that matches applies.

    Attributes:
        path: matches the path of a parameter of the contraction: a pattern with `*`, `?` and `[...]` as in a shell,
            such as "*/Dense_?/kernel", or a compiled regular expression, which is searched. None matches every path.
            A contraction of activations has no parameter, and its name is matched instead.
        operation: "dot_general", "ragged_dot", "conv_general_dilated" or "take". None matches each.
        where: a function from a `SiteView` to a bool. None matches each.
        weight: how parameters are quantized. None leaves them in floats. A parameter gets the finest of the Weights
            that the rules of its uses name: the one with more bits, or with as many bits and more scales.
        activation: how activations are quantized. None leaves them in floats (weight-only).
        operands: "weight" to match contractions of activations with parameters, and lookups of parameters;
            "activations" to match contractions of two activations, and to quantize both.
        shared: whether all uses of a parameter share one static range. It is needed if the number of uses differs
            between calls, as in a Python loop over time. Each layer of a scan over stacked layers has a range of its
            own, unless another use of the parameter is outside of such a scan.
        keep: "float" leaves the contractions that match in floats. If another use of a parameter is quantized, they
            have the values of its codes.
        output: how results are quantized: an `Activation` of int8 or uint8 with a static range, for one scale. None
            leaves them in floats. With it, what follows a contraction of activations with weights runs on codes up to
            the next contraction, where the program allows it; the coverage says where and why it does not.
        backward: how `Prepared.fake_apply` contracts gradients: `FloatBackward()`; or, of products and convolutions of
            integers without blocks, `Int8Backward()` with rounding to nearest; or, of products of float8 or float4,
            `Float8Backward()`. It changes nothing in `Prepared.apply`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has an unknown value, or arguments contradict each other.
    """

    path: str | re.Pattern[str] | None = None
    _: dataclasses.KW_ONLY
    operation: str | None = None
    where: Callable[[SiteView], bool] | None = None
    weight: Weight | None = None
    activation: Activation | None = None
    operands: str = "weight"
    shared: bool = False
    keep: str | None = None
    output: Activation | None = None
    backward: Backward = FloatBackward()

    def __post_init__(self) -> None:
        """Check the arguments."""
        is_path = self.path is None or isinstance(self.path, str | re.Pattern)
        expected = "a pattern, a compiled regular expression or None"
        checks.require_type(is_path, "Rule", "path", expected, checks.describe_value(self.path))
        if self.operation is not None:
            operations = ("dot_general", "ragged_dot", "conv_general_dilated", "take")
            checks.check_option("Rule", "operation", self.operation, operations)
        checks.require_type(
            self.where is None or callable(self.where), "Rule", "where", "a function or None",
            checks.describe_value(self.where),
        )  # fmt: skip
        for name, kind in (("weight", Weight), ("activation", Activation), ("output", Activation)):
            value = getattr(self, name)
            is_kind, article = value is None or isinstance(value, kind), "a" if kind is Weight else "an"
            checks.require_type(
                is_kind, "Rule", name, f"{article} {kind.__name__} or None", checks.describe_value(value)
            )
        checks.check_option("Rule", "operands", self.operands, ("weight", "activations"))
        checks.check_flag("Rule", "shared", self.shared)
        self._check_combination()
        self._check_backward()

    def _check_combination(self) -> None:
        if self.keep is not None:
            checks.check_option("Rule", "keep", self.keep, ("float",))
            is_alone = self.weight is None and self.activation is None
            checks.require(is_alone, "Rule", "weight, activation", 'None, because keep="float"', "a spec")
            checks.require(self.output is None, "Rule", "output", 'None, because keep="float"', self.output)
            return
        if self.output is not None:
            self._check_output(self.output)
        if self.operands == "activations":
            is_alone = self.weight is None and self.activation is not None
            expected = 'an activation and no weight, because operands="activations"'
            checks.require(is_alone, "Rule", "weight, activation", expected, f"{self.weight}, {self.activation}")
            return
        expected = 'a Weight, or keep="float", or operands="activations"'
        checks.require(self.weight is not None, "Rule", "weight", expected, "None")

    def _check_backward(self) -> None:
        """Check that the gradient of such codes can be contracted in this way."""
        parts = [self.activation, self.activation if self.operands == "activations" else self.weight]
        specs = [part and QuantSpec(part.dtype, **dict(part.options)) for part in parts]
        check_backward("Rule", self.backward, None, specs)
        if not isinstance(self.backward, Int8Backward):
            return
        expected = "Int8Backward() without stochastic_rounding, because a prepared function has no key for it"
        checks.require(not self.backward.stochastic_rounding, "Rule", "backward", expected, self.backward)
        expected = "FloatBackward() with blocks, whose scales cannot be taken out of the sums of gradients"
        has_blocks = any(part is not None and part.block is not None for part in parts)
        checks.require(not has_blocks, "Rule", "backward", expected, self.backward)

    def _check_output(self, output: Activation) -> None:
        """Check that integer kernels return such codes, for such operands."""
        check_output_spec("Rule", "output", output.make_spec())
        expected = "Static(calibrator), such as Static(jq.calibration.minmax), because a result has a static range"
        checks.require(isinstance(output.range, Static), "Rule", "output.range", expected, output.range)
        expected = 'a Weight without blocks and an Activation with per="tensor", because of the output'
        holds = self.weight is not None and self.weight.block is None
        holds = holds and self.activation is not None and self.activation.has_one_scale
        checks.require(holds, "Rule", "weight, activation", expected, f"{self.weight}, {self.activation}")

    def matches(self, site: SiteView) -> bool:
        """Return whether this rule applies to a contraction."""
        if self.operation is not None and site.operation != self.operation:
            return False
        is_weight = bool(site.paths)
        # A rule that keeps floats needs no operand to quantize, and matches products of activations, too.
        if self.keep is None and is_weight != (self.operands == "weight"):
            return False
        paths = site.paths or (site.name,)
        if not any(matches_pattern(self.path, path) for path in paths):
            return False
        return self.where is None or bool(self.where(site))


def matches_pattern(pattern: str | re.Pattern[str] | None, path: str) -> bool:
    """Return whether a path matches a pattern as of a shell, or a regular expression somewhere; None matches all."""
    if pattern is None:
        return True
    return fnmatch.fnmatchcase(path, pattern) if isinstance(pattern, str) else pattern.search(path) is not None
