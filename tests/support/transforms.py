"""The ways in which users call an operator, each with the same results as a plain loop over the batch.

A transform takes an operator and its batched arguments `(x, *parameters)`, each with a leading axis of length B. The
transforms named `shared` use the parameters of batch 0 for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Operator = Callable[..., Any]


def _stack(results: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *results)


def _loop(op: Operator, args: tuple[np.ndarray, ...], *, shared: bool) -> Any:
    first = args[0]
    return _stack([op(first[b], *(p[0 if shared else b] for p in args[1:])) for b in range(len(first))])


def _device(args: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(a) for a in args)


def eager(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    return _loop(lambda *a: op(*_device(a)), args, shared=False)


def jit(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    return _loop(jax.jit(lambda *a: op(*a)), args, shared=False)


def shared_constant_parameters(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    constants = tuple(p[0] for p in args[1:])
    compiled = jax.jit(lambda x: op(x, *constants))
    return _stack([compiled(x) for x in args[0]])


def shared_all_constant(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    constants = tuple(a[0] for a in args)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], jax.jit(lambda: op(*constants))())


def vmap_batched(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    return jax.vmap(lambda *a: op(*a))(*_device(args))


def shared_vmap_unbatched(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    parameters = _device(tuple(p[0] for p in args[1:]))
    return jax.jit(jax.vmap(lambda x, p: op(x, *p), in_axes=(0, None)))(jnp.asarray(args[0]), parameters)


def shared_vmap_nested(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    x = args[0].reshape(2, -1, *args[0].shape[1:])
    parameters = _device(tuple(np.stack([p[0], p[0]]) for p in args[1:]))
    inner = jax.vmap(lambda x, p: op(x, *p), in_axes=(0, None))
    out = jax.jit(jax.vmap(inner, in_axes=(0, 0)))(jnp.asarray(x), parameters)
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), out)


def _to_bits(leaf: Any) -> Any:
    """Return float8_e5m2fnuz numbers as bits: XLA:CPU changes their subnormals when it slices them in a loop."""
    if leaf.dtype.name != "float8_e5m2fnuz":
        return leaf
    return leaf.view(np.uint8) if isinstance(leaf, np.ndarray) else lax.bitcast_convert_type(leaf, jnp.uint8)


def _in_loop(op: Operator, args: tuple[np.ndarray, ...]) -> tuple[Operator, Callable[[Any], Any]]:
    """Return an operator that takes and returns bits where needed, and a function that converts results back."""
    kinds = [a.dtype for a in args]

    def body(*a: Any) -> Any:
        restored = [v if v.dtype == k else lax.bitcast_convert_type(v, k) for v, k in zip(a, kinds, strict=False)]
        return jax.tree.map(_to_bits, op(*restored))

    shapes = jax.eval_shape(lambda *a: op(*a), *(a[0] for a in args))
    return body, lambda out: jax.tree.map(lambda leaf, w: np.asarray(leaf).view(w.dtype), out, shapes)


def scan(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    body, undo = _in_loop(op, args)
    bits = _device(tuple(_to_bits(a) for a in args))
    return undo(jax.jit(lambda a: lax.scan(lambda carry, xs: (carry, body(*xs)), None, a)[1])(bits))


def shared_map(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    constants = tuple(p[0] for p in args[1:])
    body, undo = _in_loop(op, args)
    return undo(jax.jit(lambda x: lax.map(lambda row: body(row, *constants), x))(jnp.asarray(_to_bits(args[0]))))


def fused(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    """Run element-wise operations before and after, in one program. XLA tends to reassociate a division before."""

    @jax.jit
    def program(x: jax.Array, unit: jax.Array, *parameters: jax.Array) -> Any:
        before = x / unit if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1 else x
        out = op(before, *parameters)
        return out, jax.tree.map(lambda leaf: leaf.astype(jnp.float32) + jnp.float32(1 / 3), out)

    def call(*a: np.ndarray) -> Any:
        out, after = program(*a)
        for leaf, then in zip(jax.tree.leaves(out), jax.tree.leaves(after), strict=True):
            alone = np.asarray(leaf).astype(np.float32) + np.float32(1 / 3)
            np.testing.assert_array_equal(
                np.asarray(then), alone, "the next operation received other values than were returned"
            )
        return out

    ones = np.ones(args[0].shape, args[0].dtype)
    return _loop(call, (args[0], ones, *args[1:]), shared=False)


def repeated(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    """Run a batch of equal operands that the program itself repeats. XLA tends to compute before it repeats."""

    @jax.jit
    def program(*a: jax.Array) -> Any:
        wide = [jnp.broadcast_to(v, (2, *v.shape)) for v in a]
        return jax.tree.map(lambda leaf: leaf[1], jax.vmap(lambda *v: op(*v))(*wide))

    return _loop(lambda *a: program(*_device(a)), args, shared=False)


def value_and_grad(op: Operator, args: tuple[np.ndarray, ...]) -> Any:
    """Return the codes of a forward pass that is differentiated with respect to all float arguments."""
    argnums = tuple(i for i, a in enumerate(args) if a.dtype in (np.float32,))

    def loss(*a: jax.Array) -> tuple[jax.Array, Any]:
        out = op(*a)
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(out)), out  # type: ignore[return-value]

    if not argnums:
        return jit(op, args)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=argnums, has_aux=True))
    return _loop(lambda *a: compiled(*a)[0][1], args, shared=False)


ALL: dict[str, Callable[[Operator, tuple[np.ndarray, ...]], Any]] = {
    f.__name__: f
    for f in (
        eager,
        jit,
        repeated,
        shared_constant_parameters,
        shared_all_constant,
        vmap_batched,
        shared_vmap_unbatched,
        shared_vmap_nested,
        scan,
        shared_map,
        fused,
        value_and_grad,
    )
}


def is_shared(name: str) -> bool:
    """Return whether a transform uses the parameters of batch 0 for the whole batch."""
    return name.startswith("shared")


def mismatches(actual: Any, expected: Any) -> int:
    """Return the number of elements that differ in any bit. All NaN are equal; dtypes and shapes must agree."""
    count = 0
    for g, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        w = w[: len(g)] if g.ndim else w
        assert g.dtype == w.dtype, (g.dtype, w.dtype)
        assert g.shape == w.shape, (g.shape, w.shape)
        unsigned = f"u{g.dtype.itemsize}"
        differs = np.ascontiguousarray(g).view(unsigned) != np.ascontiguousarray(w).view(unsigned)
        if g.dtype.kind not in "iub" and not g.dtype.name.startswith(("int", "uint")):
            differs &= ~(np.isnan(g.astype(np.float32)) & np.isnan(w.astype(np.float32)))
        count += int(differs.sum())
    return count
