"""What the package relies on in JAX's programs. If one of these fails, read `jaxquant/_program/jaxpr.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from jaxquant._program import jaxpr

from ..support.contraction_crawler import list_primitives

X, W = jnp.ones((4, 8)), jnp.ones((3, 8, 8))


def _find(function, name, *arguments):
    """Return the first equation with a primitive of this name."""
    program = jaxpr.trace(function, *arguments).program
    return next(equation for equation in program.eqns if equation.primitive.name == name)


def _relu_layer(x, w):
    return jax.nn.relu(x @ w), x.sum()


@jax.custom_vjp
def _identity(x):
    return 1.0 * x


_identity.defvjp(lambda x: (_identity(x), None), lambda _, g: (3 * g,))


@jax.custom_jvp
def _negative(x):
    return -x


_negative.defjvp(lambda primals, tangents: (_negative(*primals), 5 * tangents[0]))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("jit", jax.jit(jnp.sin)),
        ("remat2", jax.checkpoint(jnp.sin)),
        ("custom_vjp_call", _identity),
        ("custom_jvp_call", _negative),
        ("cond", lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)),
        ("while", lambda x: lax.while_loop(lambda x: x.sum() > 0, lambda x: x - 1, x)),
        ("scan", lambda x: lax.scan(lambda c, x: (c, x), None, x)[1]),
        ("dot_general", lambda x: x @ x.T),
        ("gather", lambda x: x[jnp.array([1, 2])]),
        ("split", lambda x: jnp.split(x, 2)[0]),
        ("concatenate", lambda x: jnp.concatenate([x, x])),
        ("transpose", lambda x: x.T),
        ("reshape", lambda x: x.reshape(-1)),
        ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 4, 8))),
        ("slice", lambda x: x[1:3]),
        ("squeeze", lambda x: jnp.squeeze(x[:1], 0)),
        ("convert_element_type", lambda x: x.astype(jnp.bfloat16)),
        ("dynamic_slice", lambda x: lax.dynamic_slice(x, (x.argmax(), 0), (2, 2))),
        ("ragged_dot_general", lambda x: lax.ragged_dot(x, W, jnp.array([1, 2, 1]))),
    ],
)
def test_names_of_primitives(name, function):
    assert name in list_primitives(function, X)


@pytest.mark.parametrize("name", ["jit", "remat2", "custom_vjp_call", "custom_jvp_call"])
def test_calls_have_one_body_with_their_operands(name):
    wrap = {
        "jit": jax.jit,
        "remat2": jax.checkpoint,
        "custom_vjp_call": lambda f: _identity,
        "custom_jvp_call": lambda f: _negative,
    }
    equation = _find(wrap[name](jnp.sin), name, X)
    body = jaxpr.read_call(equation)
    assert len(body.program.invars) == len(equation.invars)
    assert len(body.program.outvars) == len(equation.outvars)
    assert len(body.constants) == len(body.program.constvars)


@pytest.mark.parametrize("constants", [0, 2])
@pytest.mark.parametrize("carries", [0, 1, 3])
@pytest.mark.parametrize("stacked", [0, 2])
def test_layout_of_scan(constants, carries, stacked):
    shared = [jnp.full((2, 3), place, jnp.float32) for place in range(constants)]
    xs = [jnp.ones((5, 2, 3))] * stacked

    def step(carry, xs):
        total = sum([*shared, *carry, *xs], jnp.zeros((2, 3)))
        return [total + 0.5] * carries, (total, total.sum())

    def run(shared_and_start, xs):
        shared[:], start = shared_and_start
        return lax.scan(step, start, xs, length=5, reverse=True, unroll=2)

    equation = _find(run, "scan", (list(shared), [jnp.ones((2, 3))] * carries), xs)
    scan = jaxpr.read_scan(equation)
    assert (scan.constants, scan.carries, scan.length, scan.reverse) == (constants, carries, 5, True)
    assert scan.unroll == 2
    # Constants, carries and stacked operands come in this order.
    ranks = [len(jaxpr.read_shape(v)) for v in equation.invars]
    assert ranks == [2] * (constants + carries) + [3] * stacked
    assert [len(jaxpr.read_shape(v)) for v in equation.outvars] == [2] * carries + [3, 1]


def test_layout_of_while():
    limit, moved = jnp.float32(3), jnp.float32(1)

    def run(x, limit, moved):
        return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + moved, s[0]), (x, x))

    loop = jaxpr.read_while(_find(run, "while", jnp.float32(0), limit, moved))
    assert (loop.condition_constants, loop.body_constants) == (1, 1)
    assert len(loop.body.program.outvars) == 2
    assert len(loop.condition.program.outvars) == 1


def test_branches_of_cond_are_in_the_order_of_the_index():
    equation = _find(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), "cond", X)
    names = [body.program.eqns[0].primitive.name for body in jaxpr.read_branches(equation)]
    assert names == ["cos", "sin"]
    assert jaxpr.read_dtype(equation.invars[0]) == np.int32


def test_programs_are_opened_in_both_forms():
    closed = jax.make_jaxpr(lambda x: x + np.arange(8, dtype=np.float32)[None])(X)
    body = jaxpr.open_body(closed)
    assert len(body.program.constvars) == len(body.constants)
    assert jaxpr.is_program(closed)
    assert isinstance(body.program, core.Jaxpr)


def test_programs_are_found_in_tuples():
    def solve(x):
        return lax.custom_linear_solve(lambda v: W[0] @ v, x, lambda matvec, b: matvec(b), symmetric=True)

    equation = _find(solve, "custom_linear_solve", jnp.ones(8))
    assert any(e.primitive.name == "dot_general" for body in jaxpr.list_bodies(equation) for e in body.program.eqns)


def test_an_equation_keeps_its_derivative_rule():
    for function, name, slope in ((_identity, "custom_vjp_call", 3), (_negative, "custom_jvp_call", 5)):
        equation = _find(function, name, X)
        gradient = jax.grad(lambda x, equation=equation: jaxpr.evaluate(equation, [x])[0].sum())(X)
        np.testing.assert_array_equal(gradient, slope)


def test_an_equation_can_be_vectorized_and_compiled():
    equation = _find(lambda x: x @ x.T, "dot_general", X)
    actual = jax.jit(jax.vmap(lambda x: jaxpr.evaluate(equation, [x, x.T])[0]))(jnp.stack([X, 2 * X]))
    np.testing.assert_array_equal(actual, [np.full((4, 4), 8), np.full((4, 4), 32)])


def test_dropped_results_are_marked():
    def step(x):
        return jax.jit(lambda x: (x + 1, x * 2))(x)[1]

    equation = _find(step, "jit", X)
    results = jaxpr.evaluate(equation, [X])
    for variable, result in zip(equation.outvars, results, strict=True):
        assert jaxpr.is_unused(variable) == (result is None)
    np.testing.assert_array_equal(results[1], 2 * X)


def test_place_and_scope_of_an_equation():
    def function(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x @ x.T

    equation = _find(function, "dot_general", X)
    assert jaxpr.read_scope(equation) == "outer/inner"
    assert "test_jaxpr.py:" in jaxpr.locate(equation)


def test_scope_inside_of_a_call_starts_anew():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return x @ x.T

    def function(x):
        with jax.named_scope("outer"):
            return inner(x)

    equation = _find(function, "jit", X)
    assert jaxpr.read_scope(equation) == "outer"
    assert jaxpr.read_scope(jaxpr.read_call(equation).program.eqns[1]) in ("inner", "outer/inner")


def test_literals_are_no_variables():
    equation = _find(lambda x: x + 2.0, "add", X)
    assert [jaxpr.is_literal(atom) for atom in equation.invars] == [False, True]
    assert equation.invars[1].val == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["prevent_cse", "policy"])
def test_parameters_of_remat(name):
    policy = jax.checkpoint_policies.dots_saveable
    function = functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)(jnp.sin)
    assert _find(function, "remat2", X).params[name] == {"prevent_cse": False, "policy": policy}[name]


def test_parameters_of_a_lookup():
    ids = jnp.array([[1], [2]])
    fill = _find(lambda x: jnp.take(x, ids, 0, mode="fill", fill_value=7), "jit", X)
    (gather,) = [e for e in _list_inner(fill) if e.primitive.name == "gather"]
    assert gather.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    assert gather.params["fill_value"] == 7
    numbers = gather.params["dimension_numbers"]
    assert numbers.start_index_map == (0,)
    assert numbers.collapsed_slice_dims == (0,)
    assert numbers.offset_dims == (2,)
    assert gather.params["slice_sizes"] == (1, 8)


def _list_inner(equation):
    for body in jaxpr.list_bodies(equation):
        for inner in body.program.eqns:
            yield inner
            yield from _list_inner(inner)


def test_shardings_of_an_inner_jit():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    equation = _find(jax.jit(jnp.sin, in_shardings=split, out_shardings=split), "jit", X)
    assert equation.params["in_shardings"] == (split,)
    assert equation.params["out_shardings"] == (split,)
    plain = _find(jax.jit(jnp.sin), "jit", X)
    assert not isinstance(plain.params["in_shardings"][0], jax.sharding.Sharding)
