"""Collectives of arrays without elements or dimensions, of every dtype, on axes of every kind; their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import distributed as jqd

P = PartitionSpec
INT8 = jq.QuantSpec(jnp.int8, jq.Blocked(-1, 16))
INT4 = jq.QuantSpec(jnp.int4, jq.Blocked(-1, 8), scale_dtype=jnp.bfloat16)
ONE_SCALE = jq.QuantSpec(jnp.int8)


def map_devices(function: Callable[..., Any], count: int = 8, **options: Any) -> Callable[..., Any]:
    """Return a jitted function of arrays whose first dimension holds the devices; so do its results."""

    def on_device(*arguments: Any) -> Any:
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda y: y[None], results)

    mesh = Mesh(np.array(jax.devices()[:count]), ("d",))
    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"), **options))


def rotate(size: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % size) for i in range(size)]


def pair_collectives(size: int, spec: jq.QuantSpec, axis_name: Any = "d") -> dict[str, tuple[Any, Any]]:
    """Return each collective beside jax.lax's, for arrays whose first dimension is `size`."""
    name, options = axis_name, {"axis_name": axis_name}
    return {
        "psum": (lambda x: jqd.psum(x, name, spec=spec), lambda x: lax.psum(x, name)),
        "pmean": (lambda x: jqd.pmean(x, name, spec=spec), lambda x: lax.pmean(x, name)),
        "psum_scatter": (
            lambda x: jqd.psum_scatter(x, name, spec=spec, tiled=True),
            functools.partial(lax.psum_scatter, tiled=True, **options),
        ),
        "all_gather": (lambda x: jqd.all_gather(x, name, spec=spec), functools.partial(lax.all_gather, **options)),
        "all_gather, tiled": (
            lambda x: jqd.all_gather(x, name, spec=spec, tiled=True, backward_spec=spec),
            functools.partial(lax.all_gather, tiled=True, **options),
        ),
        "all_to_all": (
            lambda x: jqd.all_to_all(x, name, 0, 0, spec=spec, tiled=True),
            lambda x: lax.all_to_all(x, name, 0, 0, tiled=True),
        ),
        "ppermute": (
            lambda x: jqd.ppermute(x, name, rotate(size), spec=spec),
            lambda x: lax.ppermute(x, name, rotate(size)),
        ),
        "feedback": (
            lambda x: jqd.psum_with_error_feedback(x, jnp.zeros(x.shape, jnp.float32), name, spec=spec)[0],
            lambda x: lax.psum(x, name),
        ),
    }


def assert_close(actual: Any, expected: Any, step: float, label: str = "") -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), label
    a, b = (np.asarray(y, np.float64) for y in (actual, expected))
    assert np.abs(a - b).max(initial=0) <= step * np.abs(b).max(initial=1), label


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_float_dtype(rng: np.random.Generator, dtype: str) -> None:
    """Results have the dtype of x, and differ from jax.lax's by steps of the codes and of the dtype."""
    x = jnp.asarray(rng.normal(size=(8, 8, 5)), dtype)
    collectives = pair_collectives(8, INT8)
    results = map_devices(lambda x: {n: (ours(x), theirs(x)) for n, (ours, theirs) in collectives.items()})(x)
    for name, (actual, expected) in results.items():
        assert actual.dtype == x.dtype
        assert_close(actual, expected, 0.08, name)


@pytest.mark.slow
def test_arrays_without_elements(rng: np.random.Generator) -> None:
    """Of floats and of codes; gradients, too."""
    x = jnp.zeros((8, 8, 0))
    collectives = pair_collectives(8, INT8)

    def run(x: jax.Array) -> Any:
        pairs = {n: (ours(x), theirs(x)) for n, (ours, theirs) in collectives.items()}
        grads = {n: jax.grad(lambda x, f=f: jnp.sum(f(x)))(x) for n, (f, _) in collectives.items()}
        q = jq.quantize(x, INT4)
        moved = {
            "gather": jqd.all_gather(q, "d", axis=1),
            "tiled": jqd.all_gather(q, "d", axis=1, tiled=True),
            "rows": jqd.all_gather(q, "d", axis=0, tiled=True),
            "exchange": jqd.all_to_all(q, "d", 0, 1, tiled=True),
            "permute": jqd.ppermute(q, "d", [(0, 1)]),
        }
        return pairs, grads, {n: y.dequantize() for n, y in moved.items()}, jqd.compare_devices({"x": x}, "d")

    pairs, grads, moved, same = map_devices(run)(x)
    for name, (actual, expected) in pairs.items():
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    assert {grad.shape for grad in grads.values()} == {x.shape}
    assert moved["gather"].shape == (8, 8, 8, 0)
    assert moved["rows"].shape == (8, 64, 0)
    assert same.all()


