"""`quantize_state`: any optax transformation with its state in 8-bit blocks; `describe_state`: a table of a state."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export, lax
from jax.core import eval_jaxpr
from jax.extend import core

from .._arrays import scale_from_range
from .._arrays.quantized_array import QuantizedArray, check_lazy
from .._arrays.spec import Codebook, QuantSpec
from .._core import checks, dtypes, sharding
from .._core.granularity import Aligned, Blocked, BlockSize, PerTensor
from .._kernels import affine, barriers
from .._kernels.affine import divide_by_scale
from .codebooks import dynamic, logarithmic, read_levels, round_to_levels

_NAME = "optim.quantize_state"
_Spec = QuantSpec | Codebook
MOMENT, SECOND_MOMENT, KEPT = "moment", "second moment", "kept"

# The leaves of optax's states that hold averages of gradients or updates, or the last gradients.
_MOMENTS = {
    "ScaleByAdamState": ("mu",),
    "ScaleByAmsgradState": ("mu",),
    "ScaleByRStdDevState": ("mu",),
    "ScaleByRStdDevWithCountState": ("mu",),
    "ScaleByLionState": ("mu",),
    "ScaleByBeliefState": ("mu",),
    "ScaleByNovogradState": ("mu",),
    "ScaleByAdanState": ("m", "v", "g"),
    "ScaleBySM3State": ("nu",),
    "ScaleByOptimisticGradientState": ("previous_gradient",),
    "TraceState": ("trace",),
    "EmaState": ("ema",),
    "MuonState": ("mu",),
    "SophiaState": ("mu",),
    "ScaleByAdemamixState": ("m1",),
    "ProdigyState": ("exp_avg",),
    "DAdaptAdamWState": ("exp_avg",),
    "MomoState": ("exp_avg",),
    "MomoAdamState": ("exp_avg",),
}
# Moments that are never negative; an update is divided by their root: averages and maxima of squares.
_SECOND_MOMENTS = {
    "ScaleByAdamState": ("nu",),
    "ScaleByAmsgradState": ("nu", "nu_max"),
    "ScaleByRmsState": ("nu",),
    "ScaleByRmsWithCountState": ("nu",),
    "ScaleByRStdDevState": ("nu",),
    "ScaleByRStdDevWithCountState": ("nu",),
    "ScaleByBeliefState": ("nu",),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdanState": ("n",),
    "FactoredState": ("v_row", "v_col", "v"),
    "ScaleByAdemamixState": ("nu",),
    "ScaleBySimplifiedAdEMAMixState": ("n",),
    "ProdigyState": ("exp_avg_sq",),
    "DAdaptAdamWState": ("exp_avg_sq",),
    "MomoAdamState": ("exp_avg_sq",),
}
_LARGEST_BLOCK = 256
# Square tiles first: a mesh that divides the matrix divides its tiles of 16 more often than rows of 256.
_LENGTHS = (16, 32, 64, 128, 256, 8, 4, 2)
_SLACK = 1.2
# JAX requires it of a program, and uses it only in error messages about its arguments.
_NO_DEBUG_INFO = core.DebugInfo("update", "jaxquant", None, None)


class QuantizedState(NamedTuple):
    """The state of a transformation that `quantize_state` returns, a pytree.

    Attributes:
        inner: the state of the wrapped transformation, with a `jq.QuantizedArray` in place of each quantized array.
        step: the number of updates, int32, from which the keys of a stochastic rounding are made; None without a seed.
    """

    inner: Any
    step: Any = None


export.register_namedtuple_serialization(QuantizedState, serialized_name="jaxquant.QuantizedState")


def quantize_state(
    tx: optax.GradientTransformation | optax.MultiSteps,
    spec: _Spec = dynamic,
    second_spec: _Spec = logarithmic,
    *,
    overrides: Mapping[str, _Spec | None] | None = None,
    min_size: int = 4096,
    seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation that keeps its state in 8-bit blocks between updates.

    An update dequantizes the state, calls the update of `tx`, and quantizes the new state. The updates themselves are
    computed from the new state before it is rounded. With Adam the state takes 0.26 of its bytes in float32.

    The moments in the states that optax defines become codes, if they are float32, float16 or bfloat16 and have at
    least `min_size` elements: second moments, which are never negative, as `second_spec` says, the others as `spec`
    says. All other arrays stay as they are: states that optax does not define, parameters, gradients that are
    summed over several steps, and sums that only grow (Adagrad). `overrides` chooses for single arrays.
    `jq.optim.describe_state` lists what became of each.

    A number is rounded to the nearest level of the codebook, and to the lower one if it is halfway between two. With a
    codebook that starts at 0, as for second moments, a positive number never becomes 0, but at least the
    first level above 0: the update divides by the root of the second moment. So where a second moment is too small for
    its block, the update is smaller than without codes, not larger.

    A NaN or an infinity in a moment makes all the numbers of its block NaN or infinite, and so the next updates.

    Args:
        tx: the transformation: optax's GradientTransformation or MultiSteps, or any object with `init` and `update`.
        spec: Static. How first moments and all other arrays become codes: a codebook with a level 0, in blocks of up to
            256 elements that are chosen by the shape, or a `jq.QuantSpec` of such a codebook.
        second_spec: Static. The same for second moments.
        overrides: Static. Specs by regular expressions, searched in the path of an array in the state, such as
            "0/mu/dense/kernel". The first that matches holds for the array, whatever its size. None as a spec leaves
            the array as it is.
        min_size: Static. The least number of elements of an array that becomes codes.
        seed: Static. A seed for stochastic rounding: a number becomes one of the two levels around it, with the number
            as expectation. None rounds to the nearest level.

    Returns:
        The transformation. Its state is a `jq.optim.QuantizedState`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a codebook has no level 0, a regular expression is invalid, or `min_size` is less than 1. `init`
            raises it if a spec has an axis that an array does not have.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxquant as jq
        >>> tx = jq.optim.quantize_state(optax.rmsprop(1e-3, decay=0.75))
        >>> params = {"kernel": jnp.ones((256, 64)), "bias": jnp.zeros(64)}
        >>> state = tx.init(params)
        >>> state.inner[0].nu["kernel"]
        QuantizedArray(logarithmic[256,64], scale=float32[16,4], zero_point=None, block_size=16, dtype=float32, ...)
        >>> updates, state = jax.jit(tx.update)(params, state, params)
        >>> updates["kernel"][0, :3]
        Array([-0.002, -0.002, -0.002], dtype=float32)

    Source: Dettmers et al., arXiv 2110.02861, section 2.
    """
    transformation = _read_transformation(tx)
    rules = _Rules(_read_spec("spec", spec), _read_spec("second_spec", second_spec), _read_overrides(overrides))
    checks.check_integer(_NAME, "min_size", min_size)
    checks.require(min_size > 0, _NAME, "min_size", "a positive int", min_size)
    if seed is not None:
        checks.check_integer(_NAME, "seed", seed)

    def init(params: object) -> QuantizedState:
        state = transformation.init(params)
        step = None if seed is None else jnp.zeros((), jnp.int32)
        keys = _make_keys(seed, step, len(jax.tree.leaves(state)))
        specs = rules.choose_specs(state, int(min_size))
        return QuantizedState(_map_leaves(_quantize_first, state, specs, keys), step)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, QuantizedState]:
        old, structure = _flatten_state(state)
        step = None if seed is None else state.step + 1
        keys = _make_keys(seed, step, len(old))

        def compute(quantized: list[Any]) -> tuple[Any, Any]:
            arrays = iter(quantized)
            leaves = [next(arrays) if _is_quantized(leaf) else leaf for leaf in old]
            floats = structure.unflatten([_dequantize(leaf) for leaf in leaves])
            changes, new = transformation.update(updates, floats, params, **extra_args)
            expected = "a transformation with an update that keeps the structure of its state"
            is_same = jax.tree.structure(floats) == jax.tree.structure(new)
            checks.require(is_same, f"{_NAME}.update", "tx", expected, "another structure")
            return changes, _map_leaves(_quantize_again, new, leaves, keys)

        quantized = [leaf for leaf in old if _is_quantized(leaf)]
        # Outside of a program each operation runs for itself, and memory is freed as soon as it can be.
        is_traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves(quantized))
        run = run_in_order if is_traced else lambda function, held: function(held)
        changes, new = run(compute, quantized)
        return changes, QuantizedState(new, step)

    return optax.GradientTransformationExtraArgs(init, update)


