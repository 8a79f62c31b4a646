"""The quantized contractions under jit, vmap, scan, checkpoint and sharding; what they keep for the way back, and which
derivatives they refuse. On numbers that float32 does not round, so that all must agree to the last bit."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import PerAxis, Quantizer, QuantSpec

from ..cases.quantized_contractions import F32, check_equal, key, quarters, whole
from ..support.hlo import Program
from ..support.matrix import mark_others_full

MATRIX = (((1,), (0,)), ((), ()))
I8, U8, I4 = (QuantSpec(d) for d in (jnp.int8, jnp.uint8, jnp.int4))
ROWS, COLUMNS = QuantSpec(jnp.int8, PerAxis(0)), QuantSpec(jnp.int4, PerAxis(1))
SCALE = F32(0.25)


def dot(x: Any, w: Any, scale: Any, **rest: Any) -> jax.Array:
    """Learned steps on the left, a column's own on the right: 1/4, for w is whole and has a 7 in each column / 4."""
    left = Quantizer(I4, scale, gradient=jq.LSQ(elements=24))
    return jq.quantized_dot_general(x, w, MATRIX, lhs_spec=left, rhs_spec=COLUMNS, **rest)


def problem(rng: np.random.Generator, *batch: int) -> tuple[Any, Any, Any]:
    """x, w and a cotangent."""
    x = quarters(rng, I4, SCALE, 0, (*batch, 16, 24))
    w = quarters(rng, I4, SCALE, 0, (*batch, 24, 7)).clip(-1.75, 1.75)
    w[..., 0, :] = 1.75
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(whole(rng, (*batch, 16, 7)))


def pull(x: Any, w: Any, scale: Any, g: Any, **rest: Any) -> tuple[Any, Any]:
    y, vjp = jax.vjp(functools.partial(dot, **rest), x, w, scale)
    return y, vjp(g)


def want(x: Any, w: Any, scale: Any, g: Any) -> tuple[Any, Any]:
    """The same of floats."""
    left = lambda x, s: jq.fake_quantize(x, I4, s, gradient=jq.LSQ(elements=24))  # noqa: E731
    y, vjp = jax.vjp(lambda x, w, s: left(x, s) @ jq.fake_quantize(w, COLUMNS), x, w, scale)
    return y, vjp(g)


@pytest.mark.slow
def test_a_cached_program_serves_every_choice_of_gradients(rng: np.random.Generator) -> None:
    """What one call keeps for the way back must not be what another, differentiated otherwise, finds in the cache."""
    x, w, g = problem(rng)
    compiled = jax.jit(dot)
    inner = lambda *arguments: (compiled(*arguments) * g).sum()  # noqa: E731
    eager = lambda *arguments: (dot(*arguments) * g).sum()  # noqa: E731
    _, exact = want(x, w, SCALE, g)
    arguments = (x, w, jnp.asarray(SCALE))
    for loss, choices in ((inner, ((1,), (0, 1, 2), (2,), (0, 1, 2))), (eager, ((2,), (0, 1, 2), (0,)))):
        for argnums in choices:
            check_equal(jax.grad(loss, argnums)(*arguments), tuple(exact[i] for i in argnums))
    check_equal(compiled(*arguments), want(x, w, SCALE, g)[0])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)], ids=str)
def test_vmap(rng: np.random.Generator, axes: tuple[Any, ...]) -> None:
    """Of gradients, and gradients of a vmap, whose shared operands get the sum."""
    x, w, g = problem(rng, 3)
    arguments = (x, w, jnp.array([0.25, 0.5, 0.125], F32))
    operands = tuple(v if a == 0 else v[0] for v, a in zip(arguments, axes, strict=True))
    members = [[v[i] if a == 0 else v for v, a in zip(operands, axes, strict=True)] for i in range(3)]
    loop = [want(member[0], member[1], member[2], g[i]) for i, member in enumerate(members)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop)
    check_equal(jax.jit(jax.vmap(pull, in_axes=(*axes, 0)))(*operands, g), stacked)
    y, vjp = jax.vjp(jax.vmap(dot, in_axes=axes), *operands)
    check_equal(y, stacked[0])
    for mine, theirs, a in zip(vjp(g), stacked[1], axes, strict=True):
        # The factor of LSQ is no power of two: three sums times it are not the sum times it.
        total = theirs if a == 0 else theirs.sum(0)
        np.testing.assert_allclose(mine, total, rtol=1e-6, atol=1e-4 if total.ndim == 0 else 0)


