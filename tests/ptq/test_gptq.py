"""GPTQ against the paper's algorithm in float64, and what it does with layouts, transforms and bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

from ..oracles import ptq_text
from ..support.equality import check_equal

F32 = np.float32
# A value closer to a tie than this, in steps, may have another code in float32.
NOISE = 1e-3
LAYOUTS = {
    "dense": ((24, 16), -1, 1),
    "transposed": ((16, 24), 0, 1),
    "experts": ((4, 12, 8), (0, 2), 4),
    "convolution": ((3, 3, 2, 8), -1, 1),
    "grouped convolution": ((3, 3, 2, 8), -1, 4),
    "depthwise": ((3, 3, 1, 8), -1, 8),
}


def sample_inputs(rng: np.random.Generator, groups: int, inputs: int) -> np.ndarray:
    """Return correlated inputs of different sizes: [samples, groups, inputs]."""
    mixing = rng.normal(size=(groups, inputs, inputs)) * np.exp(rng.normal(size=(groups, 1, inputs)))
    return np.einsum("sgi,gij->sgj", rng.normal(size=(3 * inputs, groups, inputs)), mixing).astype(F32)


def make_problem(rng: np.random.Generator, layout: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return a weight, its second moments and the axes that it keeps."""
    shape, axis, groups = LAYOUTS[layout]
    kept = {entry % len(shape) for entry in (axis if isinstance(axis, tuple) else (axis,))}
    inputs = int(np.prod([n for place, n in enumerate(shape) if place not in kept]))
    x = sample_inputs(rng, groups, inputs)
    second = np.einsum("sgi,sgj->gij", x, x) / F32(len(x))
    return rng.normal(size=shape).astype(F32), second if groups > 1 else second[0], axis


def list_rows(x: np.ndarray, layout: str) -> np.ndarray:
    """Return an array of the weight's shape as [groups, outputs, inputs]."""
    shape, axis, groups = LAYOUTS[layout]
    kept = [entry % len(shape) for entry in (axis if isinstance(axis, tuple) else (axis,))]
    summed = [place for place in range(len(shape)) if place not in kept]
    inputs = int(np.prod([shape[place] for place in summed]))
    return np.transpose(x, (*kept, *summed)).reshape(groups, -1, inputs)


def check_against_oracle(q: Any, w: np.ndarray, hessian: np.ndarray, layout: str, spec: Any, order: bool) -> None:
    """Check codes where the oracle is sure of them, and that the objective is not above the oracle's.

    It must not be more than a tenth above that of round-to-nearest on the same grid, either.
    """
    scale, point = (
        np.asarray(jnp.broadcast_to(repeat_blocks(x, w.shape), w.shape), np.float64)
        for x in (q.scale, jnp.zeros(q.scale.shape) if q.zero_point is None else q.zero_point)
    )
    rows, scales, points, codes = (list_rows(np.asarray(x, np.float64), layout) for x in (w, scale, point, q.codes))
    nearest = ptq_text.round_values(rows, scales, points, spec.bounds)[1]
    totals = np.zeros(3)
    for group, second in enumerate(hessian if hessian.ndim == 3 else hessian[None]):
        expected = ptq_text.gptq(rows[group], second, scales[group], points[group], spec.bounds, activation_order=order)
        # An output agrees until its first uncertain value; a different code there moves a different error.
        is_sure = (expected.margin > NOISE).all(1)
        np.testing.assert_array_equal(codes[group][is_sure], expected.codes[is_sure])
        # At a tie that float32 cannot tell, the two codes lead to different sums of later errors.
        is_close = (expected.margin > 1e-5).all(1)
        values = [(each - points[group]) * scales[group] for each in (codes[group], expected.codes)]
        for place, each in enumerate((*values, nearest[group])):
            totals[place] += ptq_text.find_objective((rows[group] - each)[is_close], second)
    assert totals[0] <= totals[1] * (1 + 1e-3)
    # GPTQ never reconsiders a code, so for a few small layers it is a little worse.
    assert totals[0] < 1.1 * totals[2]


