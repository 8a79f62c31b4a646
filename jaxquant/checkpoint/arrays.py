"""The conversion of quantized arrays in a pytree to plain arrays that any library can save, and back."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import jax

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import checks
from .static_text import StaticText
from .stored_arrays import (
    KEY,
    TEXT,
    list_parts,
    restore_quantized,
    restore_text,
    store_part,
    store_text,
    write_description,
)


def to_arrays(tree: Any) -> Any:
    """Return the tree with each QuantizedArray replaced with a dict of plain arrays that any library can save.

    The arrays take as many bytes as the quantized array. Codes of 4 and 2 bits are packed; float8, bfloat16 and similar
    dtypes are stored as their bits. A uint8 array next to them holds a JSON text with the dtypes and shapes, the block
    size, the codebook and the dtype that `dequantize` returns. The description of the specs that converted Flax layers
    carry becomes a dict with one uint8 array, "static_text".

    Args:
        tree: a pytree, such as dicts, lists or modules, with QuantizedArrays among its leaves. All other leaves stay
            as they are.

    Returns:
        The tree, with a dict in place of each QuantizedArray. Its keys are "codes", "scale", "zero_point" if there is
        one, and "quantized_array", the description.

    Raises:
        TypeError: a part of a QuantizedArray is not an array or has an unsupported dtype.
        ValueError: the parts of a QuantizedArray do not fit each other.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((8, 32)), jq.QuantSpec(jnp.int4, jq.PerAxis(0), scale_dtype=jnp.bfloat16))
        >>> arrays = checkpoint.to_arrays({"w": q})
        >>> arrays["w"]["codes"].nbytes, arrays["w"]["scale"].dtype
        (128, dtype('uint16'))
        >>> jax.tree.map(lambda a, b: bool((a == b).all()), checkpoint.from_arrays(arrays), {"w": q})
        {'w': QuantizedArray(codes=True, scale=True, zero_point=None)}

    Source: ONNX TensorProto, "int4, int2 packing".
    """

    def store_leaf(leaf: Any) -> Any:
        if isinstance(leaf, StaticText):
            return store_text(leaf)
        if not isinstance(leaf, QuantizedArray):
            return leaf
        q = quantized_array.check_lazy("checkpoint.to_arrays", "tree", leaf)
        return {**{name: store_part(part) for name, part in list_parts(q).items()}, KEY: write_description(q)}

    return jax.tree.map(store_leaf, tree, is_leaf=is_stored_apart)


def from_arrays(tree: Any) -> Any:
    """Return the tree that `to_arrays` was given, bit for bit.

    Args:
        tree: a pytree as `to_arrays` returns it, or as another library restored it: its containers may have become
            dicts, and its arrays may be numpy arrays.

    Returns:
        The tree, with a QuantizedArray in place of each dict that describes one.

    Raises:
        TypeError: the description of an array is traced, so that it cannot be read, or a part is not an array.
        ValueError: a description is damaged, has a later format than this version can read, or does not fit its arrays.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.array([[0.5, -7.0], [2.0, 1.0]]), jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
        >>> checkpoint.from_arrays(checkpoint.to_arrays([q]))
        [QuantizedArray(int4[2,2], scale=float32[2,1], zero_point=None, dtype=float32, nbytes=10)]

    Source: ONNX TensorProto, "int4, int2 packing".
    """
    return restore_tree("checkpoint.from_arrays", tree)


def restore_tree(function: str, tree: Any) -> Any:
    """Return what `from_arrays` returns, with errors that name another function."""

    def restore_node(path: tuple[Any, ...], node: Any) -> Any:
        if not _is_stored(node):
            return node
        restore = restore_quantized if KEY in node else restore_text
        return restore(function, f"tree{jax.tree_util.keystr(path)}", node)

    return jax.tree_util.tree_map_with_path(restore_node, tree, is_leaf=_is_stored)


# Used as `is_leaf`: JAX would otherwise descend into the arrays of a QuantizedArray.
def is_stored_apart(node: Any) -> bool:
    """Return whether `to_arrays` converts a node of a tree."""
    return isinstance(node, QuantizedArray | StaticText)


def _is_stored(node: Any) -> bool:
    """Return whether `from_arrays` converts a node of a tree."""
    # A dict of the caller may have a key "static_text" among others; a stored text has only this key.
    return isinstance(node, Mapping) and (KEY in node or set(node) == {TEXT})


def import_library(function: str, module: str) -> Any:
    """Return an optional library, imported only now that it is needed.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        expected = f"{module} to be installed (pip install 'jaxquant[checkpoint]')"
        text = checks.format_message(function, "path", expected, str(error))
        raise ModuleNotFoundError(text) from error
