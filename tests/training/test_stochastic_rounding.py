"""Rounding by chance: its mean, its draws' independence, and the gradient of the very draw that was made."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.gradient_rules import CASES, SHAPE, check_sum, draw_problem, pull, spec_of
from ..cases.quantized_arrays import GRANULARITIES
from ..oracles import array_text, onnx_text
from ..oracles import gradient_rules_text as rules
from ..oracles.array_text import F32

INT8 = jq.QuantSpec(jnp.int8)
FRACTIONS = [2.0**-20, 2.0**-13, 0.003, 0.1, 0.25, 0.5, 0.75, 0.9, 0.997, 1 - 2.0**-13, 1 - 2.0**-16]


def key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**31)))


def rounded(x: Any, scale: Any, key: Any) -> Any:
    return jq.fake_quantize(x, INT8, scale, gradient=jq.StochasticRounding(key))


@pytest.mark.parametrize("base", [0, -1, 7, -101])
def test_the_mean_is_the_number(fixed_rng: np.random.Generator, base: int) -> None:
    """Within six standard errors, and eight draws, of the chance to go up; every draw is one of the two neighbours."""
    n, scale = 2**17, F32(0.0625)
    u = (base + np.array(FRACTIONS)).astype(F32)
    part = u.astype(np.float64) - np.floor(u.astype(np.float64))
    x = np.repeat((u * scale)[:, None], n, axis=1)
    y = np.asarray(jax.jit(rounded)(x, scale, key(fixed_rng)), np.float64) / scale
    is_up = y - np.floor(u.astype(np.float64))[:, None]
    assert np.isin(is_up, (0, 1)).all()
    tolerance = 6 * np.sqrt(part * (1 - part) / n) + 8 / n
    assert (np.abs(is_up.mean(axis=1) - part) <= tolerance).all(), (is_up.mean(axis=1), part)
    assert (is_up.sum(axis=1)[2:9] % n != 0).all(), "both neighbours come"


@pytest.mark.slow
def test_a_draw_has_more_than_23_bits(fixed_rng: np.random.Generator) -> None:
    """A float32 draw from [0, 1) is 0 once in 2**23 times, and would lift the least positive number as often: 8 times
    in 2**26 draws. It may happen twice; the chance of more is 4e-5."""
    x = jnp.full(2**21, 2.0**-30, jnp.float32)

    @jax.jit
    def lifted(keys: jax.Array) -> jax.Array:
        return jax.lax.map(lambda k: (rounded(x, jnp.float32(1), k) > 0).sum(), keys).sum()

    assert lifted(jax.random.split(key(fixed_rng), 32)) <= 2
    # 1 - 2**-30 is 1 in float32, which a draw is below; to 2**-24 at most, of which 2**21 draws are an eighth.
    fallen = jax.jit(rounded)(-x, jnp.float32(1), key(fixed_rng)) < 0
    assert int(np.asarray(fallen).sum()) <= 3


def test_what_needs_no_rounding_stays() -> None:
    """Codes, the ends of the range, what saturates; NaN is the lowest code."""
    u = np.concatenate([np.arange(-127, 128), [-127.25, 127.5, -3e9, 3e38, np.inf, -np.inf, np.nan]]).astype(F32)
    expected = np.clip(np.where(np.isnan(u), -127, u), -127, 127)
    for seed in range(5):
        actual = jax.jit(rounded)(np.tile(u * F32(0.5), (20, 1)), F32(0.5), jax.random.key(seed))
        np.testing.assert_array_equal(actual, np.tile(expected * 0.5, (20, 1)).astype(F32))


@pytest.mark.slow
def test_keys(fixed_rng: np.random.Generator) -> None:
    """One key repeats, however it is called; two differ; a mapped key is one for each row."""
    x = fixed_rng.uniform(-60, 60, (3, 1000)).astype(F32)
    keys = jax.random.split(key(fixed_rng), 3)
    first = rounded(x, 1.0, keys[0])
    np.testing.assert_array_equal(first, rounded(x, 1.0, keys[0]))
    np.testing.assert_array_equal(first, jax.jit(rounded)(x, jnp.float32(1), keys[0]))
    np.testing.assert_array_equal(first, rounded(x, 1.0, jax.random.wrap_key_data(jax.random.key_data(keys[0]))))
    assert (np.asarray(first) != np.asarray(rounded(x, 1.0, keys[1]))).mean() > 0.2
    rows = jax.vmap(rounded, in_axes=(0, None, 0))(x, jnp.float32(1), keys)
    want = np.stack([np.asarray(rounded(x[i], 1.0, keys[i])) for i in range(3)])
    np.testing.assert_array_equal(rows, want)
    scanned = jax.lax.scan(lambda c, a: (c, rounded(a[0], jnp.float32(1), a[1])), None, (x, keys))[1]
    np.testing.assert_array_equal(scanned, want)
    repeated = jax.vmap(rounded, in_axes=(None, None, 0))(x[0], jnp.float32(1), keys)
    assert (np.asarray(repeated[0]) != np.asarray(repeated[1])).mean() > 0.2


def test_the_rule_is_a_pytree(rng: np.random.Generator) -> None:
    rule = jq.StochasticRounding(key(rng), clip=False)
    leaves, structure = jax.tree.flatten(rule)
    assert leaves == [rule.key]
    assert structure != jax.tree.structure(jq.StochasticRounding(rule.key))
    restored = jax.tree.unflatten(structure, leaves)
    assert (restored.key, restored.clip) == (rule.key, False)
    x = rng.normal(size=50).astype(F32)
    through = jax.jit(lambda x, rule: jq.fake_quantize(x, INT8, 0.25, gradient=rule))
    np.testing.assert_array_equal(through(x, rule), rounded(x, 0.25, rule.key))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.clip = True  # type: ignore[misc]


def test_neighbours_are_independent(fixed_rng: np.random.Generator) -> None:
    """Of numbers half way: correlations of neighbours, rows and keys within six standard errors, and even odds."""
    n = 512
    draws = [
        np.asarray(rounded(np.full((n, n), 0.5, F32), 1.0, k), np.float64) * 2 - 1
        for k in map(key, (fixed_rng, fixed_rng))
    ]
    a, b = draws
    assert abs(a.mean()) <= 6 / n
    for first, second in (
        (a[:, 1:], a[:, :-1]),
        (a[1:], a[:-1]),
        (a[:, 2:], a[:, :-2]),
        (a[n // 2 :], a[: n // 2]),
        (a, b),
    ):
        assert abs((first * second).mean()) <= 6 / np.sqrt(first.size)


OF_DRAWS = ("int8", "uint4", "int8, asymmetric", "uint8, symmetric", "uint2", "uint16")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "clip"), [*((case, True) for case in OF_DRAWS), ("uint4", False)])
def test_the_gradient_is_that_of_the_draw(rng: np.random.Generator, case: str, clip: bool) -> None:
    """At the ends, at ties and beside both; d is read off y, and a checkpoint draws the same again."""
    spec = spec_of(case)

    @functools.partial(jax.jit, static_argnames="is_repeated")
    def find_gradients(x: Any, scale: Any, point: Any, g: Any, k: Any, is_repeated: bool = False) -> Any:
        def call(x: Any, s: Any, z: Any) -> jax.Array:
            return jq.fake_quantize(x, spec, s, z, gradient=jq.StochasticRounding(k, clip))

        y, vjp = jax.vjp(jax.checkpoint(call) if is_repeated else call, x, scale, point)  # type: ignore[arg-type]
        return y, vjp(g)

    for _ in range(3):
        d = draw_problem(rng, case)
        k = key(rng)
        y, (dx, ds, dz) = find_gradients(d.x, d.scale, d.learned, d.g, k)
        steps = np.rint(np.asarray(y, np.float64) / d.steps.scale)  # exactly what was multiplied by the scale
        np.testing.assert_array_equal(y, (steps.astype(F32) * d.steps.scale.astype(F32)).astype(F32))
        ends = (d.steps.low, d.steps.high)
        below, above = np.clip(np.floor(d.steps.u), *ends), np.clip(np.ceil(d.steps.u), *ends)
        assert ((steps == below) | (steps == above)).all()
        p = dataclasses.replace(d.steps, d=steps)
        want = rules.stochastic_rounding(p, d.g.astype(np.float64), clip)
        np.testing.assert_array_equal(dx, want[0].astype(F32))
        check_sum(ds, want[1], d.each, d.scale)
        if d.learned is not None:
            check_sum(dz, want[2], d.each, d.learned)
        y_again, (dx_again, ds_again, _) = find_gradients(d.x, d.scale, d.learned, d.g, k, is_repeated=True)
        np.testing.assert_array_equal(y_again, y)
        np.testing.assert_array_equal(dx_again, dx)
        check_sum(ds_again, want[1], d.each, d.scale)
    whole = pull(spec, jq.StochasticRounding(k, clip), d.x, d.scale, d.point, d.g)
    np.testing.assert_array_equal(whole[0], y)
    np.testing.assert_array_equal(whole[1][0], dx)


@pytest.mark.slow
def test_a_range_that_is_found(fixed_rng: np.random.Generator) -> None:
    """Without a scale, the range of x is used, and its extremes stay where they are."""
    x = fixed_rng.normal(size=SHAPE).astype(F32)
    for case in ("uint4", "int8"):
        spec = spec_of(case)
        q = jq.quantize(x, spec)
        y = jax.jit(lambda x, k, spec=spec: jq.fake_quantize(x, spec, gradient=jq.StochasticRounding(k)))(
            x, key(fixed_rng)
        )
        sizes = array_text.sizes(SHAPE, GRANULARITIES[CASES[case][1]][1])
        wide = array_text.spread(np.asarray(q.scale), sizes, SHAPE)
        assert (np.abs(np.asarray(y) - x) < wide * (1 + 1e-5)).all()
        assert (np.asarray(y) != np.asarray(q.dequantize())).any()


@pytest.mark.slow
def test_halves_are_rounded_in_float32(rng: np.random.Generator) -> None:
    x = rng.uniform(-30, 30, 4000).astype(onnx_text.dtype("bfloat16"))
    k = key(rng)
    y = rounded(x, jnp.bfloat16(0.5), k)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, np.asarray(rounded(x.astype(F32), 0.5, k)).astype(x.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_specs_without_equal_steps_are_refused(case: str) -> None:
    assert case in CASES
    rule = jq.StochasticRounding(jax.random.key(0))
    text = r"jaxquant\.fake_quantize: gradient: expected .*" + case
    for call in (jq.fake_quantize, jax.jit(jq.fake_quantize, static_argnums=1)):
        with pytest.raises(TypeError, match=text):
            call(jnp.ones(3), spec_of(case), 0.5, gradient=rule)