def repeat_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a scale with an entry for each index of the axes that have blocks."""
    for axis, (entries, length) in enumerate(zip(x.shape, shape, strict=True)):
        if 1 < entries < length:
            x = jnp.repeat(x, -(-length // entries), axis)
    return x


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_codes_are_those_of_the_paper(rng: np.random.Generator, layout: str) -> None:
    w, hessian, axis = make_problem(rng, layout)
    outputs = tuple(entry % w.ndim for entry in (axis if isinstance(axis, tuple) else (axis,)))
    spec = jq.QuantSpec("int4", jq.PerAxis(outputs))
    for order in (False, True):
        q = ptq.gptq(w, hessian, spec, axis=axis, activation_order=order)
        check_equal(q.scale, jq.quantize(w, spec).scale)
        check_against_oracle(q, w, hessian, layout, spec, order)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "spec",
    [
        jq.QuantSpec("int2", jq.PerTensor()), jq.QuantSpec("uint4", jq.Blocked(0, 8)), jq.QuantSpec("int8"),
        jq.QuantSpec("uint4", jq.PerAxis(1)), jq.QuantSpec("int4", jq.PerAxis(0), scale_dtype="float8_e8m0fnu"),
    ],
    ids=str,
)  # fmt: skip
def test_granularities(rng: np.random.Generator, spec: Any) -> None:
    w, hessian, _ = make_problem(rng, "dense")
    q = ptq.gptq(w, hessian, spec)
    check_equal(q.scale.astype(F32), jq.quantize(w, spec).scale.astype(F32))
    assert q.codes.dtype == spec.dtype
    check_against_oracle(q, w, hessian, "dense", spec, order=True)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jq.nf4, "float8_e4m3fn", "float4_e2m1fn"], ids=str)
def test_codebooks_and_floats_beat_round_to_nearest(rng: np.random.Generator, dtype: Any) -> None:
    w, hessian, _ = make_problem(rng, "dense")
    spec = jq.QuantSpec(dtype, jq.PerAxis(1))
    q, report = ptq.gptq(w, hessian, spec, diagnostics=True)
    for array, error in ((q, report.error), (jq.quantize(w, spec), report.nearest_error)):
        expected = ptq_text.find_objective((w - np.asarray(array.dequantize())).T, hessian)
        np.testing.assert_allclose(float(error[0]), expected, rtol=1e-3)
    assert float(report.error[0]) < float(report.nearest_error[0])


@pytest.mark.slow
def test_identity_rounds_to_nearest(rng: np.random.Generator) -> None:
    """Inputs that are not correlated cannot make up for each other's errors, whatever the block in which they are."""
    w = rng.normal(size=(150, 3)).astype(F32)
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    check_equal(ptq.gptq(w, np.diag(rng.uniform(1, 2, 150).astype(F32)), spec).codes, jq.quantize(w, spec).codes)


@pytest.mark.slow
def test_many_blocks(rng: np.random.Generator) -> None:
    """More inputs than a block has, and a number of them that no block divides."""
    w, x = rng.normal(size=(150, 8)).astype(F32), sample_inputs(rng, 1, 150)[:, 0]
    hessian, spec = x.T @ x / F32(len(x)), jq.QuantSpec("int4", jq.PerAxis(1))
    q = ptq.gptq(w, hessian, spec, activation_order=False)
    expected = ptq_text.gptq(w.T, hessian, np.asarray(q.scale).T, np.zeros((8, 1)), spec.bounds)
    is_sure = (expected.margin > NOISE).all(1)
    np.testing.assert_array_equal(np.asarray(q.codes, int).T[is_sure], expected.codes[is_sure])
    objectives = [
        ptq_text.find_objective(w.T - codes * np.asarray(q.scale, np.float64).T, hessian)
        for codes in (np.asarray(q.codes, np.float64).T, expected.codes)
    ]
    assert objectives[0] <= objectives[1] * (1 + 1e-3)


