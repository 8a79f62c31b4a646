"""The same integers on one device and on eight, in modes other than the usual, and lowered for other platforms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..oracles import onnx_text
from ..support import inputs, transforms

SHAPE = (8, 16, 24)
SCALES = {
    "per-tensor": ((), 1, 0),
    "per-axis 0": ((8,), 0, 0),
    "per-axis 2": ((24,), 2, 0),
    "blocked": ((8, 4, 24), 1, 5),
}


def draw_arguments(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    shape, axis, block = SCALES[name]
    scale, point = inputs.scales(rng, shape, np.dtype(np.float32)), inputs.zero_points(rng, shape, "int8")
    wide, steps = (onnx_text.expand(p, SHAPE, axis, block) for p in (scale, point))
    x = inputs.near_ties(rng, wide, steps.astype(np.int64), (-128, 127), np.dtype(np.float32))
    return x, scale, point, {"axis": axis, "block_size": block}


def sharded(x: np.ndarray, axis: int, kind: AxisType = AxisType.Explicit) -> jax.Array:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    spec = PartitionSpec(*("d" if a == axis else None for a in range(x.ndim)))
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("name", list(SCALES))
def test_eight_devices_give_the_same_codes(rng: np.random.Generator, name: str, axis: int, kind: AxisType) -> None:
    x, scale, point, keywords = draw_arguments(rng, name)
    expected = onnx_text.quantize_linear(x, scale, point, "int8", axis=keywords["axis"], block=keywords["block_size"])
    spread = sharded(x, axis, kind)
    actual = jax.jit(functools.partial(jq.quantize_linear, **keywords))(spread, scale, point)
    assert len(actual.sharding.device_set) == 8
    assert transforms.mismatches(np.asarray(actual), expected) == 0
    values = jax.jit(functools.partial(jq.dequantize_linear, **keywords))(actual, scale, point)
    text = onnx_text.dequantize_linear(expected, scale, point, axis=keywords["axis"], block=keywords["block_size"])
    assert transforms.mismatches(np.asarray(values), text) == 0
    fake = jax.jit(functools.partial(jq.fake_quantize_linear, **keywords))(spread, scale, point)
    assert transforms.mismatches(np.asarray(fake), text) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("row_axis", [None, 0, 2])
def test_eight_devices_find_the_same_range(rng: np.random.Generator, axis: int, row_axis: int | None) -> None:
    x = rng.normal(size=SHAPE).astype(np.float32)
    dynamic = jax.jit(functools.partial(jq.dynamic_quantize_linear, axis=row_axis))
    alone, spread = dynamic(x), dynamic(sharded(x, axis))
    assert len(spread.y.sharding.device_set) == 8
    assert transforms.mismatches(tuple(spread), tuple(alone)) == 0
    onednn = jax.jit(lambda x: jq.onednn.quantize(x, jnp.full(24, 0.037), qtype="per_channel", axis=-1))
    assert transforms.mismatches(np.asarray(onednn(sharded(x, axis))), np.asarray(onednn(x))) == 0


F = jax.ShapeDtypeStruct((4, 6), jnp.float32)
S = jax.ShapeDtypeStruct((6,), jnp.float32)
Z = jax.ShapeDtypeStruct((6,), jnp.int8)
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "quantize_linear": (jq.quantize_linear, (F, S, Z)),
    "quantize_linear float8": (functools.partial(jq.quantize_linear, output_dtype=jnp.float8_e4m3fn), (F, S)),
    "quantize_linear int4": (functools.partial(jq.quantize_linear, output_dtype=jnp.int4), (F, S)),
    "dequantize_linear": (jq.dequantize_linear, (jax.ShapeDtypeStruct((4, 6), jnp.int8), S, Z)),
    "dynamic_quantize_linear": (jq.dynamic_quantize_linear, (F,)),
    "fake_quantize_linear": (jq.fake_quantize_linear, (F, S, Z)),
    "fake_quantize_linear gradient": (
        jax.grad(lambda x, s, z: jq.fake_quantize_linear(x, s, z).sum(), argnums=(0, 1)),
        (F, S, Z),
    ),
    "dynamic_fake_quantize_linear": (jq.dynamic_fake_quantize_linear, (F,)),
    "onednn.quantize": (functools.partial(jq.onednn.quantize, qtype="per_channel"), (F, S, Z)),
    "onednn.dequantize": (
        functools.partial(jq.onednn.dequantize, qtype="per_channel"),
        (jax.ShapeDtypeStruct((4, 6), jnp.int8), S, Z),
    ),
    "onednn.dynamic_quantize": (functools.partial(jq.onednn.dynamic_quantize, qtype="per_channel"), (F, S, Z)),
    "onednn.dynamic_dequantize": (
        functools.partial(jq.onednn.dynamic_dequantize, qtype="per_group", group_shape=(1, 3)),
        (jax.ShapeDtypeStruct((4, 6), jnp.int4), jax.ShapeDtypeStruct((4, 2), jnp.float16)),
    ),
}


@pytest.mark.parametrize("name", list(OPERATORS))
def test_export_lowers_for_every_platform(name: str) -> None:
    op, arguments = OPERATORS[name]
    exported = export.export(jax.jit(op), platforms=["cpu", "cuda", "tpu"])(*arguments)
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
    restored = export.deserialize(exported.serialize())
    values = [jnp.ones(a.shape, a.dtype) for a in arguments]
    actual, expected = (jax.tree.leaves(f(*values)) for f in (restored.call, op))
    assert transforms.mismatches(tuple(actual), tuple(expected)) == 0


def test_other_backends_get_the_corrected_quotient() -> None:
    """Proved by lowering only: a program for a GPU or a TPU has the residual's integer product, one for a CPU not."""
    arguments = OPERATORS["quantize_linear"][1]
    text = {
        platform: export.export(jax.jit(jq.quantize_linear), platforms=[platform])(*arguments).mlir_module()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert {p: "stablehlo.multiply" in t and "stablehlo.shift_left" in t for p, t in text.items()} == {
        "cpu": False,
        "cuda": True,
        "tpu": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["x64", "disable_jit", "promotion"])
def test_modes_of_jax_change_nothing(rng: np.random.Generator, mode: str) -> None:
    x, scale, point, keywords = draw_arguments(rng, "per-axis 2")
    switch = {
        "x64": lambda: jax.enable_x64(True),
        "disable_jit": jax.disable_jit,
        "promotion": lambda: jax.numpy_dtype_promotion("standard"),
    }[mode]
    want = onnx_text.quantize_linear(x, scale, point, "int8", axis=2)
    range_want = onnx_text.dynamic_quantize_linear(np.nan_to_num(x, posinf=1, neginf=-1))
    with switch():
        codes = jq.quantize_linear(x, scale, point, **keywords)
        assert transforms.mismatches(np.asarray(codes), want) == 0
        values = jq.dequantize_linear(codes, scale, point, **keywords)
        assert transforms.mismatches(np.asarray(values), onnx_text.dequantize_linear(want, scale, point, axis=2)) == 0
        y, s, z = jq.dynamic_quantize_linear(np.nan_to_num(x, posinf=1, neginf=-1))
        assert (np.asarray(y).astype(np.int64) == range_want[0]).all()
        assert (np.asarray(s), int(z)) == (range_want[1], range_want[2])
        python_scale = jq.quantize_linear(x, 0.25, 3, output_dtype=jnp.int8)
        assert (
            transforms.mismatches(
                np.asarray(python_scale), onnx_text.quantize_linear(x, np.float32(0.25), np.int8(3), "int8")
            )
            == 0
        )
        gradient = jax.grad(lambda x: jq.fake_quantize_linear(x, scale, point, **keywords).sum())(jnp.asarray(x))
        assert gradient.dtype == jnp.float32


def shard_mapped(op: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [6, 8192])
def test_under_shard_map_each_shard_is_on_its_own(rng: np.random.Generator, columns: int) -> None:
    x = rng.normal(size=(8, columns)).astype(np.float32)
    actual = shard_mapped(lambda x: jq.dynamic_quantize_linear(x).y)(x)
    expected = np.stack([onnx_text.dynamic_quantize_linear(row)[0] for row in x])
    np.testing.assert_array_equal(actual, expected)
    by_row = shard_mapped(lambda x: jq.dynamic_quantize_linear(x, axis=0).y)(x)
    np.testing.assert_array_equal(by_row, expected)
    codes = shard_mapped(lambda x: jq.quantize_linear(x, 0.037, 3))(x)
    np.testing.assert_array_equal(codes, jq.quantize_linear(x, 0.037, 3))
    for op in (
        lambda x: jq.fake_quantize_linear(x, 0.1).sum(),
        lambda x: jq.fake_quantize_linear(x, jnp.full(columns, 0.1)).sum(),
        lambda x: jq.dynamic_fake_quantize_linear(x).sum(),
        lambda x: jq.dynamic_quantize_linear(x).y_scale,
    ):
        spread = shard_mapped(jax.grad(op))(x)
        alone = jnp.concatenate([jax.grad(op)(row) for row in jnp.split(x, 8)])
        np.testing.assert_allclose(spread, alone, rtol=1e-6)


@pytest.mark.slow
def test_gradients_where_scales_are_sharded(rng: np.random.Generator) -> None:
    """Explicit shardings: each cotangent has the placement of what it belongs to."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x, g = (rng.normal(size=(4, 16)).astype(np.float32) for _ in range(2))
    scale = np.abs(x).max(axis=0) / 100
    blocked = np.abs(x).reshape(2, 2, 16).max(axis=1) / 100

    def pull(x: Any, scale: Any, g: Any, **keywords: Any) -> Any:
        return jax.vjp(functools.partial(jq.fake_quantize_linear, **keywords), x, scale)[1](g)

    def placed(a: np.ndarray) -> jax.Array:
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*(None,) * (a.ndim - 1), "d")))

    with jax.set_mesh(mesh):
        for s, keywords in ((scale, {}), (blocked, {"axis": 0, "block_size": 2})):
            expected = pull(x, s, g, **keywords)
            actual = pull(*map(placed, (x, s, g)), **keywords)
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        whole = jax.grad(lambda w: jq.dynamic_fake_quantize_linear(w, axis=1).sum())
        np.testing.assert_array_equal(
            whole(jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))), np.ones_like(x)
        )


@pytest.mark.slow
def test_export_with_a_symbolic_batch(rng: np.random.Generator) -> None:
    (batch,) = export.symbolic_shape("b")
    x = rng.normal(size=(5, 8)).astype(np.float32)
    for op in (jq.dynamic_quantize_linear, jq.dynamic_fake_quantize_linear, lambda x: jq.quantize_linear(x, 0.1)):
        saved = export.export(jax.jit(op))(jax.ShapeDtypeStruct((batch, 8), jnp.float32))
        assert transforms.mismatches(jax.tree.leaves(saved.call(x)), jax.tree.leaves(op(x))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "x64", "disable_jit"])
def test_python_and_numpy_numbers_in_every_mode(mode: str) -> None:
    """Python's and numpy's numbers mean the same in every mode."""
    switch = {
        "plain": lambda: jax.enable_x64(False),
        "x64": lambda: jax.enable_x64(True),
        "disable_jit": jax.disable_jit,
    }
    x = jnp.array([0.3, -0.7])
    with switch[mode]():
        assert jq.quantize_linear(3, 0.5) == 6
        assert jq.quantize_linear(3.0, np.float64(0.5)) == 6
        assert jq.dynamic_quantize_linear(3).y == 255
        assert jq.fake_quantize_linear(3, 0.5) == 3
        assert jq.onednn.quantize(3, 0.5) == 6
        assert jq.quantize_linear(x, np.float32(0.5), np.int8(1)).tolist() == [2, 0]
        assert jq.dequantize_linear(np.array([4, -4], np.int8), np.float64(0.5)).tolist() == [2, -2]
        assert jq.quantize_linear(np.array([4, -4]), 2).tolist() == [2, 0]  # numpy's own int64
        assert jq.onednn.quantize(x, 0.1, np.array([10])).tolist() == [13, 3]
        if mode == "plain":  # x64 traces a number as float64, which no operator has; disable_jit as a number of its own
            assert jax.grad(lambda s: jq.fake_quantize_linear(3.0, s))(0.5) == 0
            assert jax.grad(jq.dynamic_fake_quantize_linear)(3.0) == 1
            assert jax.grad(lambda v: jq.dynamic_quantize_linear(v).y_scale)(3.0) == np.float32(1 / 255)


@pytest.mark.slow
def test_arrays_of_others_are_taken() -> None:
    """What JAX itself would convert, a flax.nnx.Param for one."""

    class Wrapped:
        def __jax_array__(self) -> jax.Array:
            return jnp.array([0.3, -0.7])

    wrapped: Any = Wrapped()
    assert jq.quantize_linear(wrapped, 0.1, 3).tolist() == [6, 0]
    assert jax.jit(lambda: jq.fake_quantize_linear(wrapped, 0.1).sum())().shape == ()