def layers(x: Any, ws: Any, scales: Any, policy: Any = None) -> jax.Array:
    """A scan over square layers."""

    def layer(h: Any, parameters: Any) -> tuple[Any, None]:
        w, scale = parameters
        y = jq.quantized_dot_general(
            h, w, MATRIX, lhs_spec=Quantizer(U8, scale, np.full((1, 1), 128, np.uint8)), rhs_spec=COLUMNS
        )
        return jnp.tanh(y), None

    body = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return (lax.scan(body, x, (ws, scales))[0] ** 2).sum()


@pytest.mark.slow
def test_scan_and_checkpoint(rng: np.random.Generator) -> None:
    """A loop over layers, a scan and a scan that computes again: the same gradients, of all of it or of a part."""
    x = jnp.asarray(rng.normal(size=(16, 24)).astype(F32))
    ws, scales = jnp.asarray(rng.normal(size=(3, 24, 24)).astype(F32)), jnp.full((3,), 0.02, F32)

    def loop(x: Any, ws: Any, scales: Any) -> jax.Array:
        for i in range(3):
            left = Quantizer(U8, scales[i], np.full((1, 1), 128, np.uint8))
            x = jnp.tanh(jq.quantized_dot_general(x, ws[i], MATRIX, lhs_spec=left, rhs_spec=COLUMNS))
        return (x**2).sum()

    everything = jax.jit(jax.grad(layers, (0, 1, 2)))(x, ws, scales)
    recomputed = jax.jit(jax.grad(functools.partial(layers, policy=jq.save_codes), (0, 1, 2)))(x, ws, scales)
    check_equal(recomputed, everything)
    check_equal(jax.jit(jax.grad(layers, 1))(x, ws, scales), everything[1])
    for mine, theirs in zip(everything, jax.jit(jax.grad(loop, (0, 1, 2)))(x, ws, scales), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def list_residuals(f: Any, *arguments: Any) -> list[Any]:
    """What a compiled forward pass hands to the backward pass."""
    return jax.tree.leaves(jax.jit(lambda *arguments: jax.vjp(f, *arguments)[1])(*arguments))


STATIC = Quantizer(U8, F32(0.02), np.full((1, 1), 100, np.uint8))
KEPT: dict[str, tuple[Any, float]] = {
    "a range of its own, symmetric": (I8, 0.26),
    "rows of their own, symmetric": (ROWS, 0.26),
    "4 bits": (Quantizer(I4), 0.26),
    "a range that is given": (STATIC, 0.3),
    "a range of its own, asymmetric": (U8, 0.3),
    "blocks": (Quantizer(QuantSpec(jnp.int8, jq.Blocked(1, 64)), np.full((64, 2), 0.02, F32)), 0.3),
    "rows of a size that 8 does not divide": (STATIC, 0.3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KEPT)
def test_size_of_the_residuals(name: str, rng: np.random.Generator) -> None:
    """Of the activations' float32 bytes at most so much; of the weights a quarter; and the contraction is integer."""
    spec, most = KEPT[name]
    rhs = jq.QuantSpec(jnp.int8, jq.Blocked(0, 64)) if name == "blocks" else QuantSpec(jnp.int8, PerAxis(1))
    columns = 123 if "does not" in name else 128
    x, w = rng.normal(size=(64, columns)).astype(F32), rng.normal(size=(columns, 32)).astype(F32)
    f = lambda x, w: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=spec, rhs_spec=rhs)  # noqa: E731
    residuals = list_residuals(f, x, w)
    of_weights = w.nbytes * (0.26 + 2 / 64) + 4 * 32
    assert sum(v.nbytes for v in residuals) <= x.nbytes * most + of_weights
    assert not [v.shape for v in residuals if v.dtype == F32 and v.size >= w.size], "a float operand is kept"
    program = Program(f, x, w)
    integer = [c for c in program.contractions() if c.result[0] == "s32"]
    assert integer
    assert all(dtype == "s8" for c in integer for dtype, _ in c.operands)


def test_the_gradient_of_a_scale_keeps_its_operand(rng: np.random.Generator) -> None:
    """And only that one: the other operand and the call without that gradient keep codes."""
    x, w, _ = problem(rng)
    floats = lambda *arguments: [v.shape for v in list_residuals(*arguments) if v.dtype == F32 and v.size > 24]  # noqa: E731
    assert floats(lambda x, w, s: dot(x, w, s), x, w, SCALE) == [x.shape]
    assert floats(lambda x, w: dot(x, w, SCALE), x, w) == []
    contract = lambda s: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=None, rhs_spec=Quantizer(I4, s))  # noqa: E731
    assert sorted(floats(contract, SCALE)) == sorted([x.shape, w.shape])


