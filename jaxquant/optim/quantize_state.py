"""`quantize_state`: any optax transformation with its state in 8-bit blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._arrays.codebook import Codebook
from .._arrays.quantized_array import QuantizedArray, check_lazy
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from . import blocks, ordering, roles
from .codebooks import dynamic, logarithmic

_NAME = "optim.quantize_state"
_Spec = QuantSpec | Codebook


class QuantizedState(NamedTuple):
    """The state of a transformation that `quantize_state` returns, a pytree.

    Attributes:
        inner: the state of the wrapped transformation, with a `jq.QuantizedArray` in place of each quantized array.
        step: the number of updates, int32, from which the keys of a stochastic rounding are made; None without a seed.
    """

    inner: Any
    step: Any = None


def quantize_state(
    tx: Any,
    spec: _Spec = dynamic,
    second_spec: _Spec = logarithmic,
    *,
    overrides: Mapping[str, _Spec | None] | None = None,
    min_size: int = 4096,
    seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation whose state is kept in 8-bit blocks between updates.

    An update dequantizes the state, calls the update of `tx`, and quantizes the new state. The updates themselves are
    computed from the new state before it is rounded. With Adam the state takes 0.26 of its bytes in float32.

    The moments in the states that optax defines become codes, if they are float32, float16 or bfloat16 and have at
    least `min_size` elements: second moments, which are never negative, as `second_spec` says, the others as `spec`
    says. All other arrays stay as they are: those of a state that optax does not define, parameters, gradients that are
    summed over several steps, and sums that only grow (Adagrad). `overrides` chooses for single arrays.
    `jq.optim.describe_state` lists what became of each.

    A number is rounded to the nearest level of the codebook, and to the lower one if it is halfway between two. With a
    codebook that starts at 0, as that of second moments does, a positive number never becomes 0, but at least the
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

    def init(params: Any) -> QuantizedState:
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
            expected = "a transformation whose update keeps the structure of its state"
            is_same = jax.tree.structure(floats) == jax.tree.structure(new)
            checks.require(is_same, f"{_NAME}.update", "tx", expected, "another structure")
            return changes, _map_leaves(_quantize_again, new, leaves, keys)

        quantized = [leaf for leaf in old if _is_quantized(leaf)]
        # Outside of a program each operation runs for itself, and memory is freed as soon as it can be.
        is_traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves(quantized))
        run = ordering.run_in_order if is_traced else lambda function, held: function(held)
        changes, new = run(compute, quantized)
        return changes, QuantizedState(new, step)

    return optax.GradientTransformationExtraArgs(init, update)


class _Rules(NamedTuple):
    """Which spec an array of the state has."""

    spec: _Spec
    second_spec: _Spec
    overrides: tuple[tuple[re.Pattern[str], _Spec | None], ...]

    def choose_specs(self, state: Any, min_size: int) -> list[tuple[str, QuantSpec | None]]:
        """Return the path of each leaf, and its spec, or None for one that stays as it is."""
        leaves = jax.tree_util.tree_leaves_with_path(state)
        specs = []
        for (path, leaf), role in zip(leaves, jax.tree.leaves(roles.mark_leaves(state)), strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = self._choose_spec(name, leaf, role, min_size) if checks.has_dtype(leaf, dtypes.FLOATS) else None
            complete = None if spec is None or leaf.size == 0 else blocks.complete_spec(spec, leaf.shape)
            specs.append((name, complete))
        return specs

    def _choose_spec(self, name: str, leaf: Any, role: str, min_size: int) -> _Spec | None:
        for pattern, spec in self.overrides:
            if pattern.search(name):
                return spec
        if role == roles.KEPT or leaf.size < min_size:
            return None
        return self.second_spec if role == roles.SECOND_MOMENT else self.spec


def _read_transformation(tx: Any) -> Any:
    """Return a transformation whose update takes extra arguments."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    is_transformation = callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    expected = "an optax transformation, with init and update"
    checks.require_type(is_transformation, _NAME, "tx", expected, checks.describe_value(tx))
    return optax.with_extra_args_support(tx)


def _read_spec(argument: str, spec: Any) -> _Spec:
    """Return a spec after checking that it has a codebook with a level 0."""
    expected = "a Codebook, or a QuantSpec of one"
    checks.require_type(isinstance(spec, QuantSpec | Codebook), _NAME, argument, expected, checks.describe_value(spec))
    codebook = spec.codebook if isinstance(spec, QuantSpec) else spec
    checks.require(codebook is not None, _NAME, argument, expected, spec)
    has_zero = codebook is not None and 0.0 in codebook.levels
    checks.require(has_zero, _NAME, argument, "a codebook with the level 0", codebook)
    if isinstance(spec, QuantSpec) and spec.power_of_two:
        # An update finds the spec in the state, which shows the dtype of the scales, but not how they are rounded.
        expected = "power_of_two=False, or scale_dtype float8_e8m0fnu"
        checks.require(spec.scale_dtype == dtypes.E8M0, _NAME, argument, expected, spec)
    return spec


def _read_overrides(overrides: Any) -> tuple[tuple[re.Pattern[str], _Spec | None], ...]:
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


def _flatten_state(state: Any) -> tuple[list[Any], Any]:
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
    return [jax.random.fold_in(key, place) for place in range(count)]


def _map_leaves(function: Any, state: Any, *columns: list[Any]) -> Any:
    """Return a state with each leaf replaced by a function of it and of its entries in lists."""
    leaves, structure = jax.tree.flatten(state)
    return structure.unflatten([function(*row) for row in zip(leaves, *columns, strict=True)])


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedArray)


def _dequantize(leaf: Any) -> Any:
    return blocks.dequantize_leaf(leaf) if isinstance(leaf, QuantizedArray) else leaf


def _quantize_first(leaf: Any, named_spec: tuple[str, QuantSpec | None], key: Any) -> Any:
    name, spec = named_spec
    if spec is None:
        return leaf
    with checks.prefix_errors(name):
        return blocks.quantize_leaf(leaf, key, function=_NAME, spec=spec)


def _quantize_again(leaf: Any, old: Any, key: Any) -> Any:
    """Return a leaf of the new state in the form that it had in the old one."""
    if not isinstance(old, QuantizedArray):
        return leaf
    expected = "a transformation whose update keeps the shapes of its state"
    checks.require(leaf.shape == old.shape, f"{_NAME}.update", "tx", expected, f"{leaf.shape} for {old.shape}")
    return blocks.quantize_like(leaf, key, old)