class _Rules(NamedTuple):
    """Which spec an array of the state has."""

    spec: _Spec
    second_spec: _Spec
    overrides: tuple[tuple[re.Pattern[str], _Spec | None], ...]

    def choose_specs(self, state: object, min_size: int) -> list[tuple[str, QuantSpec | None]]:
        """Return the path of each leaf, and its spec, or None for one that stays as it is."""
        leaves = jax.tree_util.tree_leaves_with_path(state)
        specs = []
        for (path, leaf), role in zip(leaves, jax.tree.leaves(_mark_leaves(state)), strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = self._choose_spec(name, leaf, role, min_size) if checks.has_dtype(leaf, dtypes.FLOATS) else None
            complete = None if spec is None or leaf.size == 0 else complete_spec(spec, leaf.shape)
            specs.append((name, complete))
        return specs

    def _choose_spec(self, name: str, leaf: jax.Array, role: str, min_size: int) -> _Spec | None:
        for pattern, spec in self.overrides:
            if pattern.search(name):
                return spec
        if role == KEPT or leaf.size < min_size:
            return None
        return self.second_spec if role == SECOND_MOMENT else self.spec


def _read_transformation(tx: optax.GradientTransformation | optax.MultiSteps) -> Any:
    """Return a transformation with an update that takes extra arguments."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    is_transformation = callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    expected = "an optax transformation, with init and update"
    checks.require_type(is_transformation, _NAME, "tx", expected, checks.describe_value(tx))
    return optax.with_extra_args_support(tx)


def _read_spec(argument: str, spec: _Spec) -> _Spec:
    """Return a spec after checking that it has a codebook with a level 0."""
    expected = "a Codebook, or a QuantSpec of one"
    checks.require_type(isinstance(spec, QuantSpec | Codebook), _NAME, argument, expected, checks.describe_value(spec))
    codebook = spec.codebook if isinstance(spec, QuantSpec) else spec
    checks.require(codebook is not None, _NAME, argument, expected, spec)
    has_zero = codebook is not None and 0.0 in codebook.levels
    checks.require(has_zero, _NAME, argument, "a codebook with the level 0", codebook)
    # A number between two levels becomes the code of one or the other, which are taken to be neighbours.
    is_ascending = codebook is not None and codebook.is_ascending
    checks.require(is_ascending, _NAME, argument, "a codebook with ascending levels", codebook)
    if isinstance(spec, QuantSpec) and spec.power_of_two:
        # An update finds the spec in the state, which shows the dtype of the scales, but not how they are rounded.
        expected = "power_of_two=False, or scale_dtype float8_e8m0fnu"
        checks.require(spec.scale_dtype == dtypes.E8M0, _NAME, argument, expected, spec)
    return spec


def _read_overrides(overrides: Mapping[str, _Spec | None] | None) -> tuple[tuple[re.Pattern[str], _Spec | None], ...]:
    """Return compiled regular expressions with their specs."""
    overrides = {} if overrides is None else overrides
    expected = "a dict from regular expressions to specs"
    is_mapping = isinstance(overrides, Mapping)
    checks.require_type(is_mapping, _NAME, "overrides", expected, checks.describe_value(overrides))
    rules = []
    for text, spec in overrides.items():
        argument = f"overrides[{text!r}]"
        checks.require_type(isinstance(text, str), _NAME, argument, "a string as key", checks.describe_value(text))
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise checks.ContractValueError(
                checks.format_message(_NAME, argument, "a regular expression", error)
            ) from error
        rules.append((pattern, None if spec is None else _read_spec(argument, spec)))
    return tuple(rules)


def _flatten_state(state: QuantizedState) -> tuple[list[Any], Any]:
    """Return the leaves of the wrapped transformation's state, and their structure, after checking them."""
    expected = "the state that init returned, a QuantizedState"
    is_state = isinstance(state, QuantizedState)
    checks.require_type(is_state, f"{_NAME}.update", "state", expected, type(state).__name__)
    leaves, structure = jax.tree.flatten(state.inner, is_leaf=_is_quantized)
    try:
        return [check_lazy(f"{_NAME}.update", "state", x) if _is_quantized(x) else x for x in leaves], structure
    except checks.ContractValueError as error:
        # Inside jax.shard_map a device may have got a part of a block.
        hint = "a device needs whole blocks: see jaxquant.distributed.find_shardings(whole_blocks=True)"
        raise checks.ContractValueError(f"{error} ({hint})") from error


def _make_keys(seed: int | None, step: Any, count: int) -> list[Any]:
    """Return a key for each leaf, or None for each without a seed."""
    if seed is None:
        return [None] * count
    key = jax.random.fold_in(jax.random.key(np.uint32(seed % 2**32)), step)
    return [jax.random.fold_in(key, index) for index in range(count)]


def _map_leaves(function: Callable[..., Any], state: object, *columns: list[Any]) -> Any:
    """Return a state with each leaf replaced by a function of it and of its entries in lists."""
    leaves, structure = jax.tree.flatten(state)
    return structure.unflatten([function(*row) for row in zip(leaves, *columns, strict=True)])


def _is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedArray)