@pytest.mark.slow
def test_a_checkpoint_keeps_codes_alone(rng: np.random.Generator) -> None:
    """Of layers with a gelu behind each: nothing wide but the arguments."""
    x, w = rng.normal(size=(32, 48)).astype(F32), rng.normal(size=(48, 48)).astype(F32)

    def network(x: Any) -> Any:
        for _ in range(3):
            x = jax.nn.gelu(jq.quantized_dot_general(x, w, MATRIX, lhs_spec=STATIC, rhs_spec=COLUMNS))
        return x

    plain, checkpointed = (list_residuals(f, x) for f in (network, jax.checkpoint(network, policy=jq.save_codes)))
    wide = [[v for v in residuals if v.shape == x.shape and v.dtype == F32] for residuals in (plain, checkpointed)]
    assert len(wide[0]) > 3
    assert len(wide[1]) <= 1, "x itself, perhaps"
    narrow = [v for v in checkpointed if v.dtype != F32 or v.shape not in (x.shape, w.shape)]
    assert sum(v.nbytes for v in narrow) <= 3 * (0.3 * x.nbytes + 0.26 * w.nbytes + 4 * 48)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_are_refused(rng: np.random.Generator) -> None:
    """Codes have no derivative: what is asked for one must not be told 0."""
    x, w, _ = problem(rng)
    with pytest.raises(TypeError, match=r"forward-mode autodiff .* custom_vjp"):
        jax.jvp(dot, (x, w, SCALE), (x, w, SCALE))
    once = jax.grad(lambda x, w, scale: (dot(x, w, scale) ** 2).sum(), (0, 1, 2))
    expected = r"quantized_dot_general: operands: expected only first derivatives .*, got the derivative of a gradient"
    for i, value in enumerate((x, w, jnp.asarray(SCALE))):
        twice = jax.grad(lambda v, i=i: sum(d.sum() for d in once(*(x, w, SCALE)[:i], v, *(x, w, SCALE)[i + 1 :])))
        with pytest.raises(TypeError, match=expected):
            twice(value)
    with pytest.raises(TypeError, match=expected):
        jax.hessian(lambda s: (dot(x, w, s) ** 2).sum())(jnp.asarray(SCALE))
    # In g the gradient is linear, and g may have derivatives of its own.
    second = jax.grad(lambda c: jax.grad(lambda x: (c**2 * dot(x, w, SCALE)).sum())(x).sum())
    np.testing.assert_allclose(second(F32(3)), 6 * jax.grad(lambda x: dot(x, w, SCALE).sum())(x).sum(), rtol=1e-5)


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((8,), ("batch",), axis_types=(kind,))


