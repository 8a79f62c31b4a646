"""Small functions, each of which shows one way in which a program uses its parameters.

The functions are named after what they show. `PROGRAMS` holds all of them; those with loops, branches and calls are in
`programs_with_bodies`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Ids(NamedTuple):
    """An input of integers from 0 to `limit`, without it."""

    shape: tuple[int, ...]
    limit: int


class Shape(tuple[int, ...]):
    """The shape of a parameter or an input of floats."""


class Example(NamedTuple):
    """A function of parameters and inputs.

    Attributes:
        function: the function.
        params: its parameters, a pytree with a `Shape` for each array.
        inputs: its inputs: a `Shape` or `Ids` for each.
        forms: what becomes of its contractions and lookups under w8a8, in program order: i for integer, l for a lookup,
            f for float.
        is_differentiable: whether JAX can differentiate it in reverse mode.
    """

    function: Callable[..., Any]
    params: Any
    inputs: tuple[Shape | Ids, ...]
    forms: str
    is_differentiable: bool = True

    def sample(self, rng: np.random.Generator) -> tuple[Any, tuple[jax.Array, ...]]:
        """Return parameters and inputs."""
        params = jax.tree.map(lambda shape: _sample_weight(rng, shape), self.params, is_leaf=_is_shape)
        return params, self.sample_inputs(rng)

    def sample_inputs(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """Return inputs."""
        return tuple(
            jnp.asarray(rng.integers(0, x.limit, x.shape), jnp.int32) if isinstance(x, Ids) else _sample(rng, x)
            for x in self.inputs
        )


def _is_shape(value: Any) -> bool:
    return isinstance(value, Shape)


def _sample(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(0, 1, shape), jnp.float32)


def _sample_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(0, 1, shape) / math.sqrt(16), jnp.float32)


PROGRAMS: dict[str, Example] = {}


def example(
    params: dict[str, Any], *inputs: tuple[int, ...] | Ids, forms: str, is_differentiable: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function to `PROGRAMS`."""
    shapes = {name: _read_shapes(value) for name, value in params.items()}
    arguments = tuple(x if isinstance(x, Ids) else Shape(x) for x in inputs)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = Example(function, shapes, arguments, forms, is_differentiable)
        return function

    return register


def _read_shapes(value: Any) -> Any:
    return {name: _read_shapes(entry) for name, entry in value.items()} if isinstance(value, dict) else Shape(value)


# Products.


@example({"w": (16, 24)}, (6, 16), forms="i")
def product(params, x):
    return x @ params["w"]


@example({"w": (24, 16)}, (6, 16), forms="i")
def transposed_weight(params, x):
    return x @ params["w"].T


@example({"w": (24, 16)}, (16, 6), forms="i")
def weight_on_the_left(params, x):
    return params["w"] @ x


@example({"a": (16, 24), "b": (24, 8)}, (6, 16), forms="ii")
def chain_of_operators(params, x):
    return x @ params["a"] @ params["b"]


@example({"w": (16,)}, (6, 16), forms="i")
def weight_of_rank_1(params, x):
    return x @ params["w"]


@example({"w": (16, 24)}, (16,), forms="i")
def input_of_rank_1(params, x):
    return x @ params["w"]


@example({"w": (4, 4, 24)}, (6, 4, 4), forms="i")
def two_contracted_axes(params, x):
    return jnp.tensordot(x, params["w"], 2)


@example({"w": (3, 16, 24)}, (3, 6, 16), forms="i")
def batched_weights(params, x):
    return jnp.einsum("ebi,eio->ebo", x, params["w"])


@example({"w": (3, 16, 24)}, (6, 16), forms="i")
def all_experts(params, x):
    return jnp.einsum("bi,eio->ebo", x, params["w"])


@example({"a": (16, 24), "b": (24, 8)}, (6, 16), forms="ii")
def einsum_of_three(params, x):
    return jnp.einsum("bi,ij,jk->bk", x, params["a"], params["b"])


@example({"q": (16, 16), "k": (16, 16), "v": (16, 16), "out": (16, 16)}, (2, 6, 16), forms="iiiffi")
def attention(params, x):
    q, k, v = (x @ params[name] for name in "qkv")
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.relu(scores), v) @ params["out"]


