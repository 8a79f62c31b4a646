"""`prepare`, which plans how the contractions of a function run on codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._arrays.quantized_array import QuantizedArray
from .._arrays.scale_from_range import derive_block_size
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.granularity import Aligned, Blocked, PerAxis, PerTensor
from . import _coverage, _ranges
from ._calls import Signature, TracedCall, TracedFunctions, is_quantized, trace_call
from ._plan import can_contract_given, describe_site
from ._prepared import Prepared
from .rules import Rule

_NAME = "prepare"


def prepare(
    function: Callable[..., Any], params: Any, /, *args: Any, rules: Sequence[Rule], strict: bool = False, **kwargs: Any
) -> Prepared:
    """Plan how the contractions of a function run on codes.

    The function is traced, and nothing is computed. Its program is searched for contractions (`dot_general`,
    `ragged_dot`, `conv_general_dilated`, and lookups of rows of a parameter), and each parameter is followed through
    transposes, reshapes, slices and concatenations, loops, branches and derivative rules, to the contractions that use
    it. The rules then decide how each contraction runs. The function itself is not changed.

    Args:
        function: a function of the parameters and of other arguments, such as a Linen module's `apply`.
        params: the parameters: a pytree of arrays, or an NNX module. `jax.ShapeDtypeStruct` may stand for an array.
            Quantized arrays, as of a checkpoint that was loaded, count as floats where the function contracts them as
            it contracts floats: the contraction then runs on their codes, and the row of the coverage says so. A
            function that reads the codes itself gets such an array as it is.
        *args: the other arguments. Arrays and Python floats are traced; ints, bools, strings and other objects are
            static.
        rules: Static. What to do with each contraction; the first rule that matches applies. `jq.recipes` has ready
            ones.
        strict: Static. Whether to raise an error if a contraction that a rule wants on codes stays in floats, here and
            in later calls.
        **kwargs: keyword arguments of the function. Those named `rules` or `strict` cannot be passed here; give the
            function other names for them.

    Returns:
        The plan, with its `coverage`, and the functions that calibrate, convert, call and train.

    Raises:
        TypeError: function is not callable, rules are not `Rule`s, or there is no float array in the parameters.
        ValueError: a rule with a path matches no contraction, or only those that rules before it match; rules give one
            parameter different Weights, and no Weight fits all of its uses; a spec cannot be contracted; or strict
            is True and a contraction that a rule wants on codes stays in floats.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> params = {"first": jnp.eye(4), "second": jnp.ones((4, 2))}
        >>> x = jnp.array([[0.0, 0.5, 1.0, 2.5]])
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_dynamic())
        >>> prepared
        Prepared(<lambda>: 2 integer)
        >>> q = prepared.convert(params)
        >>> prepared.apply(q, x).round(2)
        Array([[4., 4.]], dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 2, for contractions of codes; Bradbury et al., "JAX: composable
    transformations of Python+NumPy programs", for the programs that are traced.
    """
    checks.check_function(_NAME, "function", function)
    rules = _read_rules(rules)
    checks.check_flag(_NAME, "strict", strict)
    traced = TracedFunctions(function)
    given = _match_given(traced, rules, params, args, kwargs)
    # No other parameter is planned yet, so that the function itself reads all other codes among the parameters.
    call = trace_call(traced, rules, params, args, kwargs, given.keys(), given)
    names = call.parameters.names
    has_floats = bool(given) or any(getattr(x, "dtype", None) in dtypes.FLOATS for x in call.parameters.arrays)
    dtype_names = [
        f"{name} of {getattr(x, 'dtype', type(x).__name__)}"
        for name, x in zip(names, call.parameters.arrays, strict=True)
    ]
    expected = "a pytree with arrays of float32, bfloat16 or float16"
    checks.require_type(has_floats, _NAME, "params", expected, ", ".join(dtype_names[:4]) or "no arrays")
    for rule in call.plan.unmatched:
        _refuse_unmatched(rule, call)
    coverage = _coverage.make_coverage(call.analysis, call.plan, names)
    if strict:
        _coverage.check_strict(_NAME, coverage)
    ranges = _ranges.list_ranges(call.analysis, call.plan)
    prepared = Prepared(
        function, rules, bool(strict), names, call.plan.leaves, frozenset(given), coverage, ranges, call.plan.regions,
        traced,
    )  # fmt: skip
    _check_specs(prepared, params, args, kwargs)
    return prepared


def _read_rules(rules: Any) -> tuple[Rule, ...]:
    is_sequence = isinstance(rules, Sequence) and not isinstance(rules, str)
    holds = is_sequence and all(isinstance(rule, Rule) for rule in rules)
    expected = "a sequence of Rules, such as jq.recipes.w8a8_dynamic()"
    checks.require_type(holds, _NAME, "rules", expected, checks.describe_value(rules))
    return tuple(rules)


def _match_given(
    traced: TracedFunctions, rules: Sequence[Rule], params: Any, args: Any, kwargs: Any
) -> dict[int, QuantSpec]:
    """Return the specs of the quantized parameters that a function contracts as it contracts floats, by their place."""
    specs = {place: _read_spec(x) for place, x in enumerate(Signature(params).arrays) if is_quantized(x)}
    if not specs:
        return {}
    try:
        call = trace_call(traced, rules, params, args, kwargs, specs.keys(), specs)
    except Exception:  # of the function, which does not take floats here
        return {}
    views = [(site, describe_site(site, call.parameters.names)) for site in call.analysis.sites.values()]
    chosen = [(site, next((rule for rule in rules if rule.matches(view)), None)) for site, view in views]
    uses = {place: [(site, rule) for site, rule in chosen if place in site.leaves] for place in specs}
    return {
        place: specs[place]
        for place, sites in uses.items()
        if sites and all(can_contract_given(site, rule, place, specs[place]) for site, rule in sites)
    }


def _read_spec(q: QuantizedArray) -> QuantSpec:
    """Return the spec of codes, as their shapes tell it."""
    scaled = tuple(axis for axis, length in enumerate(q.scale.shape) if length != 1)
    granularity: Any = PerAxis(scaled) if scaled else PerTensor()
    if q.block_size is not None and not isinstance(q.block_size, tuple):
        cut = [axis for axis, length in enumerate(q.scale.shape) if length != q.shape[axis]]
        blocked = [axis for axis in cut if q.scale.shape[axis] == -(-q.shape[axis] // q.block_size)]
        granularity = Blocked((blocked or cut or [q.ndim - 1])[-1], q.block_size)
    else:
        # The blocks of files are whole, so that their shapes tell their sizes.
        sizes = Aligned(q.block_size).sizes(tuple(q.scale.shape), q.shape)
        cut = [axis for axis in scaled if q.scale.shape[axis] != q.shape[axis]]
        if cut and sizes is not None:
            # Of blocks along several axes those along the last one: a contraction takes one size.
            granularity = Blocked(cut[-1], sizes[cut[-1]])
    offset = q.offset is not None and q.codebook is None
    symmetric = q.zero_point is None and not offset
    options: dict[str, Any] = {"symmetric": symmetric, "narrow_range": False, "offset": offset}
    scale = q.scale
    # A spec cannot say all nested scales, such as bitsandbytes' with an offset of their own: new codes
    # then have float32 scales.
    if not isinstance(scale, QuantizedArray):
        options["scale_dtype"] = scale.dtype
    elif q.zero_point is None and scale.offset is None and scale.codebook is None:
        inner = _read_spec(scale)
        # Unsigned codes of scales begin at 0.
        is_symmetric = not dtypes.is_integer(inner.dtype) or inner.bounds[0] < 0
        options["scale_spec"] = dataclasses.replace(inner, symmetric=is_symmetric)
    return QuantSpec(q.format, granularity, **options)


def _refuse_unmatched(rule: Rule, call: TracedCall) -> None:
    """Raise because a rule with a path applies to no contraction."""
    sites, names = call.analysis.sites.values(), call.parameters.names
    hidden = [site.name for site in sites if rule.matches(describe_site(site, names))]
    if hidden:
        expected = "each rule before those that match all of its contractions, because the first that matches applies"
        got = f"{rule.path!r} after rules that match {', '.join(hidden[:4])}{', ...' if len(hidden) > 4 else ''}"
        checks.refuse(_NAME, "rules", expected, got)
    paths = sorted({path for site in sites for path in [names[leaf] for leaf in site.leaves] or [site.name]})
    got = f"{rule.path!r}, which matches none of {', '.join(paths[:12])}{', ...' if len(paths) > 12 else ''}"
    checks.refuse(_NAME, "rules", "paths that match a contraction", got)


def _needs_trial(spec: QuantSpec) -> bool:
    """Return whether there are contractions that do not take codes of a spec."""
    has_forms = spec.codebook is not None or spec.offset or spec.scale_spec is not None
    return has_forms or derive_block_size(spec) is not None


def _check_specs(prepared: Prepared, params: Any, args: Any, kwargs: Any) -> None:
    """Raise if the codes of an operand cannot be contracted as planned."""
    # Codes with a scale per output, and those with one per row, can always be contracted, so they are not tried.
    specs = [plan.spec for plan in prepared.leaves.values()]
    has_blocks = any(rule.activation is not None and rule.activation.block is not None for rule in prepared.rules)
    if not has_blocks and not any(_needs_trial(spec) for spec in specs):
        return
    signature, others = Signature(params), Signature((args, kwargs))

    def apply_abstractly(arrays: Any, rest: Any) -> Any:
        positional, named = others.rebuild(rest)
        ranges = prepared.finalize(prepared.init())
        return prepared.apply(prepared.convert(signature.rebuild(arrays), ranges), *positional, **named)

    with checks.name_errors(_NAME):
        jax.eval_shape(apply_abstractly, signature.arrays, others.arrays)