@pytest.mark.slow
def test_a_batch_on_eight_devices(rng: np.random.Generator) -> None:
    """A sharded jit: masks and codes stay where the batch is, and the weights' gradient is all that is exchanged."""
    x, w, g = problem(rng)
    place = [NamedSharding(mesh(AxisType.Auto), PartitionSpec(*axes)) for axes in (("batch",), (), ("batch",))]
    placed = [jax.device_put(v, p) for v, p in zip((x, w, g), place, strict=True)]

    def run(x: Any, w: Any, g: Any) -> Any:
        quantizer = Quantizer(I4, SCALE)
        return jax.vjp(lambda x, w: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=quantizer, rhs_spec=COLUMNS), x, w)[
            1
        ](g)

    compiled = jax.jit(run).lower(*placed).compile()
    check_equal(compiled(*placed), run(x, w, g))
    text = compiled.as_text() or ""
    assert not re.findall(r"(all-gather|all-to-all|collective-permute)(?:-start)?\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [jq.FloatBackward(), jq.Int8Backward()], ids=["float", "int8"])
def test_shard_map(rng: np.random.Generator, backward: Any) -> None:
    """What every device holds gets the sum of the devices' gradients; each quantizes its part of g, all alike."""
    x, w, g = problem(rng)
    g = g.at[::2].set(127.0)  # on each device, in every column

    def part(x: Any, w: Any, scale: Any, g: Any) -> Any:
        return jax.grad(lambda *arguments: (dot(*arguments, backward=backward) * g).sum(), (0, 1, 2))(x, w, scale)

    spec = PartitionSpec("batch")
    out_specs = (spec, PartitionSpec(), PartitionSpec())
    sharded = jax.shard_map(
        part, mesh=mesh(AxisType.Auto), in_specs=(spec, PartitionSpec(), PartitionSpec(), spec), out_specs=out_specs
    )
    actual, exact = jax.jit(sharded)(x, w, SCALE, g), part(x, w, SCALE, g)
    check_equal(actual[:2], exact[:2])
    # Of each device its sum times LSQ's factor, rounded: by the magnitudes of what is summed, at most 8 steps each.
    size = 8 * float((jnp.abs(g) @ jnp.abs(w).T).sum()) / np.sqrt(24 * 7)
    np.testing.assert_allclose(actual[2], exact[2], rtol=0, atol=size * 2.0**-20)


@pytest.mark.slow
def test_explicit_shardings(rng: np.random.Generator) -> None:
    """A mesh whose shardings are in the types: the gradients lie where their operands do."""
    x, w, g = problem(rng)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        place = [PartitionSpec("batch", None), PartitionSpec(None, None), PartitionSpec("batch", None)]
        placed = [jax.device_put(v, p) for v, p in zip((x, w, g), place, strict=True)]
        actual = jax.jit(lambda x, w, g: pull(x, w, jnp.asarray(SCALE), g))(*placed)
        assert [d.sharding.spec for d in actual[1][:2]] == place[:2]
        actual = jax.tree.map(np.asarray, actual)
    exact = want(x, w, jnp.asarray(SCALE), g)
    check_equal(actual[0], exact[0])
    check_equal(actual[1][:2], exact[1][:2])


@pytest.mark.slow
@pytest.mark.parametrize("raw", mark_others_full([False, True], [False]))
def test_keys_of_both_kinds(fixed_rng: np.random.Generator, raw: bool) -> None:
    """A batch of keys under vmap draws as each alone does."""
    single = key(fixed_rng)
    x, w, g = problem(fixed_rng)
    keys = jax.random.split(jax.random.key_data(single) if raw else single, 2)

    def find_gradients(key: Any) -> Any:
        backward = jq.Int8Backward(stochastic_rounding=True)
        left = Quantizer(I4, SCALE * F32(1.7), gradient=jq.StochasticRounding(key))
        call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, backward=backward, key=key)
        y, vjp = jax.vjp(lambda x, w: call(x, w, lhs_spec=left, rhs_spec=COLUMNS), x, w)
        return y, vjp(g * F32(0.3))

    results = [find_gradients(k) for k in keys]
    check_equal(jax.jit(jax.vmap(find_gradients))(keys), jax.tree.map(lambda *v: jnp.stack(v), *results))
    assert (results[0][0] != results[1][0]).any()
    assert (results[0][1][1] != results[1][1][1]).any()