@example({"w": (16, 24)}, (6, 16), forms="i")
def bfloat16_casts(params, x):
    return (x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32)


@example({"w": (16, 24)}, (6, 16), forms="i")
def preferred_element_type(params, x):
    x, w = x.astype(jnp.bfloat16), params["w"].astype(jnp.bfloat16)
    return lax.dot(x, w, preferred_element_type=jnp.float32)


@example({"w": (16, 24)}, (6, 16), Ids((6, 16), 4), forms="ii")
def contraction_of_integers(params, x, ids):
    return x @ params["w"], ids @ ids.T


# Moved parameters.


@example({"w": (16, 24)}, (6, 16), forms="i")
def reshape_to_heads(params, x):
    return jnp.einsum("bi,iho->bho", x, params["w"].reshape(16, 4, 6))


@example({"w": (4, 4, 24)}, (6, 16), forms="i")
def reshape_of_heads(params, x):
    return x @ params["w"].reshape(16, 24)


@example({"w": (6, 4, 16)}, (6, 16), forms="i")
def reshape_then_transpose(params, x):
    return x @ params["w"].reshape(24, 16).T


@example({"w": (16, 24)}, (6, 16), forms="ii")
def slices(params, x):
    return x @ params["w"][:, :8] + x[:, 4:12] @ params["w"][4:12, 16:]


@example({"w": (16, 24)}, (6, 16), forms="i")
def strided_slice(params, x):
    return x @ params["w"][:, 1::3]


@example({"w": (1, 16, 24)}, (6, 16), forms="ii")
def squeeze(params, x):
    return x @ params["w"][0] + x @ jnp.squeeze(params["w"], 0)


@example({"w": (16, 24)}, (3, 6, 16), forms="i")
def broadcast(params, x):
    return jnp.einsum("eni,eio->eno", x, jnp.broadcast_to(params["w"], (3, 16, 24)))


@example({"w": (8, 24)}, (6, 16), forms="i")
def tile(params, x):
    return x @ jnp.tile(params["w"], (2, 1))


@example({"w": (3, 8, 8)}, (3, 16), forms="i")
def tile_of_three_axes(params, x):
    return jnp.einsum("bi,eio->beo", x, jnp.tile(params["w"], (2, 2, 3)))


@example({"w": (16, 24)}, (6, 16), forms="i")
def reversed_axes(params, x):
    return x @ params["w"][::-1, ::-1]


@example({"w": (4, 6, 16)}, (6, 16), (5, 6), forms="ii")
def merged_and_apart(params, x, y):
    return x @ params["w"].reshape(24, 16).T, jnp.einsum("bh,khi->bki", y, params["w"])


@example({"w": (4, 6, 16)}, (6, 16), (5, 4), forms="ii")
def merged_and_slow_part(params, x, y):
    return x @ params["w"].reshape(24, 16).T, jnp.einsum("bk,khi->bhi", y, params["w"])


@example({"w": (24, 16)}, (6, 16), (5, 4), forms="ii")
def split_and_whole(params, x, y):
    return x @ params["w"].T, jnp.einsum("bk,khi->bhi", y, params["w"].reshape(4, 6, 16))


@example({"a": (8, 24), "b": (8, 24)}, (6, 16), forms="fi")
def concatenate_inputs_and_use_one(params, x):
    return x @ jnp.concatenate([params["a"], params["b"]]) + x[:, :8] @ params["a"]


@example({"w": (16, 12)}, (6, 16), forms="i")
def repeat(params, x):
    return x @ jnp.repeat(params["w"], 2, axis=1)


@example({"w": (16, 24)}, (6, 16), forms="iii")
def split_outputs(params, x):
    q, k, v = (x @ part for part in jnp.split(params["w"], 3, axis=1))
    return q * k + v


@example({"w": (16, 24)}, (6, 16), forms="ii")
def split_inputs(params, x):
    first, second = jnp.split(params["w"], 2)
    return x[:, :8] @ first + x[:, 8:] @ second


@example({"q": (16, 8), "k": (16, 8), "v": (16, 8)}, (6, 16), forms="i")
def concatenate_outputs(params, x):
    q, k, v = jnp.split(x @ jnp.concatenate([params["q"], params["k"], params["v"]], 1), 3, -1)
    return q * k + v