@pytest.mark.slow
def test_transforms_and_stored_order(rng: np.random.Generator) -> None:
    problems = [make_problem(rng, "dense")[:2] for _ in range(3)]
    ws, hessians = (jnp.stack(parts) for parts in zip(*problems, strict=True))
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    mapped = jax.jit(jax.vmap(lambda w, h: ptq.gptq(w, h, spec, stored_last=0)))(ws, hessians)
    scanned = jax.lax.scan(lambda _, x: (None, ptq.gptq(*x, spec)), None, (ws, hessians))[1]
    assert mapped.stored_codes.shape == (3, 16, 24)
    for place in range(3):
        single = ptq.gptq(ws[place], hessians[place], spec)
        check_equal(jax.tree.map(lambda x, at=place: x[at], scanned).codes, single.codes)
        check_equal(jax.tree.map(lambda x, at=place: x[at], mapped).codes, single.codes)
    q = ptq.gptq(jnp.asarray(ws[0], jnp.bfloat16), hessians[0], spec)
    assert q.dtype == jnp.bfloat16
    # The codes are those of the rounded weight.
    check_equal(q.codes, ptq.gptq(jnp.asarray(ws[0], jnp.bfloat16).astype(F32), hessians[0], spec).codes)


@pytest.mark.slow
def test_grid_of_another_array(rng: np.random.Generator) -> None:
    w, hessian, _ = make_problem(rng, "dense")
    spec = jq.QuantSpec("uint4", jq.PerAxis(1))
    grid = jq.quantize(w, spec, range=(-1.0, 1.0))
    q = ptq.gptq(w, hessian, spec, grid)
    check_equal(q.scale, grid.scale)
    check_equal(q.zero_point, grid.zero_point)
    check_against_oracle(q, w, hessian, "dense", spec, order=True)


def make_grid(kind: str, w: np.ndarray, rng: np.random.Generator) -> tuple[jq.QuantSpec, jq.QuantizedArray]:
    """Return a spec and an array with the scale that a format has, for blocks of 8 inputs."""
    blocks = w.reshape(-1, 8, w.shape[1])
    low, high = blocks.min(1), blocks.max(1)
    codes = np.zeros(w.shape, F32)
    if kind == "nested":  # as NVFP4: float8 scales times one float32
        scale = jq.quantize(jnp.asarray(np.abs(blocks).max(1) / 6), jq.QuantSpec("float8_e4m3fn"))
        spec = jq.QuantSpec("float4_e2m1fn", jq.Blocked(0, 8))
        return spec, jq.QuantizedArray(jnp.asarray(codes, spec.carrier), scale)
    if kind == "signed":  # as Q4_0: the element of the largest magnitude has the code -8
        index = np.abs(blocks).argmax(1)[:, None]
        scale = np.take_along_axis(blocks, index, 1)[:, 0] / -8
        spec = jq.QuantSpec("int4", jq.Blocked(0, 8), narrow_range=False)
        return spec, jq.QuantizedArray(jnp.asarray(codes, spec.carrier), jnp.asarray(scale), signed_scale=True)
    spec = jq.QuantSpec("uint4", jq.Blocked(0, 8))
    scale, offset = jnp.asarray((high - low) / 15), jnp.asarray(low)
    if kind == "nested offset":  # as Q4_K: integers of 6 bits times a float16, and a minimum
        scale = jq.quantize(scale, jq.QuantSpec("uint8", symmetric=False, scale_dtype="float16"))
        offset = jq.quantize(offset, jq.QuantSpec("int8", scale_dtype="float16"))
    return spec, jq.QuantizedArray(jnp.asarray(codes, spec.carrier), scale, offset=offset)