def _dequantize(leaf: object) -> Any:
    return _dequantize_leaf(leaf) if isinstance(leaf, QuantizedArray) else leaf


def _quantize_first(leaf: jax.Array, named_spec: tuple[str, QuantSpec | None], key: jax.Array | None) -> Any:
    name, spec = named_spec
    if spec is None:
        return leaf
    with checks.prefix_errors(name):
        return quantize_leaf(leaf, key, function=_NAME, spec=spec)


def _quantize_again(leaf: jax.Array, old: object, key: jax.Array | None) -> Any:
    """Return a leaf of the new state in the form that it had in the old one."""
    if not isinstance(old, QuantizedArray):
        return leaf
    expected = "a transformation with an update that keeps the shapes of its state"
    checks.require(leaf.shape == old.shape, f"{_NAME}.update", "tx", expected, f"{leaf.shape} for {old.shape}")
    return quantize_like(leaf, key, old)


# Which leaves of optax's states become codes: moments and second moments.


def _mark_leaves(state: object) -> Any:
    """Return a tree of the structure of an optimizer state with the role of each leaf."""

    def mark_node(node: Any) -> Any:
        if not _is_state(node):
            return KEPT
        name = type(node).__name__
        roles = dict.fromkeys(_MOMENTS.get(name, ()), MOMENT)
        roles |= dict.fromkeys(_SECOND_MOMENTS.get(name, ()), SECOND_MOMENT)
        fields = []
        for field, child in zip(node._fields, node, strict=True):
            role = roles.get(field)
            fields.append(_mark_leaves(child) if role is None else jax.tree.map(lambda _, role=role: role, child))
        return type(node)(*fields)

    return jax.tree.map(mark_node, state, is_leaf=_is_state)