@example({"a": (8, 16), "b": (16, 16)}, (6, 16), forms="i")
def concatenate_then_transpose(params, x):
    return x @ jnp.concatenate([params["a"], params["b"]]).T


@example({"a": (8, 24), "b": (8, 24)}, (6, 16), forms="f")
def concatenate_inputs(params, x):
    return x @ jnp.concatenate([params["a"], params["b"]])


@example({"a": (16, 8), "b": (16, 8)}, (6, 16), forms="ii")
def concatenate_and_use_alone(params, x):
    y = x @ jnp.concatenate([params["a"], params["b"]], 1)
    return y[:, :8] @ params["a"].T


@example({"w": (16, 16)}, (6, 16), forms="ii")
def both_axes_contracted(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["w"].T


@example({"w": (16, 24)}, (6, 16), Ids((), 16), forms="i")
def dynamic_slice_of_outputs(params, x, start):
    return x @ lax.dynamic_slice_in_dim(params["w"], start, 8, 1)


@example({"w": (24, 24)}, (6, 16), Ids((), 8), forms="i")
def dynamic_slice_of_inputs(params, x, start):
    return x @ lax.dynamic_slice_in_dim(params["w"], start, 16, 0)


@example({"w": (3, 16, 16)}, (6, 16), Ids((), 3), forms="i")
def layer_by_index(params, x, index):
    return x @ lax.dynamic_index_in_dim(params["w"], index, keepdims=False)


@example({"w": (16, 24)}, (6, 16), forms="i")
def stop_gradient(params, x):
    return x @ lax.stop_gradient(params["w"]) + x.sum()


# Lookups.


@example({"table": (16, 24)}, Ids((2, 6), 16), forms="l")
def lookup(params, ids):
    return params["table"][ids]


@example({"table": (16, 24)}, Ids((6,), 16), forms="li")
def tied_embedding(params, ids):
    return params["table"][ids] @ params["table"].T


@example({"table": (24, 16)}, Ids((6,), 16), forms="l")
def lookup_of_columns(params, ids):
    return jnp.take(params["table"], ids, axis=1)


@example({"table": (16, 24)}, Ids((2, 6), 16), forms="l")
def lookup_of_one_entry_under_vmap(params, ids):
    return jax.vmap(jax.vmap(lambda i: params["table"][i]))(ids)


@example({"table": (3, 16, 4)}, Ids((6,), 32), forms="ll")
def lookup_of_one_column_under_vmap(params, ids):
    take = functools.partial(lax.dynamic_index_in_dim, params["table"], axis=1)
    return jax.vmap(take)(ids), jax.vmap(functools.partial(take, keepdims=False), out_axes=1)(ids)


@example({"table": (16, 24)}, Ids((6,), 16), forms="f")
def lookup_of_windows(params, ids):
    return jax.vmap(lambda i: lax.dynamic_slice_in_dim(params["table"], i, 2))(ids)


@example({"table": (16, 24)}, Ids((6,), 16), forms="f")
def lookup_in_a_computed_table(params, ids):
    return (4 * params["table"])[ids]


@example({"table": (32, 32), "scale": (32,), "w": (32, 32)}, Ids((), 16), forms="ii")
def embedding_of_one_token(params, token):
    x = params["table"][token]
    x = x * lax.rsqrt(jnp.mean(x * x) + 1e-6) * params["scale"]
    return x @ params["w"] @ params["table"].T


@example({"table": (16, 8), "w": (8, 8)}, Ids((4,), 16), forms="ii")
def embedding_of_one_token_next_to_a_weight(params, ids):
    return lax.map(
        lambda token: (params["table"][token] @ params["w"], params["table"][token] @ params["table"].T), ids
    )


@example({"table": (8, 24)}, Ids((12,), 32), forms="lllll")
def lookup_out_of_range(params, ids):
    ids = ids - 16
    modes = [jnp.take(params["table"], ids, axis=0, mode=mode) for mode in ("clip", "wrap")]
    filled = [jnp.take(params["table"], ids, axis=0, mode="fill", fill_value=value) for value in (0.0, 0.5)]
    return [*modes, *filled, params["table"].at[ids].get(mode="fill", fill_value=2)]


@example({"table": (16, 24)}, Ids((6,), 16), forms="i")
def one_hot(params, ids):
    return jax.nn.one_hot(ids, 16) @ params["table"]


@example({"w": (3, 16, 24)}, (6, 16), Ids((6,), 3), forms="lf")
def expert_of_each_row(params, x, ids):
    return jnp.einsum("bi,bio->bo", x, params["w"][ids])


# Parameters that are computed with, and arrays that are none.


@example({"w": (16, 24), "a": (16, 4), "b": (4, 24)}, (6, 16), forms="ff")
def low_rank_update(params, x):
    return x @ (params["w"] + params["a"] @ params["b"])


@example({"v": (16, 24), "g": (24,)}, (6, 16), forms="f")
def weight_norm(params, x):
    v = params["v"]
    return x @ (v * (params["g"] / jnp.sqrt(jnp.sum(v * v, 0)))[None])


@example({"w": (16, 24), "mask": (16, 24)}, (6, 16), forms="f")
def masked_weight(params, x):
    return x @ jnp.where(params["mask"] > 0, params["w"], 0)


@example({"w": (16, 8)}, (6, 16), forms="if")
def closed_over_constant(params, x):
    return x @ params["w"] + x @ (np.arange(128, dtype=np.float32).reshape(16, 8) / 128)


@example({"w": (16, 8)}, (6, 4), forms="if")
def constant_times_weight(params, x):
    return x @ (np.arange(64, dtype=np.float32).reshape(4, 16) / 64 @ params["w"])


@example({"w": (16, 24), "b": (24,), "unused": (5,)}, (6, 16), forms="i")
def numbers(params, x):
    return np.float32(0.5) * (x @ params["w"]) * 2.0 + params["b"][None] - np.ones((1, 24), np.float32) * 3


@example({"w": (16, 24), "unused": (16, 24)}, (6, 16), forms="fi")
def dead_code(params, x):
    _ = x @ params["unused"]
    return x @ params["w"]


@example({"w": (16, 24), "b": (24,)}, (6, 16), forms="i")
def several_outputs(params, x):
    y = x @ params["w"]
    return {"y": y, "rest": (y.argmax(-1), None, y > 0), "w": params["w"].T, "b": params["b"]}


# Convolutions.

_IMAGES = ("NHWC", "HWIO", "NHWC")


@example({"w": (3, 3, 4, 8)}, (2, 8, 8, 4), forms="i")
def convolution(params, x):
    return lax.conv_general_dilated(x, params["w"], (2, 2), "SAME", dimension_numbers=_IMAGES)


@example({"w": (8, 4, 3, 3)}, (2, 4, 8, 8), forms="i")
def convolution_with_features_first(params, x):
    return lax.conv_general_dilated(x, params["w"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))


@example({"w": (8, 4, 3, 3)}, (2, 8, 8, 4), forms="i")
def convolution_with_transposed_kernel(params, x):
    w = params["w"].transpose(2, 3, 1, 0)
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=_IMAGES)


