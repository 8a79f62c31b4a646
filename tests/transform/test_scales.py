"""The scales of all static ranges of a prepared function, which are found together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jaxquant as jq
from jaxquant.transform._scales import find_scales

from ..support.contraction_crawler import count_primitive
from ..support.equality import same_bits

TINY = np.finfo(np.float32).tiny
ENDS = np.array(
    [[-1, 1], [0, 0], [0.1, 3], [-7, -0.5], [-TINY / 2, TINY / 4], [-3e38, 3e38], [-np.inf, 1], [np.nan, 1], [0, 0.1]],
    np.float32,
)
X = np.ones((2, 4), np.float32)


def multiply_all(params: Sequence[Any], x: Any) -> Any:
    """Contract x with each parameter."""
    for w in params:
        x = x @ w
    return x


def prepare_products(count: int, **options: Any) -> tuple[Any, Any, Any]:
    """Return a prepared function with that many static ranges, its converted parameters, and its ranges."""
    params = [np.eye(4, dtype=np.float32)] * count
    rule = jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation(range=jq.minmax, **options))
    prepared = jq.prepare(multiply_all, params, X, rules=[rule])
    return prepared, prepared.convert(params), prepared.calibrate(params, [X], progress=False)


@pytest.mark.parametrize("options", [{"dtype": "uint8"}, {"dtype": "int8", "options": {"symmetric": True}}], ids=str)
def test_scales_equal_those_of_each_range_alone(options: dict[str, Any]) -> None:
    prepared, _, ranges = prepare_products(len(ENDS), **options)
    names = list(ranges)
    records: Any = {name: {"0": tuple(ends)} for name, ends in zip(names, ENDS, strict=True)}
    found = jax.jit(lambda records: find_scales(prepared.static_ranges, records))(records)
    spec = prepared.static_ranges[names[0]][0].operand.spec
    quantize = jax.jit(lambda lo, hi: jq.quantize(X, spec, lo=lo, hi=hi))
    for name, ends in zip(names, ENDS, strict=True):
        alone, (scale, zero_point) = quantize(*ends), found[name]["0"].spread(2)
        same_bits(scale, alone.scale)
        assert (zero_point is None) == (alone.zero_point is None)
        if zero_point is not None:
            same_bits(zero_point, alone.zero_point)


def test_the_program_finds_all_scales_with_the_same_operations() -> None:
    """Each range adds the division of its activation and none for its scale and its zero point."""
    divisions = []
    for count in (1, 2, 6):
        prepared, codes, ranges = prepare_products(count, dtype="uint8")
        divisions.append(count_primitive("div", prepared.apply, codes, ranges, X))
    alone = count_primitive("div", lambda x: jq.quantize_linear(x, 0.5, np.uint8(3)), X)
    assert divisions[1] - divisions[0] == alone
    assert divisions[2] - divisions[0] == 5 * alone