def _is_state(node: object) -> bool:
    """Return whether a node is a state that optax defines; another library may use the same names for other things."""
    name = type(node).__name__
    is_named = name in _MOMENTS or name in _SECOND_MOMENTS
    return is_named and type(node).__module__.partition(".")[0] == "optax" and hasattr(node, "_fields")


# Leaves of an optimizer state as blocks of codes: which elements share a scale, and how they are rounded.


def choose_blocks(shape: tuple[int, ...]) -> PerTensor | Blocked:
    """Return blocks of up to 256 elements, cut to the same length along one or more of the last axes.

    They are squares of 16 for most matrices. Others are chosen where those would need a fifth more scales, as in a
    matrix with few columns or a vector.

    Args:
        shape: the shape of the array, without a dimension of 0.
    """
    choices = {}
    for length in _LENGTHS:
        for count in range(1, len(shape) + 1):
            last = shape[-count:]
            if math.prod(min(n, length) for n in last) <= _LARGEST_BLOCK:
                # Blocks along more axes never need more scales, so they replace those along fewer.
                scales = math.prod(shape[:-count]) * math.prod(-(-n // length) for n in last)
                choices[length] = scales, Blocked(tuple(range(-count, 0)), length)
    if not choices:  # rank 0
        return PerTensor()
    fewest = min(scales for scales, _ in choices.values())
    return next(blocks for scales, blocks in choices.values() if scales <= _SLACK * fewest)


def complete_spec(spec: QuantSpec | Codebook, shape: tuple[int, ...]) -> QuantSpec:
    """Return a spec with the blocks of its granularity, or, of a codebook alone, with those chosen for the shape."""
    return QuantSpec(spec, choose_blocks(shape)) if isinstance(spec, Codebook) else spec


@functools.partial(jax.jit, static_argnames=("function", "spec"))
def quantize_leaf(x: jax.Array, key: jax.Array | None, *, function: str, spec: QuantSpec) -> QuantizedArray:
    """Return an array as codes; with a codebook from 0 up, positive numbers do not become 0.

    Args:
        x: float32, float16 or bfloat16.
        key: the key of a stochastic rounding, or None to round to the nearest level.
        function: Static. The public function that errors name.
        spec: Static. A codebook with a level 0, and a granularity.
    """
    scale_shape, _ = scale_from_range.derive_shapes(function, spec, x.shape)
    block_size = scale_from_range.derive_stored_block_size(function, spec, x.shape)
    return _quantize_blocks(x, key, spec, scale_shape, block_size)


@jax.jit
def quantize_like(x: jax.Array, key: jax.Array | None, old: QuantizedArray) -> QuantizedArray:
    """Return an array as codes of the codebook and in the blocks of another array of its shape."""
    # Under jax.vmap and jax.shard_map the old array and x have the shapes of their parts.
    spec = QuantSpec(old.codebook, scale_dtype=old.scale.dtype)
    return _quantize_blocks(x, key, spec, old.scale.shape, old.block_size)


@jax.jit
def _dequantize_leaf(q: QuantizedArray) -> jax.Array:
    """Return what `q.dequantize` returns, for an array of a codebook."""
    assert q.codebook is not None
    scale = dtypes.scale_as_float32(q.scale)
    product = read_levels(q.codebook, q.codes) * Aligned(q.block_size).expand(scale, q.codes)
    return affine.round_to_dtype(barriers.round_result(product), q.dtype).astype(q.dtype)


def _quantize_blocks(
    x: jax.Array, key: jax.Array | None, spec: QuantSpec, scale_shape: tuple[int, ...], block_size: BlockSize
) -> QuantizedArray:
    assert spec.codebook is not None
    x = lax.stop_gradient(x)
    values = x.astype(jnp.float32)
    largest = _compute_largest(values, scale_shape, block_size)
    scale, _ = scale_from_range.compute_scale_and_zero_point(spec, -largest, largest, scale_shape, scale_shape, x.dtype)
    quotient = divide_by_scale(values, Aligned(block_size).expand(scale, values), dtypes.FLOAT32)
    round_quotient = round_to_levels if key is None else functools.partial(_round_stochastically, key=key)
    codes = round_quotient(spec.codebook, quotient)
    if spec.codebook.levels[0] == 0:
        # The update of Adam divides by the root of the second moment: one that became 0 would make it huge. The next
        # level makes it smaller. A first moment may become 0: here the next level would make the update larger.
        codes = jnp.where((codes == 0) & (values > 0), 1, codes.astype(jnp.int32)).astype(spec.codebook.carrier)
    return QuantizedArray(codes, scale, dtype=x.dtype, block_size=block_size, codebook=spec.codebook)


def _compute_largest(x: jax.Array, shape: tuple[int, ...], block_size: BlockSize) -> jax.Array:
    """Return the largest magnitude in each block; NaN where a block has a NaN, 0 where it has no elements."""
    sizes = Aligned(block_size).sizes(shape, x.shape)
    assert sizes is not None
    # Of magnitudes, the bits sort as the numbers do, with NaN above infinity: an integer maximum loses no NaN.
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    padding = [(0, n * size - length, 0) for n, size, length in zip(shape, sizes, x.shape, strict=True)]
    if any(high for _, high, _ in padding):
        # With explicit mesh axes, JAX cannot infer how a padded dimension is sharded.
        bits = sharding.gather_axes(bits, [axis for axis, (_, high, _) in enumerate(padding) if high])
        bits = lax.pad(bits, np.int32(0), padding)
    bits = sharding.split_into_runs(bits, shape, sizes)
    # One axis after another: XLA:CPU uses vectors for the first ones only if they are reduced alone.
    for axis in range(1, x.ndim + 1):
        bits = jnp.max(bits, axis=axis, initial=0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _round_stochastically(codebook: Codebook, value: jax.Array, key: jax.Array) -> jax.Array:
    """Return the code of one of the two levels around each value, with the value as expectation.

    Values beyond the levels get the code of the first or the last one; NaN gets the first.
    """
    codes = round_to_levels(codebook, value)
    below = codes.astype(jnp.int32) - (read_levels(codebook, codes) > value).astype(jnp.int32)
    last = len(codebook.levels) - 1
    below = jnp.clip(below, 0, last - 1)
    low, high = (read_levels(codebook, (below + step).astype(codebook.carrier)) for step in (0, 1))
    chance = (value - low) / (high - low)
    is_above = jax.random.uniform(key, value.shape) < chance
    return (below + is_above.astype(jnp.int32)).astype(codebook.carrier)


# The order of an update: one array of the state after the other, so that few of them exist as floats at a time.
#
# XLA:CPU would dequantize all arrays before it quantizes the first new one. All floats of the state would then be in
# memory at once, which the codes are to avoid. An update of `optax` is one function of all arrays, so its program is
# cut into parts that share no array of the state, and each part gets its codes through a barrier that waits for the
# codes of the part before it.


def run_in_order(function: Callable[[list[Any]], Any], held: Sequence[Any]) -> Any:
    """Return the result of a function of pytrees, computed so that what depends on one of them follows another.

    Args:
        function: a function of a list of pytrees; it may close over further arrays. Results that depend on several of
            the pytrees join these in one part.
        held: the pytrees: arrays, at least one of them traced.
    """
    counts = [len(jax.tree.leaves(tree)) for tree in held]
    owners = [index for index, count in enumerate(counts) for _ in range(count)]
    program, result = jax.make_jaxpr(function, return_shape=True)(list(held))
    body, constants = _split_constants(program)
    # Optax computes some steps of all arrays in one call.
    inline_calls = functools.partial(_run_with_inlined_calls, body, constants, [{owner} for owner in owners])
    body, constants = _split_constants(jax.make_jaxpr(inline_calls)(*jax.tree.leaves(list(held))))
    values = dict(zip((*body.constvars, *body.invars), (*constants, *jax.tree.leaves(list(held))), strict=True))
    given, waiting, token = dict(values), list(body.eqns), []
    for outputs in _split_equations(body, owners):
        chosen, waiting = _select_equations(waiting, outputs)
        if token:
            # Also what a part takes from outside, such as gradients: XLA would compute too much of them too early.
            # A barrier does not accept keys of `jax.random`.
            own = [atom for atom in given if atom in chosen.free and jnp.issubdtype(atom.aval.dtype, jnp.number)]
            arrays, _ = lax.optimization_barrier(([given[atom] for atom in own], token))
            values |= given | dict(zip(own, arrays, strict=True))
        _evaluate(chosen, values)
        # The updates are not waited for: XLA may compute them where they are added to the parameters.
        codes = [atom for atom in outputs if jnp.issubdtype(atom.aval.dtype, jnp.integer)]
        token = [values[atom] for atom in codes or outputs]
    values |= given
    _evaluate(_select_equations(waiting, None)[0], values)
    results = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in body.outvars]
    return jax.tree.unflatten(jax.tree.structure(result), results)


def _split_constants(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program without its constants, and these. Newer versions of JAX keep them in the program itself."""
    return getattr(program, "jaxpr", program), tuple(getattr(program, "consts", ()))


def _run_with_inlined_calls(
    body: core.Jaxpr, constants: Sequence[Any], sources: list[set[int]], *arguments: jax.Array
) -> list[Any]:
    """Return the results of a program, with the bodies of calls that depend on several pytrees in place of the calls.

    Args:
        body: the program.
        constants: the values of its `constvars`.
        sources: the places of the pytrees that each argument depends on.
        arguments: its arguments.
    """
    values = dict(zip(body.constvars, constants, strict=True)) | dict(zip(body.invars, arguments, strict=True))
    needed: dict[Any, set[int]] = dict(zip(body.invars, sources, strict=True))

    def read_atom(atom: core.Var | core.Literal) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in body.eqns:
        operands = [set() if isinstance(atom, core.Literal) else needed.get(atom, set()) for atom in equation.invars]
        joined = set().union(*operands)
        if len(joined) > 1 and len(equation.outvars) > 1 and _is_plain_call(equation):
            inner, inner_constants = _split_constants(equation.params["jaxpr"])
            results = _run_with_inlined_calls(
                inner, inner_constants, operands, *(read_atom(atom) for atom in equation.invars)
            )
            values |= dict(zip(equation.outvars, results, strict=True))
        else:
            _evaluate(_select_equations([equation], None)[0], values)
        needed |= dict.fromkeys(equation.outvars, joined)
    return [read_atom(atom) for atom in body.outvars]


def _is_plain_call(equation: core.JaxprEqn) -> bool:
    """Return whether an equation is a call by `jax.jit` that asks for no sharding."""
    shardings = [*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ())]
    is_call = equation.primitive.name in ("jit", "pjit")
    return is_call and not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _split_equations(body: core.Jaxpr, owners: list[int]) -> list[list[Any]]:
    """Return the results that depend on pytrees, in parts such that no two depend on the same one.

    Args:
        body: the program.
        owners: the index of the pytree of each of its arguments.
    """
    needed: dict[Any, set[int]] = {variable: {owner} for variable, owner in zip(body.invars, owners, strict=True)}
    for equation in body.eqns:
        joined = set().union(*(needed.get(atom, set()) for atom in _list_operands(equation)))
        needed |= dict.fromkeys(equation.outvars, joined)
    parts: list[tuple[set[int], list[Any]]] = []
    for atom in body.outvars:
        trees, outputs = (set() if isinstance(atom, core.Literal) else needed.get(atom, set())), [atom]
        if not trees:
            continue
        apart = []
        for part in parts:
            if part[0] & trees:
                trees, outputs = trees | part[0], part[1] + outputs
            else:
                apart.append(part)
        parts = [*apart, (trees, outputs)]
    return [outputs for _, outputs in sorted(parts, key=lambda part: min(part[0]))]


class _Equations(NamedTuple):
    """Some equations of a program.

    Attributes:
        equations: in the order of the program.
        free: the variables that they read and do not compute.
        results: the variables that they compute.
    """

    equations: list[Any]
    free: dict[Any, None]
    results: list[Any]


def _select_equations(equations: Sequence[Any], outputs: list[Any] | None) -> tuple[_Equations, list[Any]]:
    """Return the equations that some outputs need, or all of them for None, and the others."""
    chosen, others = list(equations), []
    if outputs is not None:
        wanted, chosen = set(outputs), []
        for equation in reversed(equations):
            is_wanted = not wanted.isdisjoint(equation.outvars)
            (chosen if is_wanted else others).append(equation)
            if is_wanted:
                wanted.update(_list_operands(equation))
        chosen.reverse()
        others.reverse()
    results = [atom for equation in chosen for atom in equation.outvars if not isinstance(atom, core.DropVar)]
    computed = set(results)
    # A dict keeps the order, which in a set would differ between runs.
    free = dict.fromkeys(atom for equation in chosen for atom in _list_operands(equation) if atom not in computed)
    return _Equations(chosen, free, results), others


def _list_operands(equation: core.JaxprEqn) -> list[Any]:
    """Return the variables that an equation reads."""
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def _evaluate(chosen: _Equations, values: dict[Any, Any]) -> None:
    """Add the results of equations to the values."""
    effects = frozenset().union(*(equation.effects for equation in chosen.equations))
    program = core.Jaxpr([], list(chosen.free), chosen.results, chosen.equations, effects, _NO_DEBUG_INFO)
    results = eval_jaxpr(program, (), *(values[atom] for atom in chosen.free))
    values |= dict(zip(chosen.results, results, strict=True))


# How a state is stored, as a table.


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """How an array of a state is stored.

    Attributes:
        path: its path in the state, such as "inner/0/mu/dense/kernel".
        shape: its shape.
        dtype: the dtype in which the transformation computes with it.
        stored: its codes and the elements that share a scale, or its dtype.
        nbytes: its bytes.
        float_nbytes: its bytes in `dtype`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    stored: str
    nbytes: int
    float_nbytes: int


@dataclasses.dataclass(frozen=True)
class StateReport:
    """What `describe_state` returns; `print` shows it as a table.

    Attributes:
        rows: a `LeafRow` for each array.
    """

    rows: tuple[LeafRow, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(row.nbytes for row in self.rows)

    @property
    def float_nbytes(self) -> int:
        """The bytes that all arrays would have without codes."""
        return sum(row.float_nbytes for row in self.rows)

    def __str__(self) -> str:
        """Return a table with a line for each array and one for all."""
        total = LeafRow("total", (), "", "", self.nbytes, self.float_nbytes)
        lines = [("array", "shape", "dtype", "stored as", "bytes", "of float")]
        for row in (*self.rows, total):
            ratio = row.nbytes / row.float_nbytes if row.float_nbytes else 1.0
            shape = "x".join(map(str, row.shape))
            lines.append((row.path, shape, str(row.dtype), row.stored, str(row.nbytes), f"{ratio:.3f}"))
        widths = [max(len(line[column]) for line in lines) for column in range(6)]
        aligned = [[cell.ljust(n) for cell, n in zip(line[:4], widths, strict=False)] for line in lines]
        numbers = [[cell.rjust(n) for cell, n in zip(line[4:], widths[4:], strict=True)] for line in lines]
        return "\n".join("  ".join((*left, *right)).rstrip() for left, right in zip(aligned, numbers, strict=True))


def describe_state(state: object) -> StateReport:
    """Return which array of an optimizer state is stored how, and in how many bytes.

    Args:
        state: a state, or any other pytree, of arrays or of `jax.ShapeDtypeStruct`, for example from `jax.eval_shape`.

    Returns:
        A report with a row for each array. `print` shows it as a table.

    Raises:
        TypeError: a leaf is neither an array nor a number.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxquant as jq
        >>> tx = jq.optim.quantize_state(optax.sgd(0.1, momentum=0.9))
        >>> params = {"kernel": jnp.ones((256, 64)), "bias": jnp.zeros(64)}
        >>> print(jq.optim.describe_state(jax.eval_shape(tx.init, params)))
        array                 shape   dtype    stored as             bytes  of float
        inner/0/trace/bias    64      float32  float32                 256     1.000
        inner/0/trace/kernel  256x64  float32  dynamic, 16x16        16640     0.254
        total                                                        16896     0.257

    Source: Dettmers et al., arXiv 2110.02861, section 2.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, QuantizedArray))
    return StateReport(tuple(_describe_leaf(path, leaf) for path, leaf in leaves))


def _describe_leaf(path: tuple[Any, ...], leaf: Any) -> LeafRow:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)  # a Python number
    shape, dtype = tuple(leaf.shape), leaf.dtype
    # A key of jax.random has an extended dtype, which has a size as well.
    float_nbytes = math.prod(shape) * dtype.itemsize
    if not isinstance(leaf, QuantizedArray):
        return LeafRow(name, shape, dtype, str(dtype), float_nbytes, float_nbytes)
    block = "x".join(map(str, _derive_block(leaf)))
    stored = f"{leaf.format}, {block}"
    nbytes = leaf.nbytes
    return LeafRow(name, shape, dtype, stored, nbytes, float_nbytes)


def _derive_block(q: QuantizedArray) -> tuple[int, ...]:
    """Return the lengths of the elements that share a scale."""
    sizes = Aligned(q.block_size).sizes(tuple(q.scale.shape), q.shape)
    return q.shape if sizes is None else sizes
