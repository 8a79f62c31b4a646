"""`rotate`: Hadamard rotations of the channels between contractions, where nothing between them tells."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._program import jaxpr, moves
from .._program.analysis import Site
from .._program.graph import EquationNode
from ..calibration import loop
from ..transform import Prepared
from ..transform.session import Session
from .neighbors import CallGraph, make_call_graph, move_indices
from .notes import Note, Notes, Outcome
from .scaling import make_comparison

_NAME = "ptq.rotate"
_TOLERANCE = 1e-5  # of the largest result
_MEASURE = "the largest |weight| over the root of the mean square, before and after"
_HIGHEST = jax.lax.Precision.HIGHEST


def rotate(prepared: Prepared, params: Any, batch: Any, *, key: jax.Array | None = None, **arguments: Any) -> Outcome:
    """Mix the channels between contractions by Hadamard matrices, without changing a float.

    (x W1 + b) W2 = (x (W1 R) + b R) (R^T W2), with R R^T = 1

    A channel with much larger values than the others sets the scale of all that share it. The rotation spreads it over
    many channels, so that the largest values of weights and of the activations between them are smaller, relative to
    the others.

    Only linear operations may be between the two: reshapes, transposes, sums over other dimensions, factors that all
    channels share, parameters that are added, and products with other activations that keep the channels apart. Among
    these are the values of attention up to its output projection, and the two factors of a decomposed layer. What
    reads the channels must be contractions with parameters only. Channels that a reshape splits, as attention does
    into heads, are rotated in runs that stay together. A run of a length without a Hadamard matrix is rotated in blocks
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
        ValueError: the parameters have other paths or shapes than in `prepare`; or the function returns no
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
    args, kwargs = loop.split_arguments(_NAME, 0, batch, arguments)
    kwargs = {**kwargs, **arguments}
    call = session.trace(args, kwargs)
    graph, arrays = make_call_graph(call), list(signature.arrays)
    compare = make_comparison(session, args, kwargs, _TOLERANCE)
    actions: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    sites = [site for site in call.analysis.sites.values() if site.weight is not None and site.operation != "take"]
    for index, site in enumerate(sites):
        paths = _follow_outputs(graph, site)
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
            *([_compute_peak(signature.arrays[leaf]), _compute_peak(arrays[leaf])] if leaf in actions else []),
        )
        for leaf in prepared.leaves
    ]  # fmt: skip
    return Outcome(signature.rebuild(arrays), Notes(tuple(rows), _MEASURE))


def _make_rotation(run: int, key: jax.Array | None) -> jax.Array:
    """Return an orthogonal matrix for the blocks of a run."""
    size = choose_block(run)
    matrix = jnp.asarray(make_hadamard(size) / np.sqrt(size), jnp.float32)
    return matrix if key is None else jax.random.rademacher(key, (size, 1), jnp.float32) * matrix


def _rotate_paths(graph: CallGraph, paths: _Paths, arrays: Sequence[Any], matrix: jax.Array) -> list[Any] | str:
    """Return the parameters with rotated channels, or why they cannot be rotated."""
    if len(matrix) == 1:
        return f"runs of {paths.run} channels, which have no Hadamard matrix"
    changed = list(arrays)
    changed[paths.leaf] = _rotate_axis(changed[paths.leaf], paths.axis, matrix)
    for reader in paths.readers:
        changed[reader.leaf] = _rotate_axis(changed[reader.leaf], reader.axis, matrix)
    for offset in paths.offsets:
        runs = _list_runs(graph, offset, len(matrix))
        if runs is None:
            return "what is added to its outputs is shared"
        values = jnp.asarray(changed[offset.leaf])
        rotated = jnp.matmul(values.ravel()[runs].astype(jnp.float32), matrix, precision=_HIGHEST)
        changed[offset.leaf] = values.ravel().at[runs].set(rotated.astype(values.dtype)).reshape(values.shape)
    return changed


def _rotate_axis(w: ArrayLike, axis: int, matrix: jax.Array) -> jax.Array:
    """Return a parameter with each block of indices along an axis multiplied by a matrix."""
    w = jnp.asarray(w)
    rows = jnp.moveaxis(w, axis, -1)
    # These weights replace the user's own, so that no backend may round them to fewer digits than float32 has.
    rotated = jnp.matmul(rows.reshape(-1, len(matrix)).astype(jnp.float32), matrix, precision=_HIGHEST)
    return jnp.moveaxis(rotated.astype(w.dtype).reshape(rows.shape), -1, axis)


def _compute_peak(w: ArrayLike) -> float:
    w = jnp.asarray(w).astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(w**2))
    return float(jnp.max(jnp.abs(w)) / jnp.where(size > 0, size, 1))