@pytest.mark.parametrize("kind", ["offset", "nested offset", "signed", "nested"])
def test_grids_of_formats(kind: str, rng: np.random.Generator) -> None:
    """The scale, its parts and the offset stay; codes are in bounds, and leave less error than rounding to nearest."""
    w, hessian, _ = make_problem(rng, "dense")
    w = w + F32(0.5)
    spec, grid = make_grid(kind, w, rng)
    runs = [lambda w, h: ptq.gptq(w, h, spec, grid, sweeps=1)]
    if kind != "nested":  # float codes have no two neighbors between which to learn
        runs.append(lambda w, h: ptq.adaround(w, h, spec, grid, steps=40))
    nearest = ptq.gptq(w, np.eye(len(w), dtype=F32), spec, grid)
    for run in runs:
        for q in (run(w, hessian), jax.jit(run)(w, hessian)):
            assert jax.tree.structure(q) == jax.tree.structure(grid)
            for part, expected in zip(jax.tree.leaves(q)[1:], jax.tree.leaves(grid)[1:], strict=True):
                check_equal(part, expected)
            codes = np.asarray(q.codes).astype(F32)
            assert spec.bounds[0] <= codes.min()
            assert codes.max() <= spec.bounds[1]
            costs = [ptq_text.find_objective((w - np.asarray(x.dequantize())).T, hessian) for x in (q, nearest)]
            assert costs[0] < 0.9 * costs[1]
    # Without correlations each code is the nearest one.
    steps = np.abs(w - np.asarray(nearest.dequantize()))
    for move in (-1, 1):
        codes = np.clip(np.asarray(nearest.codes).astype(F32) + move, *spec.bounds)
        if kind != "nested":
            other = nearest.replace(codes=jnp.asarray(codes, spec.carrier))
            assert (steps <= np.abs(w - np.asarray(other.dequantize())) * (1 + 1e-5) + 1e-6).all()


def test_a_grid_with_a_permutation_is_refused(rng: np.random.Generator) -> None:
    w, hessian, _ = make_problem(rng, "dense")
    spec = jq.QuantSpec("uint4", jq.Blocked(0, 8))
    grid = jq.quantize(w, spec).replace(permutation=jnp.arange(len(w), dtype=jnp.int32), permuted_axis=-2)
    for name, run in (("gptq", ptq.gptq), ("adaround", ptq.adaround)):
        with pytest.raises(ValueError, match=rf"^jaxquant\.ptq\.{name}: grid\.permutation: expected None"):
            run(w, hessian, spec, grid)


@pytest.mark.slow
def test_singular_hessian_and_dead_inputs(rng: np.random.Generator) -> None:
    w = rng.normal(size=(24, 8)).astype(F32)
    x = rng.normal(size=(4, 24)).astype(F32)  # fewer samples than inputs
    x[:, 3] = 0
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    for damping in (0.01, 0.0):
        q, report = ptq.gptq(w, x.T @ x / F32(4), spec, damping=damping, diagnostics=True)
        assert float(report.damping[0]) >= F32(damping)
        assert np.isfinite(np.asarray(q.dequantize())).all()
        assert int(report.dead[0]) == 1
        check_equal(q.codes[3], jq.quantize(w, spec).codes[3])
        assert float(report.error[0]) < float(report.nearest_error[0])
    # Without damping the matrix has no factor; the number that was needed is returned.
    assert float(report.damping[0]) > 0
    nothing, report = ptq.gptq(w, np.zeros((24, 24), F32), spec, diagnostics=True)
    check_equal(nothing.codes, jq.quantize(w, spec).codes)
    assert int(report.dead[0]) == 24


@pytest.mark.slow
def test_large_and_small_moments(rng: np.random.Generator) -> None:
    """A power of two times the second moments changes no code."""
    w, hessian, _ = make_problem(rng, "dense")
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    expected = ptq.gptq(w, hessian, spec)
    for power in (-80, 80):
        check_equal(ptq.gptq(w, np.ldexp(hessian, power), spec).codes, expected.codes)


