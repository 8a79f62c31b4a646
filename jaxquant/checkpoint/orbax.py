"""Saving and loading trees of arrays and quantized arrays with Orbax."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._arrays.quantized_array import QuantizedArray
from .._core import checks
from .arrays import (
    KEY,
    StaticText,
    derive_stored_type,
    import_library,
    is_stored_apart,
    list_parts,
    restore_tree,
    store_text,
    to_arrays,
    write_description,
)

_SAVE, _LOAD = "checkpoint.save_orbax", "checkpoint.load_orbax"


def save_orbax(path: str | os.PathLike[str], tree: object) -> None:
    """Save the arrays of a tree with Orbax, QuantizedArrays packed as by `to_arrays`.

    Args:
        path: the folder to create; it must not exist yet.
        tree: a pytree of arrays and QuantizedArrays, sharded or not. Orbax does not save arrays without elements.

    Returns:
        None, once everything is written.

    Raises:
        ModuleNotFoundError: orbax-checkpoint is not installed.
        ValueError: the parts of a QuantizedArray do not fit each other, or Orbax refuses the tree or the folder.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((4, 6)), jq.QuantSpec(jq.nf4, jq.Blocked(1, 4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save_orbax(os.path.join(folder, "step"), {"w": q})
        ...     checkpoint.load_orbax(os.path.join(folder, "step"))["w"]
        QuantizedArray(nf4[4,6], scale=float32[4,2], zero_point=None, block_size=4, dtype=float32, nbytes=44)

    Source: orbax.checkpoint.StandardCheckpointer.
    """
    library = import_library(_SAVE, "orbax.checkpoint")
    with library.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(path), to_arrays(tree))
        checkpointer.wait_until_finished()


def load_orbax(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Return the tree that `save_orbax` saved in a folder, bit for bit.

    Args:
        path: the folder.
        like: a pytree like the saved one, of arrays or of `jax.ShapeDtypeStruct`, for example from `jax.eval_shape`.
            The result has the containers and the shardings of `like`. With None, the result consists of dicts and
            lists, and its arrays have the shardings with which they were saved.

    Returns:
        The tree.

    Raises:
        ModuleNotFoundError: orbax-checkpoint is not installed.
        ValueError: the structures of `like` and of the saved tree differ, or a description is damaged or does not fit
            its arrays.

    Example:
        >>> import os, tempfile, jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((4, 6)), jq.QuantSpec(jnp.int4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save_orbax(os.path.join(folder, "step"), (q,))
        ...     checkpoint.load_orbax(os.path.join(folder, "step"), jax.eval_shape(lambda: (q,)))
        (QuantizedArray(int4[4,6], scale=float32[1,1], zero_point=None, dtype=float32, nbytes=16),)

    Source: orbax.checkpoint.StandardCheckpointer.
    """
    library = import_library(_LOAD, "orbax.checkpoint")
    with library.StandardCheckpointer() as checkpointer:
        if like is None:
            return restore_tree(_LOAD, checkpointer.restore(os.path.abspath(path)))
        like_saved = _use_saved_orders(lambda: checkpointer.metadata(os.path.abspath(path)).item_metadata.tree, like)
        # Orbax needs the stored dtypes and shapes, not the dtypes and shapes of the quantized arrays.
        target = jax.tree.map(
            lambda leaf: _make_target(leaf) if is_stored_apart(leaf) else leaf, like_saved, is_leaf=is_stored_apart
        )
        tree = restore_tree(_LOAD, checkpointer.restore(os.path.abspath(path), target))
    structure, saved = jax.tree.structure(like_saved), jax.tree.structure(tree)
    checks.require(structure == saved, _LOAD, "like", f"{saved}, the structure that was saved", structure)
    tree = jax.tree.map(_reorder_like, tree, like, is_leaf=_is_array)
    # Packed codes were restored on every device; the shardings of `like` are applied to the unpacked ones.
    return jax.tree.map(_place_like, tree, like)


def _is_array(node: object) -> bool:
    return isinstance(node, QuantizedArray)


def _use_saved_orders(read_metadata: Callable[[], Any], like: Any) -> Any:
    """Return `like` with the arrays in the logical order that were saved in it, as all were by older versions.

    Args:
        read_metadata: returns the tree of metadata of the saved arrays.
        like: the tree that the user gave.
    """
    leaves = jax.tree.leaves(like, is_leaf=_is_array)
    if not any(isinstance(leaf, QuantizedArray) and leaf.stored_order for leaf in leaves):
        return like
    paths = jax.tree_util.tree_leaves_with_path(read_metadata())
    shapes = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf.shape for keys, leaf in paths}

    def remove_order(keys: tuple[Any, ...], leaf: object) -> Any:
        if not isinstance(leaf, QuantizedArray) or leaf.stored_order is None:
            return leaf
        key = jax.tree_util.keystr((*keys, jax.tree_util.DictKey(KEY)), simple=True, separator="/")
        plain = leaf.replace(stored_order=None)
        # The metadata contain no text, but a description with an order is longer.
        return plain if shapes.get(key) == write_description(plain).shape else leaf

    return jax.tree_util.tree_map_with_path(remove_order, like, is_leaf=_is_array)


def _reorder_like(leaf: Any, like: QuantizedArray) -> Any:
    """Return an array in the stored order of another one, and any other leaf unchanged."""
    is_other = isinstance(leaf, QuantizedArray) and leaf.stored_order != like.stored_order
    return leaf.replace(stored_order=like.stored_order) if is_other else leaf


def _make_target(q: QuantizedArray | StaticText) -> dict[str, Any]:
    """Return what Orbax restores the stored arrays into, sharded as the parts are unless they are packed."""
    # The text is known from `like`, so its stored form has the right length.
    if isinstance(q, StaticText):
        return store_text(q)
    target: dict[str, Any] = {KEY: write_description(q)}
    for name, part in list_parts(q).items():
        dtype, shape = derive_stored_type(np.dtype(part.dtype), part.shape)
        sharding = getattr(part, "sharding", None)
        # Packed codes have one dimension, which the partition of the codes does not describe.
        if isinstance(sharding, NamedSharding) and shape != part.shape:
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        target[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return target


def _place_like(array: jax.Array, like: object) -> Any:
    """Return an array with the sharding of another one, if that one has a sharding."""
    sharding = getattr(like, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)