# Paths from the outputs of one contraction to the inputs of others, through operations that keep channels linear.


class _Channels(NamedTuple):
    """Runs of channels in an array: `run` neighbors along a dimension.

    Attributes:
        array: the number of the array in the graph.
        dimension: the dimension.
        run: the length of the runs, which divides the length of the dimension.
    """

    array: int
    dimension: int
    run: int


class _Offset(NamedTuple):
    """A parameter that is added to the channels.

    Attributes:
        leaf: the index of the parameter.
        array: the number of the array that is added, in the graph.
        channels: the channels that it is added to.
    """

    leaf: int
    array: int
    channels: _Channels


class _ChannelReader(NamedTuple):
    """A contraction that sums the channels.

    Attributes:
        site: the contraction.
        leaf: the index of its parameter.
        axis: the axis of the parameter that it sums, with runs of channels.
    """

    site: Site
    leaf: int
    axis: int


class _Paths(NamedTuple):
    """Where the outputs of a contraction go, if that is only into other contractions and in a linear way.

    Attributes:
        leaf: the index of the parameter; the channels are its outputs.
        axis: the axis of the parameter with the channels.
        run: the length of runs of channels that stay together everywhere.
        offsets: what is added to the channels.
        readers: the contractions that sum them.
    """

    leaf: int
    axis: int
    run: int
    offsets: tuple[_Offset, ...]
    readers: tuple[_ChannelReader, ...]


def _follow_outputs(graph: CallGraph, site: Site) -> _Paths | str:
    """Return where the outputs of a contraction go, or why they cannot be mixed there."""
    operation = graph.program.get_node(site.address)
    if operation is None or site.lengths:
        return "a contraction in a loop"
    start = _locate_start(graph, site, operation)
    if isinstance(start, str):
        return start
    channels, leaf, axis = start
    offsets: list[_Offset] = []
    readers: list[_ChannelReader] = []
    pending, runs = [channels], [channels.run]
    while pending:
        channels = pending.pop()
        if channels.array in graph.program.results:
            return "outputs of the function"
        for reader, _ in graph.program.uses.get(channels.array, []):
            step = _follow(graph, channels, reader)
            if isinstance(step, str):
                return step
            for item in step:
                {_Channels: pending, _Offset: offsets, _ChannelReader: readers}[type(item)].append(item)  # type: ignore[attr-defined]
                runs += [item.run] if isinstance(item, _Channels) else []
    if not readers:
        return "nothing contracts its outputs"
    # A rotation of runs that are neighbors everywhere commutes with each reshape between the two contractions.
    lengths = [graph.call.parameters.arrays[reader.leaf].shape[reader.axis] for reader in readers]
    return _Paths(leaf, axis, math.gcd(*runs, *lengths), tuple(offsets), tuple(readers))


def _locate_start(graph: CallGraph, site: Site, operation: EquationNode) -> tuple[_Channels, int, int] | str:
    """Return the channels of a contraction's result, and the parameter and its axis that they are."""
    assert site.weight is not None
    if site.operation == "ragged_dot":
        return "a ragged product, in which groups of rows have different matrices"
    (result,) = operation.outputs
    shape, parameters = graph.program.get_shape(result), site.equation.params
    numbers = parameters["dimension_numbers"]
    if site.operation == "conv_general_dilated":
        if parameters["feature_group_count"] > 1 or parameters["batch_group_count"] > 1:
            return "a convolution with groups"
        dimension, weight = numbers.out_spec[1], numbers.rhs_spec[0]
    else:
        (summed, batch), count = numbers, len(numbers[1][0])
        rank = len(site.equation.invars[site.weight].aval.shape)
        free = [d for d in range(rank) if d not in (*summed[site.weight], *batch[site.weight])]
        if not free:
            return "a contraction without outputs of its own"
        # Of several axes of outputs the innermost: its channels stay neighbors when a reshape merges them.
        weight = free[-1]
        dimension = count + len(free) - 1 if site.weight == 0 else len(shape) - 1
    axis = _locate_axis(graph, site, weight)
    if isinstance(axis, str):
        return axis
    leaf = site.views[0].leaf
    return _Channels(result, dimension, graph.call.parameters.arrays[leaf].shape[axis]), leaf, axis