def test_nan_under_jit_shows_in_every_value(rng: np.random.Generator) -> None:
    w, hessian, _ = make_problem(rng, "dense")
    hessian[2, 3] = np.nan
    q = jax.jit(lambda w, h: ptq.gptq(w, h, jq.QuantSpec("int4", jq.PerAxis(1))))(w, hessian)
    assert np.isnan(np.asarray(q.dequantize())).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hessian": np.full((24, 24), np.nan, F32)}, "hessian: expected finite numbers, got a NaN or an infinity"),
        ({"w": np.full((24, 16), np.inf, F32)}, "w: expected finite numbers, got a NaN or an infinity"),
        ({"hessian": np.ones((16, 16), F32)}, r"hessian: expected shape \(24, 24\) \(w has shape \(24, 16\), and"),
        ({"hessian": np.ones(24, F32)}, r"hessian: expected shape \(inputs, inputs\), or \(groups, "),
        ({"hessian": np.ones((3, 24, 24), F32)}, "hessian: expected a number of groups that divides the 16"),
        ({"hessian": np.ones((24, 24), np.int32)}, "hessian: expected dtype float32"),
        ({"w": np.ones((24, 16), np.int8)}, "w: expected dtype float32, float16 or bfloat16, got int8"),
        ({"spec": "int4"}, r"spec: expected a QuantSpec, got 'int4' \(str\)"),
        ({"axis": 2}, r"axis: expected an integer in \[-2, 1\], because the array has rank 2, got 2"),
        ({"axis": (1, 1)}, r"axis: expected distinct axes, got \(1, 1\)"),
        ({"damping": -0.5}, "damping: expected 0 or a positive number, got -0.5"),
        ({"damping": "x"}, r"damping: expected a static Python number, got 'x' \(str\)"),
        ({"activation_order": 2}, r"activation_order: expected True or False, got 2 \(int\)"),
        ({"grid": np.ones((24, 16), F32)}, "grid: expected a QuantizedArray, got "),
        ({"grid": jq.quantize(np.ones((24, 16), F32), jq.QuantSpec("int8"))}, "grid: expected codes of int4, as the s"),
        ({"grid": jq.quantize(np.ones((24, 8), F32), jq.QuantSpec("int4"))}, r"grid: expected shape \(24, 16\) \(the"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {
        "w": np.ones((24, 16), F32), "hessian": np.eye(24, dtype=F32), "spec": jq.QuantSpec("int4"), **change
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.ptq\.gptq: {text}"):
        ptq.gptq(**arguments)


@pytest.mark.slow
def test_one_program_for_each_shape(rng: np.random.Generator) -> None:
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    traces = []

    @jax.jit
    def quantize(w: jax.Array, hessian: jax.Array) -> Any:
        traces.append(None)
        return ptq.gptq(w, hessian, spec)

    for _ in range(3):
        quantize(*make_problem(rng, "dense")[:2])
    assert len(traces) == 1


@pytest.mark.slow
def test_sharded_outputs_have_the_same_codes(rng: np.random.Generator) -> None:
    w, hessian, _ = make_problem(rng, "dense")
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model")))
    check_equal(ptq.gptq(placed, jnp.asarray(hessian), spec).codes, ptq.gptq(w, hessian, spec).codes)


@pytest.mark.slow
def test_known_arrays_while_others_are_traced(rng: np.random.Generator) -> None:
    """A jitted function may close over arrays, which are still checked. Tracing is enough: nothing is compiled."""
    w, hessian, _ = make_problem(rng, "dense")
    spec, known = jq.QuantSpec("int4", jq.PerAxis(1)), jnp.asarray(hessian)

    def list_calls(x: jax.Array) -> dict[str, Any]:
        row = jnp.sqrt(jnp.diagonal(x))
        moments = ptq.Moments(x[None], row[None], row[None], row[None], jnp.ones(1))
        return {
            "gptq": lambda w: ptq.gptq(w, x, spec),
            "adaround": lambda w: ptq.adaround(w, x, spec),
            "awq": lambda w: ptq.awq(w, moments, spec),
            "smoothquant": lambda w: ptq.smoothquant(w, row),
        }

    spoiled = list_calls(known.at[0, 0].set(np.nan))
    for name, call in list_calls(known).items():
        jax.eval_shape(call, w)
        with pytest.raises(ValueError, match=rf"^jaxquant\.ptq\.{name}: \S+: expected finite numbers"):
            jax.eval_shape(spoiled[name], w)
