"""QuantSpec and the granularities: defaults, equality, what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import onnx_text

S = jq.QuantSpec
P: Any = functools.partial  # untyped: the rows are wrong on purpose


@pytest.mark.parametrize("name", [*onnx_text.BOUNDS, *onnx_text.FLOAT8, "float4_e2m1fn"])
def test_defaults(name: str) -> None:
    """Symmetric unless unsigned, and then without the lowest code; a float has no zero point and no lowest code."""
    spec = S(onnx_text.dtype(name))
    low, high = onnx_text.BOUNDS.get(name, (0, 0))
    is_float = name not in onnx_text.BOUNDS
    assert spec.symmetric == (is_float or low < 0)
    assert spec.narrow_range == (not is_float and low < 0)
    assert spec.carrier == onnx_text.dtype(name)
    assert spec.codebook is None
    assert spec.scale_dtype == jnp.float32
    assert not spec.power_of_two
    assert spec.zero_point_granularity == spec.granularity == jq.PerTensor()
    largest = float(ml_dtypes.finfo(onnx_text.dtype(name)).max) if is_float else 0
    assert spec.bounds == ((-largest, largest) if is_float else (low + (low < 0), high))
    assert spec.fixed_zero_point == (0 if spec.symmetric else None)


def test_the_fixed_zero_point_is_the_middle_code() -> None:
    for name, middle in (("uint8", 128), ("uint4", 8), ("uint2", 2), ("uint16", 32768)):
        spec = S(onnx_text.dtype(name), symmetric=True)
        assert spec.fixed_zero_point == middle
        assert spec.bounds == (1, 2 * middle - 1)
        assert S(onnx_text.dtype(name), symmetric=True, narrow_range=False).bounds == (0, 2 * middle - 1)
    assert S("int8", symmetric=False).bounds == (-128, 127)
    assert S("int8", symmetric=False).fixed_zero_point is None


def test_equal_however_they_were_written() -> None:
    first = S("int8", jq.PerAxis((1,)), symmetric=True, narrow_range=1, power_of_two=0)  # type: ignore[arg-type]
    second = S(np.int8, jq.PerAxis(1), scale_dtype="float32", zero_point_granularity=jq.PerAxis(1))
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, S(jnp.int8, jq.PerAxis([1]))}) == 1  # type: ignore[arg-type]
    assert S("int8", scale_dtype=jnp.float8_e8m0fnu) == S("int8", scale_dtype=jnp.float8_e8m0fnu, power_of_two=True)
    assert S("int8", jq.PerAxis(0)) != S("int8", jq.PerAxis(1))
    assert S(jq.nf4) == S(jq.nf4, jq.PerTensor())
    assert S(jq.nf4) != S("uint4")
    for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), dataclasses.replace(first)):
        assert copied == first
        assert hash(copied) == hash(first)


def test_a_spec_is_static_and_immutable() -> None:
    compiled = jax.jit(lambda x, spec: jq.quantize(x, spec).codes, static_argnames="spec")
    x = jnp.array([1.0, -2.0])
    np.testing.assert_array_equal(compiled(x, spec=S("int8")), [64, -127])
    np.testing.assert_array_equal(compiled(x, spec=S("uint8")), [255, 0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        S("int8").symmetric = False  # type: ignore[misc]


def test_repr_says_what_was_chosen() -> None:
    assert repr(S("uint8")) == (
        "QuantSpec(uint8, PerTensor(), symmetric=False, narrow_range=False, scale_dtype=float32)"
    )
    mixed = S("uint8", jq.PerAxis(0), power_of_two=True, zero_point_granularity=jq.PerTensor())
    assert repr(mixed).endswith("power_of_two=True, zero_point_granularity=PerTensor())")
    assert repr(S(jq.nf4, jq.Blocked(-1, 64))).startswith("QuantSpec(nf4, Blocked(axis=-1, size=64), symmetric=True")


# name, call, exception, function, argument, what was wanted, what came
ROWS: list[tuple[str, Any, type[Exception], str, str, str, str]] = [
    ("dtype float32", P(S, "float32"), TypeError, "QuantSpec", "dtype", "dtype int2", "float32"),
    ("dtype int32", P(S, jnp.int32), TypeError, "QuantSpec", "dtype", "dtype int2", "int32"),
    ("dtype None", P(S, None), TypeError, "QuantSpec", "dtype", "dtype int2", "None"),
    ("dtype nonsense", P(S, "nf4"), TypeError, "QuantSpec", "dtype", "dtype int2", "'nf4'"),
    ("dtype float6", P(S, ml_dtypes.float6_e2m3fn), TypeError, "QuantSpec", "dtype",
     "float6 is in ONNX 28", "float6_e2m3fn"),
    ("granularity int", P(S, "int8", 0), TypeError, "QuantSpec", "granularity",
     r"PerTensor\(\), PerToken\(\), ", r"0 \(int\)"),
    ("granularity class", P(S, "int8", jq.PerTensor), TypeError, "QuantSpec", "granularity", "PerTensor", "PerTensor"),
    ("granularity None", P(S, "int8", None), TypeError, "QuantSpec", "granularity", "PerTensor", "None"),
    ("points", P(S, "uint8", zero_point_granularity=1), TypeError, "QuantSpec",
     "zero_point_granularity", "PerTensor", "1"),
    ("points of symmetric", P(S, "int8", zero_point_granularity=jq.PerAxis(0)), ValueError, "QuantSpec",
     "zero_point_granularity", "a symmetric zero point is the same everywhere", "PerAxis"),
    ("symmetric text", P(S, "int8", symmetric="yes"), TypeError, "QuantSpec", "symmetric", "True or False", "'yes'"),
    ("symmetric 2", P(S, "int8", symmetric=2), TypeError, "QuantSpec", "symmetric", "True or False", "2"),
    ("narrow text", P(S, "int8", narrow_range="no"), TypeError, "QuantSpec", "narrow_range", "True or False", "'no'"),
    ("power text", P(S, "int8", power_of_two=None), TypeError, "QuantSpec", "power_of_two", "True or False", "None"),
    ("float asymmetric", P(S, "float8_e5m2", symmetric=False), ValueError, "QuantSpec", "symmetric",
     "True, because float8_e5m2 has no zero point", "False"),
    ("book asymmetric", P(S, jq.nf4, symmetric=False), ValueError, "QuantSpec",
     "symmetric", "nf4 has no zero point", "False"),
    ("float narrow", P(S, "float4_e2m1fn", narrow_range=True), ValueError, "QuantSpec", "narrow_range",
     "False, because float4_e2m1fn has no lowest code", "True"),
    ("scale float64", P(S, "int8", scale_dtype="float64"), TypeError, "QuantSpec",
     "scale_dtype", "dtype float32", "float64"),
    ("scale int8", P(S, "int8", scale_dtype=jnp.int8), TypeError, "QuantSpec", "scale_dtype", "float8_e8m0fnu", "int8"),
    ("axis float", P(jq.PerAxis, 1.0), TypeError, "PerAxis", "axis", "an int", "1.0"),
    ("axis bool", P(jq.PerAxis, True), TypeError, "PerAxis", "axis", "an int", "True"),
    ("axis None", P(jq.PerAxis, None), TypeError, "PerAxis", "axis", "an int", "None"),
    ("axis text", P(jq.PerAxis, ("a",)), TypeError, "PerAxis", "axis", "an int", "'a'"),
    ("axes none", P(jq.PerAxis, ()), ValueError, "PerAxis", "axis", "one or more distinct ints", r"\(\)"),
    ("axes twice", P(jq.PerAxis, (0, 0)), ValueError, "PerAxis", "axis", "one or more distinct ints", r"\(0, 0\)"),
    ("blocked axis", P(jq.Blocked, 1.5, 4), TypeError, "Blocked", "axis", "an int", "1.5"),
    ("size 0", P(jq.Blocked, 0, 0), ValueError, "Blocked", "size", "a positive int", "0"),
    ("size negative", P(jq.Blocked, 0, -4), ValueError, "Blocked", "size", "a positive int", "-4"),
    ("size float", P(jq.Blocked, 0, 4.0), TypeError, "Blocked", "size", "an int", "4.0"),
    ("size bool", P(jq.Blocked, 0, True), TypeError, "Blocked", "size", "an int", "True"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace(" ", "_") for row in ROWS])
def test_refusals(row: tuple[str, Any, type[Exception], str, str, str, str]) -> None:
    _, call, error, function, argument, expected, actual = row
    text = rf"jaxquant\.({function}): {argument}: expected .*{expected}.*, got .*{actual}"
    with pytest.raises(error, match=text) as raised:
        call()
    assert isinstance(raised.value, AssertionError), "chex's readers look for AssertionError"