@pytest.mark.slow
def test_arrays_without_dimensions(rng: np.random.Generator) -> None:
    """A number on each device is a message of one element, whose code is exact but for float32's rounding."""
    x = jnp.asarray(rng.normal(size=8), jnp.float32)

    def run(x: jax.Array) -> Any:
        q = jq.quantize(x, jq.QuantSpec(jnp.int4))
        keys = jax.random.key(0)
        return {
            "psum": (jqd.psum(x, "d", spec=INT8), lax.psum(x, "d")),
            "pmean": (jqd.pmean(x, "d", spec=INT8, key=keys), lax.pmean(x, "d")),
            "gather": (jqd.all_gather(x, "d", spec=ONE_SCALE, backward_spec=INT8), lax.all_gather(x, "d")),
            "codes": (jqd.all_gather(q, "d").dequantize(), lax.all_gather(q.dequantize(), "d")),
            "permute": (jqd.ppermute(q, "d", [(7, 0)]).dequantize(), lax.ppermute(q.dequantize(), "d", [(7, 0)])),
            "feedback": (jqd.psum_with_error_feedback(x, x * 0, "d", spec=INT8)[0], lax.psum(x, "d")),
            "number": (jqd.psum(2.0, "d", spec=INT8), lax.psum(jnp.float32(2), "d")),
            "gradient": (
                jax.grad(lambda x: jqd.psum(x**2, "d", spec=INT8))(x),
                jax.grad(lambda x: lax.psum(x**2, "d"))(x),
            ),
        }

    for name, (actual, expected) in map_devices(run)(x).items():
        assert_close(actual, expected, 1e-5, name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_devices(rng: np.random.Generator, count: int) -> None:
    """One device, too: what it sends to itself is quantized."""
    x = jnp.asarray(rng.normal(size=(count, count, 37)), jnp.float32)
    collectives = pair_collectives(count, INT8)
    results = map_devices(lambda x: {n: (f(x), g(x)) for n, (f, g) in collectives.items()}, count)(x)
    for name, (actual, expected) in results.items():
        assert_close(actual, expected, 0.03, name)
    if count == 1:
        sent = jq.quantize(x[0].reshape(1, -1), jq.QuantSpec(jnp.int8, jq.Blocked(-1, 16))).dequantize()
        scattered = results["psum_scatter"][0][0]
        np.testing.assert_array_equal(scattered, np.asarray(sent).reshape(1, 37))
        assert (np.asarray(results["psum"][0]) != np.asarray(x)).any()


@pytest.mark.slow
def test_integers_and_bools_travel_as_they_are(rng: np.random.Generator) -> None:
    """Codes of 4 bits and floats of 8 bits, which some backends cannot send, arrive bit for bit."""
    values = {
        "int4": jnp.asarray(rng.integers(-8, 8, (8, 8, 3)), jnp.int8).astype(jnp.int4),
        "uint2": jnp.asarray(rng.integers(0, 4, (8, 8, 3)), jnp.uint8).astype(jnp.uint2),
        "int8": jnp.asarray(rng.integers(-128, 128, (8, 8, 3)), jnp.int8),
        "uint32": jnp.asarray(rng.integers(0, 2**32, (8, 8, 3)), jnp.uint32),
        "bool": jnp.asarray(rng.integers(0, 2, (8, 8, 3)), bool),
        "float8": jnp.asarray(rng.normal(size=(8, 8, 3)), jnp.float8_e4m3fn),
    }

    def run(tree: Any) -> Any:
        moved = (
            jqd.all_gather(tree, "d"),
            jqd.all_gather(tree, "d", axis=1, tiled=True),
            jqd.all_to_all(tree, "d", 0, 1),
            jqd.ppermute(tree, "d", rotate(8)),
        )
        return jax.tree.map(lambda y: y.astype(jnp.float32) if y.dtype != jnp.uint32 else y, moved)

    stacked, joined, exchanged, rotated = map_devices(run)(values)
    for name, value in values.items():
        x = np.asarray(value.astype(jnp.float32) if name != "uint32" else value)
        for device in range(8):
            np.testing.assert_array_equal(stacked[name][device], x, err_msg=name)
            np.testing.assert_array_equal(joined[name][device], np.concatenate(list(x), 1), err_msg=name)
            np.testing.assert_array_equal(exchanged[name][device], x[:, device].T, err_msg=name)
        np.testing.assert_array_equal(rotated[name], np.roll(x, 1, axis=0), err_msg=name)


@pytest.mark.slow
def test_values_that_do_not_vary(rng: np.random.Generator) -> None:
    """What is the same on all devices is added as often as there are devices, as by jax.lax; its gradient, too."""
    x = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
    collectives = pair_collectives(8, INT8)

    def run(x: jax.Array) -> Any:
        def find_sum(f: Any, x: jax.Array) -> jax.Array:
            return lax.psum(jnp.sum(jnp.sin(f(x))) * lax.axis_index("d").astype(jnp.float32), "d")

        pairs = {}
        for name, (ours, theirs) in collectives.items():
            grads = [jax.grad(functools.partial(find_sum, f))(x) for f in (theirs, ours)]
            pairs[name] = ((ours(x), theirs(x)), (grads[1], grads[0]))
        return jax.tree.map(lambda y: y[None], pairs)

    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    results = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("d")))(x)
    for name, ((actual, expected), (grad, expected_grad)) in results.items():
        assert_close(actual, expected, 0.03, name)
        assert_close(grad, expected_grad, 0.2, f"{name}, gradient")