@example({"w": (3, 4, 8)}, (2, 16, 4), forms="i")
def convolution_in_time(params, x):
    return lax.conv_general_dilated(x, params["w"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"))


@example({"w": (3, 3, 1, 8)}, (2, 8, 8, 4), forms="i")
def depthwise_convolution(params, x):
    return lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=_IMAGES, feature_group_count=4)


@example({"w": (3, 3, 4, 8)}, (2, 8, 8, 4), forms="i")
def dilated_convolution(params, x):
    return lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=_IMAGES)


@example({"w": (3, 3, 4, 8)}, (2, 8, 8, 4), forms="i")
def transposed_convolution(params, x):
    return lax.conv_transpose(x, params["w"], (2, 2), "SAME", dimension_numbers=_IMAGES)


@example({"w": (3, 3, 4, 8)}, (4, 8, 8, 4), forms="i")
def convolution_with_batch_groups(params, x):
    return lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=_IMAGES, batch_group_count=2)


@example({"w": (2, 8, 8, 4)}, (3, 3, 4, 8), forms="i")
def weight_as_images(params, x):
    return lax.conv_general_dilated(params["w"], x, (1, 1), "SAME", dimension_numbers=_IMAGES)


@example({"w": (16, 3, 24)}, (12, 16), Ids((3,), 4), forms="i")
def ragged_product(params, x, sizes):
    return lax.ragged_dot(x, params["w"].transpose(1, 0, 2), sizes)
