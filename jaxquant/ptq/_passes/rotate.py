"""`rotate`: Hadamard rotations of the channels between contractions, where nothing between them tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...calibration import loop
from ...transform import Prepared
from ...transform.session import Session
from .. import _hadamard
from . import linear_paths
from .linear_paths import Paths
from .neighbors import CallGraph, make_call_graph
from .notes import Note, Notes, Outcome
from .scaling import make_comparison

_NAME = "ptq.rotate"
_TOLERANCE = 1e-5  # of the largest result
_MEASURE = "the largest |weight| over the root of the mean square, before and after"
_HIGHEST = jax.lax.Precision.HIGHEST


def rotate(prepared: Prepared, params: Any, batch: Any, *, key: jax.Array | None = None, **arguments: Any) -> Outcome:
    """Mix the channels between contractions by Hadamard matrices, without changing a float.

    (x W1 + b) W2 = (x (W1 R) + b R) (R^T W2), with R R^T = 1

    A channel whose values are much larger than those of the others sets the scale of all that share it. The rotation
    spreads it over many channels, so that the largest values of weights and of the activations between them are
    smaller, relative to the others.

    Only linear operations may be between the two: reshapes, transposes, sums over other dimensions, factors that all
    channels share, parameters that are added, and products with other activations that keep the channels apart. Among
    these are the values of attention up to its output projection, and the two factors of a decomposed layer. What
    reads the channels must be contractions with parameters only. Channels that a reshape splits, as that of attention
    into heads, are rotated in runs that stay together. A run whose length has no Hadamard matrix is rotated in blocks
    of its largest divisor that has one. The result is compared with the old one on the batch, as `smooth` does.

    Channels between a relu, a gelu or another function of each element, the residual stream of a transformer, and
    queries and keys are not rotated; the notes say what is between.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        batch: one batch, as for `Prepared.calibrate`: the arguments on which the functions are compared.
        key: a random key, for a sign of each channel of a block before the rotation; None for no signs.
        **arguments: keyword arguments of the call.

    Returns:
        The parameters, in floats, and notes: a row for each weight that the rules quantize.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than those of `prepare`; or the function returns no
            floats.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: (x @ params["down"]) @ params["up"]
        >>> params = {"down": jnp.array([[8.0, 0.0], [0.0, 1.0]]), "up": jnp.ones((2, 3))}
        >>> x = jnp.array([[1.0, 2.0]])
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> rotated, notes = ptq.rotate(prepared, params, x)
        >>> apply(params, x), apply(rotated, x).round(4)
        (Array([[10., 10., 10.]], dtype=float32), Array([[10., 10., 10.]], dtype=float32))
        >>> print(notes)
        path  action                          before  after  reason
        down  outputs rotated in blocks of 2  1.985   1.403
        up    inputs rotated in blocks of 2   1       1.414
        before, after: the largest |weight| over the root of the mean square, before and after

    Source: Ashkboos et al., arXiv 2404.00456, section 4, for the values of attention; Chee et al., arXiv 2307.13304,
    section 4, for why incoherent weights are easier to round.
    """
    session = Session(_NAME, prepared, params)
    signature = session.parameters
    step = loop.Step(_NAME, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    args, kwargs = loop.split_arguments(step, 0, batch)
    kwargs = {**kwargs, **arguments}
    call = session.trace(args, kwargs)
    graph, arrays = make_call_graph(call), list(signature.arrays)
    compare = make_comparison(session, args, kwargs, _TOLERANCE)
    actions: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    sites = [site for site in call.analysis.sites.values() if site.weight is not None and site.operation != "take"]
    for index, site in enumerate(sites):
        paths = linear_paths.follow_outputs(graph, site)
        if isinstance(paths, str):
            changed: list[Any] | str = paths
        else:
            matrix = _make_rotation(paths.run, None if key is None else jax.random.fold_in(key, index))
            changed = _rotate_paths(graph, paths, arrays, matrix)
            if not isinstance(changed, str) and not compare(changed):
                changed = "the rotation would change the function by more than float32's rounding"
        if isinstance(changed, str) or isinstance(paths, str):
            reasons |= dict.fromkeys((view.leaf for view in site.views), str(changed))
            continue
        arrays, text = changed, f"rotated in blocks of {len(matrix)}"
        actions.setdefault(paths.leaf, []).append(f"outputs {text}")
        for reader in paths.readers:
            actions.setdefault(reader.leaf, []).insert(0, f"inputs {text}")
    rows = [
        Note(
            prepared.names[leaf], ", ".join(actions[leaf]) if leaf in actions else "unchanged",
            "" if leaf in actions else reasons.get(leaf, "no contraction"),
            *([_find_peak(signature.arrays[leaf]), _find_peak(arrays[leaf])] if leaf in actions else []),
        )
        for leaf in prepared.leaves
    ]  # fmt: skip
    return Outcome(signature.rebuild(arrays), Notes(tuple(rows), _MEASURE))


def _make_rotation(run: int, key: jax.Array | None) -> jax.Array:
    """Return an orthogonal matrix for the blocks of a run."""
    size = _hadamard.find_block(run)
    matrix = jnp.asarray(_hadamard.make_hadamard(size) / np.sqrt(size), jnp.float32)
    return matrix if key is None else jax.random.rademacher(key, (size, 1), jnp.float32) * matrix


def _rotate_paths(graph: CallGraph, paths: Paths, arrays: Sequence[Any], matrix: jax.Array) -> list[Any] | str:
    """Return the parameters with rotated channels, or why they cannot be rotated."""
    if len(matrix) == 1:
        return f"runs of {paths.run} channels, which have no Hadamard matrix"
    changed = list(arrays)
    changed[paths.leaf] = _rotate_axis(changed[paths.leaf], paths.axis, matrix)
    for reader in paths.readers:
        changed[reader.leaf] = _rotate_axis(changed[reader.leaf], reader.axis, matrix)
    for offset in paths.offsets:
        runs = linear_paths.list_runs(graph, offset, len(matrix))
        if runs is None:
            return "what is added to its outputs is shared"
        values = jnp.asarray(changed[offset.leaf])
        rotated = jnp.matmul(values.ravel()[runs].astype(jnp.float32), matrix, precision=_HIGHEST)
        changed[offset.leaf] = values.ravel().at[runs].set(rotated.astype(values.dtype)).reshape(values.shape)
    return changed


def _rotate_axis(w: Any, axis: int, matrix: jax.Array) -> jax.Array:
    """Return a parameter whose blocks of indices along an axis are multiplied by a matrix."""
    w = jnp.asarray(w)
    rows = jnp.moveaxis(w, axis, -1)
    # These weights replace the user's own, so that no backend may round them to fewer digits than float32 has.
    rotated = jnp.matmul(rows.reshape(-1, len(matrix)).astype(jnp.float32), matrix, precision=_HIGHEST)
    return jnp.moveaxis(rotated.astype(w.dtype).reshape(rows.shape), -1, axis)


def _find_peak(w: Any) -> float:
    w = jnp.asarray(w).astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(w**2))
    return float(jnp.max(jnp.abs(w)) / jnp.where(size > 0, size, 1))