@pytest.mark.slow
def test_several_axes(rng: np.random.Generator) -> None:
    """A tuple of axes, one axis inside of another jax.shard_map, and meshes with explicit axes."""
    x = jnp.asarray(rng.normal(size=(16, 24)), jnp.float32)
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    both = pair_collectives(8, INT8, ("a", "b"))
    single = pair_collectives(4, INT8, "b")

    def run(collectives: Any, size: int, x: jax.Array) -> Any:
        x = x.reshape(2, -1)[: size * (x.size // 2 // size)] if size == 2 else jnp.tile(x, (4, 1))
        pairs = {n: (f(x), g(x)) for n, (f, g) in collectives.items()}
        return jax.tree.map(lambda y: y[None], pairs)

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("a", "b"), axis_types=(kind,) * 2)
        spec = P(("a", "b"))
        flat = jax.shard_map(functools.partial(run, both, 8), mesh=mesh, in_specs=spec, out_specs=spec)

        def outer(x: jax.Array, kind: AxisType = kind) -> Any:
            x = jax.sharding.reshard(x, P("b")) if kind == AxisType.Explicit else x
            inner = jax.shard_map(
                functools.partial(run, single, 4), in_specs=P("b"), out_specs=P("b"), axis_names={"b"}
            )
            return inner(x)

        nested = jax.shard_map(outer, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
        for f, place in ((flat, spec), (nested, P("a"))):
            # With explicit axes, jax.shard_map takes only what is placed as in_specs say.
            for name, (actual, expected) in jax.jit(f)(jax.device_put(x, NamedSharding(mesh, place))).items():
                assert_close(actual, expected, 0.03, f"{name}, {kind}")


@pytest.mark.slow
def test_the_axis_of_vmap(rng: np.random.Generator) -> None:
    """Collectives over jax.vmap's axis, alone and inside of jax.shard_map, where they send nothing."""
    x = jnp.asarray(rng.normal(size=(8, 4, 4, 6)), jnp.float32)
    collectives = pair_collectives(4, INT8, "v")

    def run(x: jax.Array) -> Any:
        return {n: (f(x), g(x)) for n, (f, g) in collectives.items()}

    mapped = jax.vmap(run, axis_name="v")
    alone = jax.jit(lambda x: mapped(x[0]))(x)
    # With check_vma, JAX's own collectives over an axis of jax.vmap fail inside of jax.shard_map.
    compiled = map_devices(mapped, check_vma=False).lower(x).compile()
    assert jqd.count_traffic(compiled) == []
    inside = compiled(x)
    for name, (actual, expected) in alone.items():
        assert_close(actual, expected, 0.03, name)
        assert_close(inside[name][0][0], actual, 0.01, f"{name}, inside of shard_map")
    rows = map_devices(jax.vmap(lambda x: jqd.psum(x, "d", spec=INT8)))(x)
    for i in range(4):
        row = map_devices(lambda x, i=i: jqd.psum(x[i], "d", spec=INT8))(x)
        assert_close(rows[:, i], row, 0.01, "a batch inside of shard_map")


@pytest.mark.slow
def test_derivatives_of_scales_and_of_higher_order(rng: np.random.Generator) -> None:
    """The scale of a quantized array has the gradient of jax.lax; so have second derivatives, scans and checkpoints."""
    x = jnp.asarray(rng.normal(size=(8, 8, 16)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(64, 16)), jnp.float32)

    def run(x: jax.Array) -> Any:
        q = jq.quantize(x, INT4)
        moves = {
            "gather": (lambda q: jqd.all_gather(q, "d", tiled=True), lambda y: lax.all_gather(y, "d", tiled=True)),
            "exchange": (
                lambda q: jqd.all_to_all(q, "d", 0, 0, tiled=True),
                lambda y: lax.all_to_all(y, "d", 0, 0, tiled=True),
            ),
            "permute": (lambda q: jqd.ppermute(q, "d", rotate(8)), lambda y: lax.ppermute(y, "d", rotate(8))),
        }
        pairs = {}
        for name, (ours, theirs) in moves.items():
            rows = weights if name == "gather" else weights[:8]

            def find_ours(scale: Any, f: Any = ours, rows: Any = rows) -> jax.Array:
                return jnp.sum(f(q.replace(scale=scale)).dequantize() * rows)

            def find_theirs(scale: Any, f: Any = theirs, rows: Any = rows) -> jax.Array:
                return jnp.sum(f(q.replace(scale=scale).dequantize()) * rows)

            pairs[name] = (jax.grad(find_ours)(q.scale), jax.grad(find_theirs)(q.scale))

        adders = (lambda x: jqd.psum(x, "d", spec=INT8), lambda x: lax.psum(x, "d"))

        def find_loss(add: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(add(x**3) * weights[:8])

        for name, transform in {
            "second": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
            "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
            "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
        }.items():
            pairs[name] = tuple(transform(functools.partial(find_loss, add))(x) for add in adders)

        def add_rows(add: Any, x: jax.Array) -> jax.Array:
            total = lax.scan(lambda c, row: (c + jnp.sum(add(row[0]) * row[1]), None), jnp.sum(x) * 0, (x, weights[:8]))
            return total[0]

        pairs["scan"] = tuple(jax.grad(functools.partial(add_rows, add))(x) for add in adders)
        return pairs

    for name, (actual, expected) in map_devices(run)(x).items():
        assert_close(actual, expected, 1e-5 if name not in ("gather", "exchange", "permute") else 0.02, name)


def test_quantized_arrays_and_integers_have_no_sum() -> None:
    q = jq.quantize(jnp.ones((8, 4)), INT8)
    for call in (
        lambda q: jqd.psum(q, "d", spec=INT8),
        lambda q: jqd.psum_scatter({"q": q}, "d", spec=INT8),
        lambda q: jqd.psum_with_error_feedback(q, q, "d", spec=INT8),
        lambda q: jqd.psum(q.codes, "d", spec=INT8),
    ):
        with pytest.raises(TypeError, match=r"distributed\.psum\w*: x: expected"):
            jax.eval_shape(jax.vmap(call, axis_name="d"), q)
    with pytest.raises(ValueError, match=r"all_gather: spec: axis: expected an array of rank 1 or more, got rank 0"):
        jax.eval_shape(jax.vmap(lambda x: jqd.all_gather(x, "d", spec=INT8), axis_name="d"), jnp.ones(3))
    join = jax.vmap(lambda x: jqd.all_gather(x, "d", spec=ONE_SCALE, tiled=True), axis_name="d")
    with pytest.raises(ValueError, match=r"all_gather: axis: expected an array of rank 1 or more, got rank 0"):
        jax.eval_shape(join, jnp.ones(3))