def _locate_axis(graph: CallGraph, site: Site, dimension: int) -> int | str:
    """Return the innermost axis of the parameter in a dimension of a contraction's operand; or why there is none."""
    if len(site.views) != 1:
        return "parameters that are joined in one array"
    (view,) = site.views
    uses = [other for other in graph.call.analysis.sites.values() if view.leaf in other.leaves]
    source = graph.get_value(view.leaf)
    if len(uses) > 1 or len(graph.program.uses.get(source, [])) > 1:
        return "a parameter with several uses"
    if any(step[0] == "rev" for step in view.history if isinstance(step, tuple)):
        return "a parameter in reverse order"
    atoms = [atom for atom in view.dimensions[dimension] if atom.size > 1]
    shape = graph.call.parameters.arrays[view.leaf].shape
    if not atoms or atoms[-1].axis is None or not atoms[-1].is_whole or atoms[-1].size != shape[atoms[-1].axis]:
        return "a part of a parameter, or a parameter with split axes"
    return atoms[-1].axis


def _follow(graph: CallGraph, channels: _Channels, operation: EquationNode) -> list[Any] | str:
    """Return where channels are in the result of an operation, and what it adds to them or contracts them with."""
    array, dimension, run = channels
    if len(operation.outputs) != 1 or operation.inputs.count(array) != 1:
        return f"{operation.name} reads its outputs"
    place, (result,) = operation.inputs.index(array), operation.outputs
    shape, parameters = graph.program.get_shape(result), operation.equation.params
    if moves.keeps_indices(operation.name):
        return [_Channels(result, dimension, run)]
    if operation.name == "transpose":
        return [_Channels(result, parameters["permutation"].index(dimension), run)]
    if operation.name == "broadcast_in_dim":
        return [_Channels(result, parameters["broadcast_dimensions"][dimension], run)]
    if operation.name == "reduce_sum" and dimension not in parameters["axes"]:
        return [_Channels(result, dimension - sum(axis < dimension for axis in parameters["axes"]), run)]
    if moves.keeps_order(operation.name):
        return _align(graph.program.get_shape(array), channels, result, shape)
    if operation.name in ("mul", "div") and (place == 0 or operation.name == "mul"):
        if _is_constant(graph, operation, 1 - place, dimension):
            return [_Channels(result, dimension, run)]
        return f"{operation.name} multiplies its outputs by different numbers"
    if operation.name == "add":
        return _add_offset(graph, operation, channels, place)
    if operation.name in ("dot_general", "conv_general_dilated"):
        return _contract(graph, channels, operation, place)
    return f"{operation.name} reads its outputs"


def _align(before: Sequence[int], channels: _Channels, result: int, after: Sequence[int]) -> list[Any] | str:
    """Return the dimension of a reshaped array with the stride of the channels."""
    distance = math.prod(before[channels.dimension + 1 :])
    for dimension, size in enumerate(after):
        if size > 1 and math.prod(after[dimension + 1 :]) == distance:
            return [_Channels(result, dimension, math.gcd(channels.run, size))]
    return "a reshape splits its outputs"


def _is_constant(graph: CallGraph, operation: EquationNode, place: int, dimension: int) -> bool:
    """Return whether an operand has the same number at all indices of a dimension."""
    atom = operation.equation.invars[place]
    lengths = jaxpr.read_shape(atom)
    if jaxpr.is_literal(atom) or math.prod(lengths) == 1 or lengths[dimension] == 1:
        return True
    array = operation.inputs[place]
    maker = graph.program.producers.get(array)
    if maker is None or maker.name != "broadcast_in_dim":
        return False
    axes, shape = maker.equation.params["broadcast_dimensions"], jaxpr.read_shape(maker.equation.invars[0])
    return dimension not in axes or shape[axes.index(dimension)] == 1


def _add_offset(graph: CallGraph, operation: EquationNode, channels: _Channels, place: int) -> list[Any] | str:
    """Return the channels of a sum of them and a parameter."""
    array = operation.inputs[1 - place]
    leaf = graph.match_leaf(array, None)
    if leaf is None:
        return "add reads its outputs"
    (result,) = operation.outputs
    return [_Channels(result, *channels[1:]), _Offset(leaf, array, channels)]


def _list_runs(graph: CallGraph, offset: _Offset, run: int) -> np.ndarray | None:
    """Return the places of the elements of a parameter that are added to each run of channels, [runs, run].

    None if they are not all of its elements, each in one run, or if something else reads the parameter.
    """
    source = graph.get_value(offset.leaf)
    shape = graph.program.get_shape(source)
    indices = move_indices(graph, offset.array, source, np.arange(math.prod(shape)).reshape(shape))
    if indices is None or len(graph.program.uses[offset.array]) > 1:
        return None
    indices = np.broadcast_to(indices, graph.program.get_shape(offset.channels.array))
    # What is added is broadcast, so that each run occurs once for every other index of the array.
    rows = np.unique(np.moveaxis(indices, offset.channels.dimension, -1).reshape(-1, run), axis=0)
    return rows if np.array_equal(np.sort(rows.ravel()), np.arange(math.prod(shape))) else None


