"""Random programs over three weights: every contraction is listed, and `apply` has the bits of `fake_apply`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxquant as jq

from ..support.contraction_crawler import count_contractions, count_rows
from ..support.prepared import RECIPES, convert_and_apply, find_ranges, find_sqnr, same_trees

WIDTH, LAYERS = 16, 2

# Each way of moving the elements of a square matrix gives a square matrix.
MOVES = {
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(4, 4, 16).transpose(1, 0, 2).reshape(16, 16),
    "heads": lambda w: w.reshape(16, 2, 8).transpose(0, 2, 1).reshape(16, 16),
    "squeeze": lambda w: w[None, :, :][0],
    "halves of columns": lambda w: jnp.concatenate([w[:, 8:], w[:, :8]], 1),
    "halves of rows": lambda w: jnp.concatenate([w[8:], w[:8]], 0),
    "split": lambda w: jnp.concatenate(jnp.split(w, 4, axis=1)[::-1], axis=1),
    "dynamic slice": lambda w: lax.dynamic_slice(w, (0, 0), (16, 16)),
    "broadcast": lambda w: jnp.broadcast_to(w[:, None], (16, 2, 16))[:, 1],
    "device": jax.device_put,
    "flip": lambda w: w[::-1],
    "unstack": lambda w: jnp.concatenate(jnp.unstack(w.reshape(16, 2, 8), axis=1)[::-1], axis=1),
    "barrier": lambda w: lax.optimization_barrier((w, w))[1],
    "columns twice": lambda w: jnp.repeat(w[:, :8], 2, axis=1),
    "computed": lambda w: w + jnp.float32(0.125),
}


def _dots(place):
    """Return the step that multiplies with a moved weight."""
    moves = st.lists(st.sampled_from(sorted(MOVES)), max_size=2)
    sides = st.sampled_from(["right", "left", "both"])
    return st.tuples(st.just("dot"), place, moves, sides)


def _programs(place, depth):
    steps = [_dots(place), st.tuples(st.just("relu"))]
    if depth:
        inner = _programs(place, depth - 1)
        for name in ("jit", "remat", "scan", "fori", "map", "vmapped cond"):
            steps.append(st.tuples(st.just(name), inner))
        steps.append(st.tuples(st.just("cond"), inner, inner))
        layers = _programs(st.sampled_from(["a", "b", "layer"]), depth - 1)
        steps += [st.tuples(st.just("layers"), layers), st.tuples(st.just("stacked layers"), layers)]
        moves = st.sampled_from(["same", *sorted(MOVES)])
        steps.append(st.tuples(st.just("carried"), _programs(st.sampled_from(["a", "carried"]), depth - 1), moves))
    return st.lists(st.one_of(steps), min_size=1, max_size=3)


def _run(program, params, x):
    for step in program:
        x = _STEPS[step[0]](step, params, x)
    return x


def _dot(step, params, x):
    _, place, moves, side = step
    w = params[place]
    for move in moves:
        w = MOVES[move](w)
    sides = {
        "right": lambda: x @ w,
        "left": lambda: (w @ x.T).T,
        "both": lambda: 0.5 * (w @ x.T).T + x @ w,
    }
    y = sides[side]()
    # Residual and bounded: otherwise long programs amplify any error. These operations round in one way only.
    return x + 0.5 * (y / (1 + jnp.abs(y)))


def _scan(step, params, x):
    return lax.scan(lambda x, _: (_run(step[1], params, x), None), x, length=2)[0]


def _layers(step, params, x):
    def body(x, layer):
        return _run(step[1], {**params, "layer": layer}, x), None

    stack = params["stack"] if step[0] == "layers" else jnp.stack([params["b"], params["a"].T])
    return lax.scan(body, x, stack)[0]


def _carried(step, params, x):
    """Return the result of a loop that moves a weight in each iteration."""
    move = MOVES.get(step[2], lambda w: w)

    def body(carry, _):
        x, w = carry
        return (_run(step[1], {**params, "carried": w}, x), move(w)), None

    return lax.scan(body, (x, params["b"]), length=2)[0][0]


def _vmapped_cond(step, params, x):
    def choose(row):
        return lax.cond(row[0] > 0, lambda row: _run(step[1], params, row[None])[0], lambda row: row, row)

    return jax.vmap(choose)(x)


_STEPS = {
    "dot": _dot,
    "relu": lambda step, params, x: jax.nn.relu(x) + 0.25 * x,
    "jit": lambda step, params, x: jax.jit(lambda params, x: _run(step[1], params, x))(params, x),
    "remat": lambda step, params, x: jax.checkpoint(lambda params, x: _run(step[1], params, x))(params, x),
    "scan": _scan,
    "fori": lambda step, params, x: lax.fori_loop(0, 2, lambda _, x: _run(step[1], params, x), x),
    "map": lambda step, params, x: lax.map(lambda x: _run(step[1], params, x), jnp.stack([x, x[::-1]]))[0],
    "cond": lambda step, params, x: lax.cond(
        x.sum() > 0, lambda x: _run(step[1], params, x), lambda x: _run(step[2], params, x), x
    ),
    "layers": _layers,
    "stacked layers": _layers,
    "carried": _carried,
    "vmapped cond": _vmapped_cond,
}


@settings(max_examples=2, deadline=None)
@given(
    program=_programs(st.sampled_from(["a", "b"]), 2),
    recipe=st.sampled_from(["w8a8_dynamic", "w8a8_static", "weight_only_int8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_program(program, recipe, seed):
    rng = np.random.default_rng(seed)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "stack": (LAYERS, WIDTH, WIDTH)}
    params = {name: jnp.asarray(rng.normal(0, WIDTH**-0.5, shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(0, 1, (6, WIDTH)), jnp.float32)

    def apply(params, x):
        return _run(program, params, x)

    prepared = jq.prepare(apply, params, x, rules=RECIPES[recipe])
    assert count_rows(prepared.coverage) == count_contractions(apply, params, x)
    ranges = find_ranges(prepared, params, x)
    actual = convert_and_apply(prepared, params, ranges, x)

    @jax.jit
    def simulate(params, ranges, x):
        # Traced: the ranges of a branch that the batch does not take are NaN, which known ranges may not be.
        return prepared.fake_apply(prepared.trainable(params, ranges), x)

    same_trees(actual, simulate(params, ranges, x))
    assert find_sqnr(actual, jax.jit(apply)(params, x)) > 10
