"""Checks that devices and processes hold the same values and specs, which most of distributed computing assumes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._training.fake_quantize import Quantizer
from ._messages import read_axis_size

_UINT32 = np.uint32
# Odd constants of the finalizer of MurmurHash3, and 2**32 divided by the golden ratio.
_FIRST, _SECOND, _GOLDEN = _UINT32(0x85EBCA6B), _UINT32(0xC2B2AE35), _UINT32(0x9E3779B9)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def compare_devices(tree: object, axis_name: Hashable) -> jax.Array:
    """Return whether all devices along a mapped axis hold the same arrays, bit for bit.

    Use it inside `jax.shard_map` on what must not differ: ranges, scales, the state of a calibrator, weights that are
    replicated. Only checksums of 64 bits travel. Two arrays that differ have the same checksum by accident with a
    probability of about 2**-64. NaNs are the same if their bits are.

    Args:
        tree: a pytree of arrays and QuantizedArrays.
        axis_name: Static. The name of the mapped axis, or a tuple of names.

    Returns:
        A bool scalar, the same on all devices.

    Raises:
        TypeError: a leaf is no array.
        ValueError: there is no such mapped axis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxquant import distributed as jqd
        >>> same = jax.vmap(lambda lo: jqd.compare_devices({"lo": lo}, "d"), axis_name="d", out_axes=None)
        >>> same(jnp.array([-1.0, -1.0])), same(jnp.array([0.0, -0.0]))
        (Array(True, dtype=bool), Array(False, dtype=bool))

    Source: the finalizer of MurmurHash3.
    """
    function = "distributed.compare_devices"
    read_axis_size(function, axis_name)
    sums = []
    for leaf in jax.tree.leaves(tree):
        leaf = jnp.asarray(leaf) if isinstance(leaf, bool | int | float | np.ndarray | np.generic) else leaf
        checks.require_type(isinstance(leaf, jax.Array), function, "tree", "arrays", checks.describe_value(leaf))
        sums.append(_compute_checksum(lax.stop_gradient(leaf)))
    if not sums:
        return jnp.bool_(True)
    own = jnp.stack(sums)
    # Two small reductions, which send less than a gather of the checksums of all devices.
    return jnp.all(lax.pmin(own, axis_name) == lax.pmax(own, axis_name))


def _compute_checksum(x: jax.Array) -> jax.Array:
    """Return two uint32 numbers that depend on every bit of an array and on its place."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    words = _read_words(x).reshape(-1)
    positions = lax.iota(jnp.uint32, words.size) * _GOLDEN
    # Each word is mixed with its place before the sum, so that an exchange of two words changes it.
    # Two sums of 32 bits, because JAX has no integers of 64 bits by default.
    sums = [jnp.sum(_mix(_mix(words ^ seed) + positions), dtype=jnp.uint32) for seed in (_UINT32(0), _FIRST)]
    return jnp.stack(sums)


def _read_words(x: jax.Array) -> jax.Array:
    """Return the bits of each element in uint32, with another dimension for elements of 64 bits."""
    if x.dtype == jnp.bool_ or (x.dtype in dtypes.INTEGERS and dtypes.count_bits(x.dtype) < 8):
        return x.astype(jnp.int32).astype(jnp.uint32)
    if x.dtype in dtypes.FLOAT4:
        return lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint32)
    width = x.dtype.itemsize
    if width >= 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
    """Return each word with its bits mixed; the mapping is one to one."""
    for shift, factor in ((16, _FIRST), (13, _SECOND)):
        words = (words ^ lax.shift_right_logical(words, jnp.full_like(words, shift))) * factor
    return words ^ lax.shift_right_logical(words, jnp.full_like(words, 16))


def check_processes(tree: object, name: str = "tree") -> None:
    """Raise unless all processes hold the same tree: its structure, its specs, and its arrays, bit for bit.

    Processes that trace different programs, because a spec or a shape differs, would wait for each other forever, or
    exchange what does not fit. Call this before the first such program, in every process. Only digests travel, of the
    same length whatever they describe, so the check itself does not hang. It is a call of the host; inside
    `jax.shard_map` use `compare_devices`.

    An array that is spread over several processes has no copy to compare: its shape, dtype and sharding are compared.

    Args:
        tree: a pytree of arrays, QuantizedArrays, QuantSpecs and other objects, which are compared by their `repr`
            without addresses in memory: functions by their names, calibrators and rules by what they contain.
        name: how errors call the tree.

    Returns:
        None, if all are the same.

    Raises:
        ValueError: the trees differ. Every process raises it, and it names the first leaf that differs and the
            processes that differ from process 0.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> jqd.check_processes({"spec": jq.QuantSpec(jnp.int8), "range": (jnp.float32(-1), jnp.float32(1))})

    Source: FIPS 180-4, SHA-256.
    """
    function = "distributed.check_processes"
    checks.require_type(isinstance(name, str), function, "name", "a string", checks.describe_value(name))
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    # The structures first: only equal ones have digests of as many leaves.
    text = _remove_addresses(f"{structure} {paths}")
    _compare_digests(function, [f"the structure of {name}"], [_digest(text.encode())], [structure])
    levels = _list_levels(tree)
    _compare_digests(function, [f"the codebooks of {name}"], [_digest(repr(levels).encode())], [levels])
    names = [f"{name}{path}" for path in paths]
    values = [leaf for _, leaf in leaves]
    _compare_digests(function, names, [_digest(_read_bytes(leaf)) for leaf in values], values)


def _compare_digests(function: str, names: list[str], digests: list[np.ndarray], values: list[Any]) -> None:
    """Raise if a digest differs between processes, and name the first that does."""
    if not digests:
        return
    own = np.stack(digests)
    gathered = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, *own.shape)
    differs = (gathered != gathered[:1]).any(axis=2)
    if not differs.any():
        return
    first = int(np.argmax(differs.any(axis=0)))
    processes = ", ".join(str(i) for i in np.flatnonzero(differs[:, first]))
    expected = f"the same in all processes, but process 0 and process {processes} differ"
    got = f"{checks.describe_value(values[first])} in process {jax.process_index()}"
    checks.refuse(function, names[first], expected, got)


def _remove_addresses(text: str) -> str:
    return _ADDRESS.sub("", text)


def _list_levels(tree: object) -> list[tuple[float, ...]]:
    """Return the levels of the codebooks in the structure of a tree, which prints only their names."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, QuantizedArray | Quantizer))
    books = [node.codebook if isinstance(node, QuantizedArray) else node.spec.codebook
             for node in nodes if isinstance(node, QuantizedArray | Quantizer)]  # fmt: skip
    return [book.levels for book in books if book is not None]


def _digest(data: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(data).digest(), np.uint8)


def _read_bytes(leaf: object) -> bytes:
    """Return bytes that two leaves share only if they are the same."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        description = f"{leaf.dtype}{list(leaf.shape)}".encode()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                return description + repr(leaf.sharding).encode()
            # All copies are the same, and this process holds one of them.
            leaf = leaf.addressable_data(0)
        values = np.asarray(leaf)
        return description + values.tobytes()
    # The repr of a spec prints only the name of its codebook.
    levels = leaf.codebook.levels if isinstance(leaf, QuantSpec) and leaf.codebook else ()
    return _remove_addresses(f"{type(leaf).__qualname__} {leaf!r} {levels}").encode()
