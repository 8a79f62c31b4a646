"""Functions of which parameters get adapters, and for each parameter the product of the factors that is added to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class AdaptedProgram(NamedTuple):
    """A function with parameters that can have adapters.

    Attributes:
        function: the function of the parameters and of x.
        shapes: the shapes of its parameters.
        inputs: a function of a generator, which returns x.
        products: for each parameter, a @ b as an einsum, with r for the rank.
    """

    function: Callable[..., jax.Array]
    shapes: dict[str, tuple[int, ...]]
    inputs: Callable[[np.random.Generator], np.ndarray]
    products: dict[str, str]

    def sample(self, rng: np.random.Generator) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return parameters and x."""
        params = {name: jnp.asarray(rng.normal(0, 0.4, s).astype(np.float32)) for name, s in self.shapes.items()}
        return params, jnp.asarray(self.inputs(rng))


def _draw(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(0, 1, shape).astype(np.float32)


def _draw_tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 24, (2, 5)).astype(np.int32)


def _dense(p: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ p["up"]) @ p["down"].T


def _scan(p: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, w: (jax.nn.relu(h @ w) + h, None), x, p["layers"])[0]


def _unrolled(p: Any, x: jax.Array) -> jax.Array:
    for layer in range(3):
        x = jax.nn.relu(x @ p["layers"][layer]) + x
    return x


def _remat(p: Any, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda h, w: (jax.nn.relu(h @ w) + h, None))
    return lax.scan(body, x, p["layers"])[0]


def _heads(p: Any, x: jax.Array) -> jax.Array:
    q = jnp.einsum("btd,hdk->bthk", x, p["query"])
    k = (x @ p["key"].reshape(16, 16)).reshape(2, 3, 2, 8)
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk,hkd->btd", weights, k, p["out"])


def _experts(p: Any, x: jax.Array) -> jax.Array:
    return jnp.einsum("ted,edf->tef", x, p["experts"])


def _ragged(p: Any, x: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, p["experts"], jnp.array([2, 0, 4], jnp.int32))


def _tied(p: Any, tokens: jax.Array) -> jax.Array:
    return jax.nn.relu(p["table"][tokens]) @ p["table"].T


def _table(p: Any, tokens: jax.Array) -> jax.Array:
    return jnp.take(p["table"], tokens, axis=0, mode="clip")


def _columns(p: Any, tokens: jax.Array) -> jax.Array:
    return jnp.take(p["table"], tokens, axis=1, mode="fill")


def _sliced(p: Any, x: jax.Array) -> jax.Array:
    q, k = jnp.split(p["fused"], 2, axis=1)
    return jax.nn.relu(x @ q) * (x @ k[:, ::-1])


def _convolution(p: Any, x: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, p["window"], (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=numbers)


def _left(p: Any, x: jax.Array) -> jax.Array:
    return jnp.einsum("od,btd->bot", p["rows"], x)


def _branch(p: Any, x: jax.Array) -> jax.Array:
    branches = [lambda h: h @ p["up"], lambda h: jax.nn.relu(h @ p["up"])]
    return lax.switch(jnp.argmax(x[0, :2]), branches, x)


def _grouped(p: Any, x: jax.Array) -> jax.Array:
    """Return products with a weight that several heads share."""
    wide = jnp.broadcast_to(p["shared"][None], (3, 8, 16))
    return jnp.einsum("htd,hdf->htf", x, wide)


PROGRAMS = {
    "dense": AdaptedProgram(
        _dense, {"up": (8, 16), "down": (6, 16)}, _draw(5, 8), {"up": "ir,ro->io", "down": "ir,ro->oi"}
    ),
    "scan": AdaptedProgram(_scan, {"layers": (3, 16, 16)}, _draw(5, 16), {"layers": "lir,lro->lio"}),
    "unrolled": AdaptedProgram(_unrolled, {"layers": (3, 16, 16)}, _draw(5, 16), {"layers": "lir,lro->lio"}),
    "remat": AdaptedProgram(_remat, {"layers": (3, 16, 16)}, _draw(5, 16), {"layers": "lir,lro->lio"}),
    "heads": AdaptedProgram(
        _heads, {"query": (2, 16, 8), "key": (16, 2, 8), "out": (2, 8, 16)}, _draw(2, 3, 16),
        {"query": "ir,rhk->hik", "key": "ir,rhk->ihk", "out": "hkr,ro->hko"},
    ),
    "experts": AdaptedProgram(_experts, {"experts": (3, 8, 16)}, _draw(5, 3, 8), {"experts": "eir,ero->eio"}),
    "ragged": AdaptedProgram(_ragged, {"experts": (3, 8, 16)}, _draw(6, 8), {"experts": "eir,ero->eio"}),
    "tied": AdaptedProgram(_tied, {"table": (24, 16)}, _draw_tokens, {"table": "ir,ro->oi"}),
    "table": AdaptedProgram(_table, {"table": (24, 16)}, _draw_tokens, {"table": "ir,ro->io"}),
    "columns": AdaptedProgram(_columns, {"table": (16, 24)}, _draw_tokens, {"table": "ir,ro->oi"}),
    "sliced": AdaptedProgram(_sliced, {"fused": (8, 32)}, _draw(5, 8), {"fused": "ir,ro->io"}),
    "convolution": AdaptedProgram(
        _convolution, {"window": (3, 2, 8, 16)}, _draw(2, 6, 5, 8), {"window": "hwir,ro->hwio"}
    ),
    "left": AdaptedProgram(_left, {"rows": (16, 8)}, _draw(2, 5, 8), {"rows": "ir,ro->oi"}),
    "branch": AdaptedProgram(_branch, {"up": (8, 16)}, _draw(5, 8), {"up": "ir,ro->io"}),
    "grouped": AdaptedProgram(_grouped, {"shared": (8, 16)}, _draw(3, 5, 8), {"shared": "ir,ro->io"}),
}  # fmt: skip