def _contract(graph: CallGraph, channels: _Channels, operation: EquationNode, place: int) -> list[Any] | str:
    """Return the channels of a contraction that does not sum them, or the contraction as a reader."""
    site = graph.call.analysis.sites.get(operation.address)
    numbers = operation.equation.params["dimension_numbers"]
    if operation.name == "conv_general_dilated":
        is_channel = site is not None and site.weight == 1 and place == 0 and channels.dimension == numbers.lhs_spec[1]
        if not is_channel or operation.equation.params["feature_group_count"] > 1:
            return "a convolution of other dimensions, or with groups"
        return _read_with(graph, site, numbers.rhs_spec[1])
    (summed, batch), count = numbers, len(numbers[1][0])
    if channels.dimension in batch[place]:
        return "a product of matrices for each of its outputs"
    if channels.dimension in summed[place]:
        if site is None or site.weight != 1 - place:
            return "a product with other activations sums its outputs"
        return _read_with(graph, site, summed[1 - place][summed[place].index(channels.dimension)])
    rank = len(graph.program.get_shape(channels.array))
    free = [d for d in range(rank) if d not in (*summed[place], *batch[place])]
    others = len(jaxpr.read_shape(operation.equation.invars[0])) - len(summed[0]) - count if place == 1 else 0
    (result,) = operation.outputs
    return [_Channels(result, count + others + free.index(channels.dimension), channels.run)]


def _read_with(graph: CallGraph, site: Site | None, dimension: int) -> list[Any] | str:
    assert site is not None
    axis = _locate_axis(graph, site, dimension)
    if isinstance(axis, str):
        return f"{site.name}: {axis}"
    return [_ChannelReader(site, site.views[0].leaf, axis)]


# Hadamard matrices: orthogonal but for a factor, with entries of 1 and -1.


def choose_block(size: int) -> int:
    """Return the largest divisor of a size for which `make_hadamard` has a matrix."""
    # 1 divides every size and has a matrix, so that there is always a part.
    return next(part for part in range(size, 0, -1) if size % part == 0 and _choose_base(part) is not None)


@functools.cache
def make_hadamard(size: int) -> np.ndarray:
    """Return a Hadamard matrix H with H H^T = size * I, of int8.

    The sizes are 2^k, and 2^k times q + 1 for primes q = 3 mod 4, or 2 (q + 1) for primes q = 1 mod 4: among them 12,
    20, 24, 28, 36, 44, 48, and so 384, 768 and 1536.

    Source: Sylvester, Philosophical Magazine 34 (1867); Paley, Journal of Mathematics and Physics 12 (1933), pages 311
    to 320.
    """
    base = _choose_base(size)
    assert base is not None
    matrix = _make_paley(base) if base > 1 else np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.int8), matrix)
    return matrix


def _choose_base(size: int) -> int | None:
    """Return the size of Paley's matrix, or 1, that doublings make the size; or None."""
    base = size
    while base > 1:
        if _choose_prime(base) is not None:
            return base
        if base % 2:
            return None
        base //= 2
    return base


def _choose_prime(size: int) -> int | None:
    """Return the prime from which Paley's construction makes a matrix of a size that is not a power of 2, or None."""
    # Powers of 2 are doublings of the matrix of size 1, which is cheaper than a table of residues.
    if size & (size - 1) == 0:
        return None
    for prime, remainder in ((size - 1, 3), (size // 2 - 1, 1)):
        is_even = remainder == 3 or size % 2 == 0
        if is_even and prime > 2 and prime % 4 == remainder and all(prime % n for n in range(2, int(prime**0.5) + 1)):
            return prime
    return None


def _make_paley(size: int) -> np.ndarray:
    prime = _choose_prime(size)
    assert prime is not None
    residues = np.full(prime, -1, np.int8)
    residues[np.arange(1, prime) ** 2 % prime] = 1
    residues[0] = 0
    core = residues[(np.arange(prime)[:, None] - np.arange(prime)) % prime]
    border = np.ones((prime, 1), np.int8)
    corner = np.zeros((1, 1), np.int8)
    # -1 is no square then, and the bordered core S is skew-symmetric: (S + I) (S + I)^T = S S^T + I = (prime + 1) I.
    if prime % 4 == 3:
        return np.block([[corner, border.T], [-border, core]]) + np.eye(size, dtype=np.int8)
    # Here S is symmetric, and its diagonal of zeros has to be filled: each entry becomes a block of 2 x 2.
    conference = np.block([[corner, border.T], [border, core]])
    pair = np.array([[1, 1], [1, -1]], np.int8)
    return np.kron(conference, pair) + np.kron(np.eye(prime + 1, dtype=np.int8), np.array([[1, -1], [-1, -1]], np.int8))
