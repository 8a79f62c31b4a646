"""Ready rules for common quantizations. Each function returns a tuple of rules, to pass on or to put others before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._arrays.scale_rules import ScaleRule
from .._arrays.spec import Codebook, QuantSpec
from .._core import checks
from .._training.range_sources import Dynamic, Static
from ..calibration.calibrator import Factory
from ..calibration.running import minmax
from ..checkpoint.formats.gguf_blocks import IQ4_NL
from .rules import Activation, Rule, Weight

__all__ = [
    "fp8_dynamic", "gguf", "gptq", "mxfp4", "mxfp8", "nvfp4", "onednn", "onnx_runtime", "w4a8", "w8a8_dynamic",
    "w8a8_static", "weight_only_fp8", "weight_only_int4", "weight_only_int8",
]  # fmt: skip


if not TYPE_CHECKING:  # type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """Name the recipes in the error for any other name."""
        raise AttributeError(f"jaxquant.recipes: expected one of {', '.join(__all__)}, got {name!r}", name=name)


def weight_only_int8() -> tuple[Rule, ...]:
    """Return rules for int8 weights, one scale for each output feature, with activations in floats."""
    return (Rule(weight=Weight("int8")),)


def weight_only_int4(block: int = 16) -> tuple[Rule, ...]:
    """Return rules for int4 weights with a scale and a zero point for each block of inputs, and activations in floats.

    A zero point lets the 16 codes of a block end at its least and its largest weight. Without one the codes have to be
    as far from 0 on both sides, and one of the 16 stays unused. A zero point takes 4 bits for each block, or 8 if the
    array is packed (`QuantizedArray.pack`), and a scale, a float16, takes 16: with blocks of 16 a weight takes 5.25 or
    5.5 bits, and with blocks of 32 it takes 4.63 or 4.75. Scales of float16 are exact enough for weights between
    1e-5 and 1e5; for others take the rules of this recipe with `"scale_dtype": "float32"`.

    Convolutions and lookups have int8 weights: their inputs are too few for blocks, and their weights are small. So
    have tables that are looked up and also multiply the output.

    Args:
        block: the number of inputs that share a scale. A language model lost 1.7 times as much with 32 as with 16, and
            took as long (docs/language-model.md).
    """
    weight = Weight("int4", block=block, options={"symmetric": False, "scale_dtype": "float16"})
    return (
        Rule(operation="dot_general", weight=weight),
        Rule(operation="ragged_dot", weight=weight),
        Rule(weight=Weight("int8")),
    )


def gptq(bits: int = 4, block: int = 128, *, symmetric: bool = True) -> tuple[Rule, ...]:
    """Return rules for weights that GPTQ's and, with 4 bits, AWQ's files hold, with activations in floats.

    They are unsigned, with a float16 scale and a zero point for each block of inputs. The rules choose them by round to
    nearest; `jq.ptq.GPTQ` finds better ones in the same form. `jq.checkpoint.save` writes them. Convolutions and
    lookups stay in floats.

    Args:
        bits: the bits of a code: 2, 3, 4 or 8.
        block: the number of inputs that share a scale.
        symmetric: True for zero points of 2**(bits - 1).
    """
    checks.require(bits in (2, 3, 4, 8), "recipes.gptq", "bits", "2, 3, 4 or 8", bits)
    options = {"symmetric": symmetric, "scale_dtype": "float16"}
    weight = Weight(f"uint{bits}", block=block, options=options)
    return (Rule(operation="dot_general", weight=weight), Rule(keep="float"))


def weight_only_fp8() -> tuple[Rule, ...]:
    """Return rules for float8_e4m3fn weights, one scale for each output feature, with activations in floats.

    float8 has 3 binary digits where int8 has 7, but a range of 18 binary orders of magnitude: choose it for weights
    with outliers, and for runtimes that hold checkpoints in float8.
    """
    return (Rule(weight=Weight("float8_e4m3fn")),)


def fp8_dynamic(*, per: str = "row") -> tuple[Rule, ...]:
    """Return rules for products of float8_e4m3fn weights and activations, with a range that each call finds.

    Weights have one scale for each output feature. Convolutions and lookups have float8 weights and float activations.

    Args:
        per: "row" for a scale for each token, or "tensor" for one for all.
    """
    weight = Weight("float8_e4m3fn")
    return (
        Rule(operation="dot_general", weight=weight, activation=Activation("float8_e4m3fn", per=per)),
        Rule(weight=weight),
    )


def mxfp8(*, scale_rule: ScaleRule = "rceil") -> tuple[Rule, ...]:
    """Return rules for MXFP8: weights and activations of float8_e4m3fn in blocks of 32 inputs.

    The scale of a block is a power of two.

    Convolutions and lookups, whose weights have no blocks, have float8 weights and float activations.

    Args:
        scale_rule: how the powers are chosen, as in `QuantSpec`. "floor" is the rule of the OCP specification.

    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """
    return _make_mx("float8_e4m3fn", {"scale_dtype": "float8_e8m0fnu", "scale_rule": scale_rule})


def mxfp4(*, scale_rule: ScaleRule = "rceil", activations: str | None = None) -> tuple[Rule, ...]:
    """Return rules for MXFP4 weights: float4_e2m1fn in blocks of 32 inputs, each with a power of two as its scale.

    Convolutions and lookups, whose weights have no blocks, have float8_e4m3fn weights.

    Args:
        scale_rule: how the powers are chosen, as in `QuantSpec`. "floor" is the rule of the OCP specification.
        activations: None for floats, "float8_e4m3fn" for MXFP8 or "float4_e2m1fn" for MXFP4 activations.

    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """
    options = {"scale_dtype": "float8_e8m0fnu", "scale_rule": scale_rule}
    return _make_mx("float4_e2m1fn", options, activations)


def w8a8_dynamic(*, reduce_range: bool = False) -> tuple[Rule, ...]:
    """Return rules for int8 weights and uint8 activations with a range that each call finds.

    Each row of a matrix product and each image of a convolution has its own scale and zero point, so the result for one
    example does not depend on the others of its batch. Unsigned codes follow the range of values that are not centered
    at 0, such as those after a relu or a gelu, where signed codes would leave up to half of their range unused. Lookups
    have int8 tables.

    Args:
        reduce_range: whether the weights of products have 7 bits, so that an exported model gives the same integers in
            ONNX Runtime on every processor. JAX's own integers are the same everywhere without it.
    """
    weight = _make_weight(reduce_range)
    return (
        Rule(operation="conv_general_dilated", weight=weight, activation=Activation("uint8", per="image")),
        Rule(operation="take", weight=Weight("int8")),
        # Operations without a form on codes match, too, so that strict=True lists them.
        Rule(weight=weight, activation=Activation("uint8", per="row")),
    )


def w8a8_static(calibrator: Factory = minmax, *, reduce_range: bool = False) -> tuple[Rule, ...]:
    """Return rules for int8 weights and uint8 activations with a range that calibration finds.

    Args:
        calibrator: a function from a spec to a calibrator.
        reduce_range: as in `w8a8_dynamic`.
    """
    return (
        Rule(operation="take", weight=Weight("int8")),
        Rule(weight=_make_weight(reduce_range), activation=Activation("uint8", range=Static(calibrator))),
    )


def w4a8() -> tuple[Rule, ...]:
    """Return rules for int4 weights, one scale for each output feature, and uint8 activations with dynamic ranges.

    Lookups have int8 tables, also if a table multiplies the output, too.
    """
    return (
        Rule(operation="conv_general_dilated", weight=Weight("int4"), activation=Activation("uint8", per="image")),
        Rule(operation="take", weight=Weight("int8")),
        # Operations without a form on codes match, too, so that strict=True lists them.
        Rule(weight=Weight("int4"), activation=Activation("uint8", per="row")),
    )


def onednn(*, reduce_range: bool = False) -> tuple[Rule, ...]:
    """Return rules for what oneDNN's integer kernels take: int8 weights per output, uint8 activations per tensor.

    Args:
        reduce_range: as in `w8a8_dynamic`. oneDNN's guide, "Nuances of int8 computations", recommends it for x86-64
            processors without VNNI.
    """
    return (
        Rule(operation="take", keep="float"),
        Rule(weight=_make_weight(reduce_range), activation=Activation("uint8", range=Static(minmax))),
    )


def onnx_runtime(calibrator: Factory = minmax, *, reduce_range: bool = True) -> tuple[Rule, ...]:
    """Return rules for integer-only networks, as ONNX Runtime runs them: int8 weights per output, uint8 results.

    The weights have 7 bits, -64 to 64, because ONNX Runtime's sums of uint8 by int8 products saturate on x86-64
    processors without VNNI, where weights of 8 bits would give other integers than on all other processors.

    Biases are int32, and what is between two contractions runs on codes where the program allows it: relu and clip,
    sums, products and concatenations of results, maxima and means, reshapes, transposes, slices and pads. A batch
    normalization after a contraction becomes part of its weights. Lookups stay in floats.

    Args:
        calibrator: a function from a spec to a calibrator, for the inputs and for all results.
        reduce_range: False for weights of 8 bits, with steps half as wide. Choose it if the exported model runs
            only on processors with exact sums, or in a session of `jaxquant.onnx.make_session`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> def apply(params, x):
        ...     x = jax.nn.relu(x @ params["first"] + params["bias"])
        ...     return (x + jax.nn.relu(x @ params["second"])) @ params["last"]
        >>> params = {"first": jnp.eye(4), "bias": jnp.ones((1, 4)), "second": jnp.eye(4), "last": jnp.ones((4, 2))}
        >>> x = jnp.array([[-2.0, 0.5, 1.0, 2.5]])
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.onnx_runtime())
        >>> prepared.coverage.outputs
        '3 of 3 contractions give codes; in codes: add'
        >>> ranges = prepared.calibrate(params, [x])
        >>> prepared.apply(prepared.convert(params, ranges), x).round(1)
        Array([[14., 14.]], dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 2; ONNX Runtime's QLinearConv, QGemm and QLinearAdd.
    """
    activation = Activation("uint8", range=Static(calibrator))
    return (
        Rule(operation="take", keep="float"),
        Rule(weight=_make_weight(reduce_range), activation=activation, output=activation),
    )


def nvfp4(
    *, scale_rule: ScaleRule = "modelopt", activations: str | None = None, calibrator: Factory | None = None
) -> tuple[Rule, ...]:
    """Return rules for NVFP4 weights: float4_e2m1fn in blocks of 16 inputs, and for such activations.

    The scale of a block is float8_e4m3fn, times one float32 for the whole array. Convolutions and lookups, whose
    weights have no blocks, have float8_e4m3fn weights and float activations.

    Args:
        scale_rule: in which order the scales are rounded, as in `QuantSpec`: "modelopt" or "compressed_tensors".
        activations: None for floats, or "float4_e2m1fn" for NVFP4 activations.
        calibrator: a function from a spec to a calibrator, such as `jaxquant.calibration.minmax`, for a float32 scale
            of the activations that calibration finds, as in the checkpoints of ModelOpt. None finds it in each call, in
            all tokens of the call. The scales of the blocks are always found in each call.

    Raises:
        ValueError: there is a calibrator without activations, or activations has another value.

    Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025; ModelOpt's
    `NVFP4_DEFAULT_CFG`.
    """
    options = {"scale_spec": QuantSpec("float8_e4m3fn"), "scale_rule": scale_rule}
    activation = None
    if activations is not None:
        checks.check_option("recipes.nvfp4", "activations", activations, ("float4_e2m1fn",))
        source = Dynamic() if calibrator is None else Static(calibrator)
        activation = Activation("float4_e2m1fn", block=16, range=source, options=options)
    expected = "None without activations, which alone have a range"
    checks.require(activation is not None or calibrator is None, "recipes.nvfp4", "calibrator", expected, calibrator)
    weight = Weight("float4_e2m1fn", block=16, options=options)
    return (
        Rule(operation="dot_general", weight=weight, activation=activation),
        Rule(weight=Weight("float8_e4m3fn")),
    )


def _make_k_type(dtype: str | Codebook, block: int, scales: str, scale_block: int, *, offset: bool = False) -> Weight:
    """Return the weights of a type of GGUF with scales that have a scale for each 256 inputs."""
    options = {"offset": offset, "scale_spec": QuantSpec(scales, scale_dtype="float16")}
    return Weight(dtype, block=block, options=options, scale_block=scale_block)


_HALF = {"scale_dtype": "float16"}
_GGUF: dict[str, Weight] = {
    "Q4_0": Weight("int4", block=32, options={**_HALF, "narrow_range": False}),
    "Q4_1": Weight("uint4", block=32, options={**_HALF, "offset": True}),
    "Q5_0": Weight("int5", block=32, options={**_HALF, "narrow_range": False}),
    "Q5_1": Weight("uint5", block=32, options={**_HALF, "offset": True}),
    "Q8_0": Weight("int8", block=32, options=_HALF),
    "Q2_K": _make_k_type("uint2", 16, "uint4", 16, offset=True),
    "Q3_K": _make_k_type("int3", 16, "int6", 16),
    "Q4_K": _make_k_type("uint4", 32, "uint6", 8, offset=True),
    "Q5_K": _make_k_type("uint5", 32, "uint6", 8, offset=True),
    "Q6_K": _make_k_type("int6", 16, "int8", 16),
    "IQ4_NL": Weight(IQ4_NL, block=32, options=_HALF),
    "IQ4_XS": _make_k_type(IQ4_NL, 32, "int6", 8),
    "MXFP4": Weight(
        "float4_e2m1fn",
        block=32,
        options={"scale_dtype": "float8_e8m0fnu", "scale_rule": "floor", "ties": "toward_zero"},
    ),
}


def gguf(type: str = "Q4_0") -> tuple[Rule, ...]:
    """Return rules for weights that a type of GGUF holds, in blocks of 16 or 32 inputs, with activations in floats.

    `jq.ptq.apply` finds codes for them, and `jq.checkpoint.save` writes them, transposed where a model has
    (inputs, outputs), because GGUF has blocks along the last axis. Convolutions and lookups stay in floats. Where the
    inputs are no multiple of 32, or of 256 with a K-type or IQ4_XS, the last block is shorter, and `save` refuses it:
    put a rule with keep="float" before.

    Args:
        type: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL" or "MXFP4"; or "Q2_K", "Q3_K", "Q4_K", "Q5_K",
            "Q6_K" or "IQ4_XS", whose scales, and offsets, are integers with a float16 for each 256 inputs.

    Source: the package gguf, quants.py.
    """
    checks.check_option("recipes.gguf", "type", type, tuple(_GGUF))
    weight = _GGUF[type]
    return (
        Rule(operation="dot_general", weight=weight),
        Rule(operation="ragged_dot", weight=weight),
        Rule(keep="float"),
    )


def _make_mx(dtype: str, options: dict[str, str], activations: str | None = "float8_e4m3fn") -> tuple[Rule, ...]:
    """Return rules for products in blocks of 32 inputs, and for float8 weights of all other contractions."""
    activation = None if activations is None else Activation(activations, block=32, options=options)
    return (
        Rule(operation="dot_general", weight=Weight(dtype, block=32, options=options), activation=activation),
        Rule(weight=Weight("float8_e4m3fn")),
    )


def _make_weight(reduce_range: bool) -> Weight:
    """Return int8 weights with one scale for each output feature, of 7 bits if `reduce_range`."""
    return Weight("int8", options={"reduce_range": True} if reduce_range else {})
