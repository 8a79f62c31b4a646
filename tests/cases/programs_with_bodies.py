"""Small functions with calls, branches, loops and derivative rules; they are added to `programs.PROGRAMS`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .programs import PROGRAMS, Ids, example

__all__ = ["PROGRAMS"]

# Calls and derivative rules.


@example({"a": (16, 16), "b": (16, 8)}, (6, 16), forms="iii")
def nested_jit(params, x):
    @jax.jit
    def inner(w, x):
        return jax.nn.relu(x @ w)

    @jax.jit
    def outer(params, x):
        return inner(params["b"], inner(params["a"], inner(params["a"], x)))

    return outer(params, x)


@example({"w": (16, 16)}, (6, 16), forms="i")
def named_call(params, x):
    with jax.named_scope("outer"):
        return jax.named_call(lambda w, x: x @ w, name="inner")(params["w"], x)


@example({"a": (16, 16), "b": (16, 16)}, (6, 16), forms="ii")
def remat(params, x):
    return jax.checkpoint(lambda params, x: jax.nn.relu(x @ params["a"]) @ params["b"])(params, x)


@example({"a": (16, 16), "b": (16, 16)}, (6, 16), forms="ii")
def remat_in_remat(params, x):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def inner(w, x):
        return jax.nn.relu(x @ w)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def outer(params, x):
        return inner(params["b"], inner(params["a"], x))

    return outer(params, x)


@jax.custom_jvp
def _double_slope(x):
    return jax.nn.relu(x)


@_double_slope.defjvp
def _double_slope_jvp(primals, tangents):
    return _double_slope(*primals), 2 * tangents[0] * (primals[0] > 0).astype(jnp.float32)


@example({"a": (16, 16), "b": (16, 8)}, (6, 16), forms="ii")
def custom_jvp_between(params, x):
    return _double_slope(x @ params["a"]) @ params["b"]


@jax.custom_jvp
def _dense(w, x):
    return x @ w


@_dense.defjvp
def _dense_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return _dense(w, x), x @ dw + dx @ w


@example({"w": (16, 24)}, (6, 16), forms="i")
def custom_jvp_around(params, x):
    return _dense(params["w"], x)


@jax.custom_vjp
def scaled_dense(w, x):
    """Return a product with seven times the gradient of a product."""
    return x @ w


def _scaled_dense_fwd(w, x):
    return scaled_dense(w, x), (w, x)


def _scaled_dense_bwd(residuals, g):
    w, x = residuals
    return 7 * x.T @ g, 7 * g @ w.T


scaled_dense.defvjp(_scaled_dense_fwd, _scaled_dense_bwd)


@example({"w": (16, 24)}, (6, 16), forms="i")
def custom_vjp_around(params, x):
    return scaled_dense(params["w"], x)


@example({"a": (16, 24)}, (6, 16), forms="ii")
def gradient(params, x):
    return jax.grad(lambda x: jnp.sum((x @ params["a"]) ** 2))(x)


@example({"w": (3, 3, 4, 8)}, (2, 8, 8, 4), forms="ii")
def gradient_of_convolution(params, x):
    def loss(x):
        return jnp.sum(lax.conv_general_dilated(x, params["w"], (2, 2), "SAME", None, None, _IMAGES) ** 2)

    return jax.grad(loss)(x)


_IMAGES = ("NHWC", "HWIO", "NHWC")


@example({"w": (16, 24)}, (3, 6, 16), forms="i")
def vmap_over_inputs(params, x):
    return jax.vmap(lambda x: x @ params["w"])(x)


@example({"w": (3, 16, 24), "b": (3, 24)}, (6, 16), forms="i")
def vmap_over_weights(params, x):
    return jax.vmap(lambda w, b: x @ w + b[None])(params["w"], params["b"])


@example({"w": (16, 16), "b": (8, 16)}, (6, 16), forms="iii")
def calls_that_return_a_weight(params, x):
    x = x @ jnp.flip(params["w"], 0) @ jax.jit(lambda w: w.reshape(16, 16).T)(params["w"])
    return x @ jax.checkpoint(lambda b: b.T)(params["b"])


@example({"w": (16, 16)}, (6, 16), forms="if")
def remat_that_uses_and_returns_a_weight(params, x):
    x, w = jax.checkpoint(lambda w, x: (x @ w, w.T))(params["w"], x)
    return x @ w


@example({"w": (16, 16)}, (6, 16), forms="i")
def loop_that_returns_a_weight(params, x):
    w, y = lax.fori_loop(0, 2, lambda _, state: (state[0], state[1] + 1), (params["w"], x))
    return y @ w


# Branches.


@example({"a": (16, 24), "b": (24, 16)}, (6, 16), forms="ii")
def cond(params, x):
    branches = (lambda params: x @ params["a"], lambda params: x @ params["b"].T)
    return lax.cond(x.shape[0] * x.max() < 100.0, *branches, params)


@example({"w": (3, 16, 16)}, (6, 16), Ids((), 3), forms="iii")
def switch(params, x, index):
    branches = [lambda x, place=place: x @ params["w"][place] for place in range(3)]
    return lax.switch(index, branches, x)


@example({"a": (16, 24), "b": (16, 24)}, (6, 16), Ids((), 2), forms="f")
def cond_that_returns_a_weight(params, x, index):
    return x @ lax.cond(index > 0, lambda: params["a"], lambda: params["b"])


@example({"w": (16, 16)}, (6, 16), Ids((), 2), forms="iii")
def loop_in_branch(params, x, index):
    def loop(x):
        return lax.scan(lambda x, _: (jax.nn.relu(x @ params["w"]), None), x, length=2)[0]

    return lax.cond(index > 0, loop, lambda x: x @ params["w"][:, ::-1] @ params["w"].T, x)


# Loops.


@example({"w": (3, 16, 16)}, (6, 16), forms="i")
def scan_over_layers(params, x):
    return lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, params["w"])[0]


@example({"w": (3, 16, 16), "b": (3, 16)}, (6, 16), forms="i")
def scan_reversed(params, x):
    def step(x, layer):
        y = jax.nn.relu(x @ layer["w"].T + layer["b"][None])
        return y, y.sum(0)

    return lax.scan(step, x, params, reverse=True, unroll=3)


@example({"a": (16, 8), "h": (8, 8), "out": (8, 4)}, (5, 6, 16), forms="iii")
def scan_over_time(params, x):
    def step(h, x):
        h = jax.nn.relu(x @ params["a"] + h @ params["h"])
        return h, h

    return lax.scan(step, jnp.zeros((x.shape[1], 8)), x)[1] @ params["out"]


@example({"w": (3, 8, 8), "a": (3, 8, 8)}, (5, 6, 8), forms="ii")
def layers_in_time(params, x):
    def step(h, x):
        def layer(x, part):
            w, a, h = part
            y = jax.nn.relu(x @ w + h @ a)
            return y, y

        last, h = lax.scan(layer, x, (params["w"], params["a"], h))
        return h, last

    return lax.scan(step, jnp.zeros((3, *x.shape[1:])), x)[1]


@example({"w": (3, 8, 8), "a": (3, 8, 8)}, (5, 6, 8), forms="ii")
def time_in_layers(params, x):
    def layer(x, part):
        w, a = part

        def step(h, x):
            h = jax.nn.relu(x @ w + h @ a)
            return h, h

        return lax.scan(step, jnp.zeros(x.shape[1:]), x)[1], None

    return lax.scan(layer, x, (params["w"], params["a"]))[0]


@example({"w": (2, 3, 16, 16)}, (6, 16), forms="i")
def layers_in_groups(params, x):
    def group(x, ws):
        return lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)

    return lax.scan(group, x, params["w"])[0]


@example({"w": (3, 16, 16)}, (6, 16), forms="ii")
def scanned_and_used_outside(params, x):
    y, _ = lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, params["w"])
    return y @ params["w"][0].T


@example({"w": (3, 16, 24)}, (6, 16), forms="i")
def map_over_weights(params, x):
    return lax.map(lambda w: x @ w, params["w"])


@example({"w": (3, 4, 4, 16)}, (6, 16), forms="i")
def scan_over_reshaped_weights(params, x):
    return lax.scan(lambda x, w: (x @ w.T, None), x, params["w"].reshape(3, 16, 16).swapaxes(1, 2))[0]


@example({"a": (16, 16), "b": (16, 16)}, (6, 16), forms="i")
def weights_stacked_in_program(params, x):
    return lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, jnp.stack([params["a"], params["b"]]))[0]


@example({"w": (16, 16)}, (6, 16), forms="i")
def weight_carried_by_scan(params, x):
    def step(carry, _):
        x, w = carry
        return (jax.nn.relu(x @ w), w), None

    return lax.scan(step, (x, params["w"]), length=3)[0]


@example({"a": (16, 16), "b": (16, 16)}, (6, 16), forms="f")
def weights_swapped_by_scan(params, x):
    def step(carry, _):
        x, a, b = carry
        return (jax.nn.relu(x @ a), b, a), None

    return lax.scan(step, (x, params["a"], params["b"]), length=3)[0][0]


@example({"w": (16, 16)}, (6, 16), forms="i")
def fori_loop(params, x):
    return lax.fori_loop(0, 3, lambda _, x: jax.nn.relu(x @ params["w"]), x)


@example({"w": (16, 16)}, (6, 16), Ids((), 3), forms="i", is_differentiable=False)
def while_loop(params, x, count):
    def step(state):
        left, x, w = state
        return left - 1, jax.nn.relu(x @ w), w

    return lax.while_loop(lambda state: state[0] > 0, step, (count + 1, x, params["w"]))


@example({"w": (16, 16)}, (6, 16), Ids((6,), 4), forms="i", is_differentiable=False)
def while_loop_of_each_example(params, x, counts):
    def run(x, count):
        return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, jax.nn.relu(s[1] @ params["w"])), (count, x))

    return jax.vmap(run)(x, counts)


@example({"w": (16, 16)}, (6, 16), forms="fi", is_differentiable=False)
def contraction_in_condition(params, x):
    def is_large(x):
        return jnp.abs(x @ params["w"]).max() > 1.0

    return lax.while_loop(is_large, lambda x: 0.5 * x @ params["w"] + 0.1 * x, x)


@example({"table": (16, 8), "w": (3, 8, 8)}, Ids((4, 6), 16), forms="lifii")
def decoder(params, ids):
    @jax.checkpoint
    def block(x, w):
        scores = jnp.einsum("btd,bsd->bts", x @ w, x)
        return x + jax.nn.relu(x @ w.T) * scores.sum(-1, keepdims=True), None

    x, _ = lax.scan(block, params["table"][ids], params["w"])
    return x @ params["table"].T
