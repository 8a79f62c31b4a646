"""`allocate_bits`: the dtype of each weight, by an integer program over bytes and damage."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import parts
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks
from ..calibration import loop
from ..transform import Prepared, Rule
from ..transform.session import Session, Signature, TracedCall, describe_site, list_programs
from .bit_plan import BitPlan, solve_plan
from .methods import Nearest

_NAME = "ptq.allocate_bits"
FLOAT = "float"
_EIGHT_BITS = ("int8", "uint8")  # the dtypes that have a reduced range


def allocate_bits(
    prepared: Prepared, params: Any, batches: Iterable[Any], *, budget: int | None = None,
    most_damage: float | None = None, dtypes: Sequence[str] = ("int2", "int4", "int8", FLOAT), **arguments: Any,
) -> BitPlan:  # fmt: skip
    """Choose a dtype for each weight: the least damage for a budget of bytes, or the fewest bytes for some damage.

    minimize sum_l damage[l, choice_l] subject to sum_l bytes[l, choice_l] <= budget

    The damage of a choice is measured: the sum of squared differences of the function's results, with this weight
    rounded (with the range of `search_range`) and all others in floats, over the sum of squared results. Damages of
    several weights are taken to add up. The program is solved exactly, by branch and bound.

    Args:
        prepared: the prepared function; each weight gets one of the dtypes in place of the dtype in its rule.
        params: its parameters, in floats.
        batches: batches, as for `Prepared.calibrate`.
        budget: the most bytes of all weights that the rules quantize, scales and zero points included.
        most_damage: the largest sum of damages. Either this or `budget`.
        dtypes: the candidates, "float" for a weight that stays as it is. The other attributes of a spec stay, so that a
            rule with offsets takes unsigned dtypes only. Pass only dtypes that the operations can contract.
        **arguments: keyword arguments of every call.

    Returns:
        A `ptq.BitPlan`; its `rules` prepare the function with these dtypes.

    Raises:
        TypeError: an argument has a wrong type.
        ModuleNotFoundError: the package scipy is not installed.
        ValueError: both or none of budget and most_damage are given; no plan meets them: the error says what the least
            is; no batch reaches a weight; or the function returns no floats, or a NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: (x @ params["large"]) + 0.01 * (x @ params["small"])
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> params = {"large": jax.random.normal(keys[0], (64, 8)), "small": jax.random.normal(keys[1], (64, 8))}
        >>> x = jax.random.normal(keys[2], (32, 64))
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> plan = ptq.allocate_bits(prepared, params, [x], budget=750)
        >>> plan.choices, plan.nbytes
        ({'large': 'int8', 'small': 'int2'}, 704)

    Source: Hubara et al., arXiv 2006.10518, section 3.4, for the integer program.
    """
    session = Session(_NAME, prepared, params)
    has_one = (budget is None) != (most_damage is None)
    checks.require(has_one, _NAME, "budget", "either budget or most_damage", "both" if budget is not None else "none")
    checks.check_real(_NAME, *(("budget", budget) if most_damage is None else ("most_damage", most_damage)))
    is_list = not isinstance(dtypes, str)
    checks.require_type(is_list, _NAME, "dtypes", f"several dtypes, such as [{dtypes!r}]", repr(dtypes))
    names = tuple(dtypes)
    checks.require(bool(names), _NAME, "dtypes", "one or more dtypes", "none")
    expected = "a function with weights that its rules quantize"
    checks.require(bool(prepared.leaves), _NAME, "prepared", expected, "none")
    signature = session.parameters
    split = loop.read_batches(_NAME, batches, arguments, "batches")
    calls = [(args, {**kwargs, **arguments}) for args, kwargs in split]
    others = [Signature(call) for call in calls]
    measure = _make_measure(prepared, signature, others)
    # Each batch may have a program of its own, if it has other static arguments.
    traced = [session.trace(*other.rebuild(other.arrays)) for other in list_programs(others)]
    replaced = [x for call in traced for x in call.analysis.sites.values() if call.plan.sites[x.name].is_replaced]
    read = {path for site in replaced for path in describe_site(site, prepared.names).paths}
    missing = [prepared.names[leaf] for leaf in prepared.leaves if prepared.names[leaf] not in read]
    # No damage would be measured for it, and the least dtype would be the best one.
    expected, got = "batches that reach each weight that the rules quantize", f"none for {', '.join(missing[:4])}"
    checks.require(not missing, _NAME, "batches", expected, got)
    table: dict[str, dict[str, tuple[int, float]]] = {}
    method = Nearest("searched")
    for leaf, plan in prepared.leaves.items():
        w, row = jnp.asarray(signature.arrays[leaf]), {}
        for name in names:
            # A dtype may contradict what the rule says, as a signed one an offset.
            with checks.prefix_errors(f"{prepared.names[leaf]} as {name}"), checks.name_errors(_NAME):
                q = w if name == FLOAT else method.quantize(w, None, _change_dtype(plan.spec, name), -1)
            is_codes = isinstance(q, QuantizedArray)
            size = q.nbytes if isinstance(q, QuantizedArray) else parts.count_stored_bytes(w)
            row[name] = (int(size), measure(leaf, q.dequantize()) if is_codes else 0.0)  # type: ignore[union-attr]
        table[prepared.names[leaf]] = row
    sizes, damages = (np.array([[row[name][k] for name in names] for row in table.values()], float) for k in range(2))
    indices = solve_plan(sizes, damages, budget, most_damage, list(table))
    choices = {path: names[place] for path, place in zip(table, indices, strict=True)}
    chosen = [table[path][name] for path, name in choices.items()]
    return BitPlan(
        choices, sum(size for size, _ in chosen), float(sum(damage for _, damage in chosen)), table,
        _make_rules(prepared, traced, choices),
    )  # fmt: skip


def _change_dtype(spec: QuantSpec, name: str) -> QuantSpec:
    """Return a spec with another dtype, and with the attributes that follow from the dtype."""
    follows: dict[str, Any] = {"symmetric": None, "narrow_range": None, "zero_point_granularity": None}
    return dataclasses.replace(spec, dtype=name, reduce_range=spec.reduce_range and name in _EIGHT_BITS, **follows)


def _make_measure(prepared: Prepared, signature: Signature, others: Sequence[Signature]) -> Any:
    """Return a function of a parameter and its replacement, which returns the damage."""

    @jax.jit
    def run_function(arrays: Sequence[Any], other: Signature) -> jax.Array:
        positional, named = other.rebuild(other.arrays)
        results = jax.tree.leaves(prepared.function(signature.rebuild(arrays), *positional, **named))
        floats = [x for x in results if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        checks.require(bool(floats), _NAME, "prepared", "a function that returns floats", "none")
        return jnp.concatenate([x.astype(jnp.float32).ravel() for x in floats])

    expected = [np.asarray(run_function(signature.arrays, other), np.float64) for other in others]
    for index, result in enumerate(expected):
        # The damage of every dtype would be NaN.
        wanted, got = "batches with finite results", f"a NaN or an infinity in the results of batches[{index}]"
        checks.require(bool(np.isfinite(result).all()), _NAME, "batches", wanted, got)
    # Each damage would be 0.
    is_empty = not sum(x.size for x in expected)
    checks.require(not is_empty, _NAME, "batches", "batches with results", "results without elements")
    total = sum(float(np.sum(x**2)) for x in expected)

    def measure_damage(leaf: int, values: jax.Array) -> float:
        arrays = [values if place == leaf else x for place, x in enumerate(signature.arrays)]
        pairs = zip(others, expected, strict=True)
        # In float64, in which a sum over many elements keeps the small squares that 8 bits leave.
        squares = [np.sum((np.asarray(run_function(arrays, other), np.float64) - x) ** 2) for other, x in pairs]
        return float(np.sum(squares)) / max(total, np.finfo(np.float64).tiny)

    return measure_damage


def _make_rules(prepared: Prepared, calls: Sequence[TracedCall], choices: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules of a prepared function, with another dtype for each weight in front."""
    changed: dict[Rule, int] = {}
    weights = {prepared.names[leaf]: plan.weight for leaf, plan in prepared.leaves.items()}
    pairs = [(call.plan, site) for call in calls for site in call.analysis.sites.values()]
    for plan, site in pairs:
        if not plan.sites[site.name].is_replaced:
            continue
        view = describe_site(site, prepared.names)
        matching = ((index, rule) for index, rule in enumerate(prepared.rules) if rule.matches(view))
        index, rule = next(matching, (0, None))
        for path in view.paths:
            if rule is None or rule.weight is None or path not in choices:
                continue
            # A path may have characters that a pattern as in a shell would interpret.
            pattern = re.compile(f"^{re.escape(path)}$")
            if choices[path] == FLOAT:
                new = Rule(pattern, keep=FLOAT)
            else:
                # The Weight that was measured, which belongs to another rule where the uses of a tied table differ.
                weight = weights[path] or rule.weight
                options = dict(weight.options)
                if choices[path] not in _EIGHT_BITS:
                    options.pop("reduce_range", None)
                weight = dataclasses.replace(weight, dtype=choices[path], options=options)
                new = dataclasses.replace(rule, path=pattern, weight=weight)
            changed.setdefault(new, index)
    # In front, because the first rule that matches applies, and in their order: the rules for the uses of one parameter
    # may have different conditions. The rules of the function still hold for all other contractions.
    return (*sorted(changed, key=changed.__getitem__), *prepared.rules)
