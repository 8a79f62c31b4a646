"""A call of a function: the structure of its arguments, its program, and the plan of its contractions."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._program import analysis, jaxpr, views
from ._plan import LeafPlan, ProgramPlan, make_plan, plan_regions
from ._regions.folding import bind_parameters
from ._regions.statics import StaticValues
from .rules import Rule

# The number of functions that `TracedFunctions` keeps: a static argument may be a counter.
_MOST_KEPT = 32


def is_quantized(value: Any) -> bool:
    """Return whether a leaf is a quantized array."""
    return isinstance(value, QuantizedArray)


def is_array(value: Any) -> bool:
    """Return whether a leaf is an array, or stands for one; a Python float or complex number counts as one."""
    # Ints and bools are not: they decide on shapes and branches, while floats such as a temperature vary from call to
    # call.
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, float | complex)


class Structure:
    """What a tree of arguments has besides its arrays: what stays the same while a function is traced.

    Args:
        tree: the structure of the tree.
        leaves: its leaves, with None in place of the arrays.
        places: the places of the arrays among the leaves.
        names: the path of each array.
        module: the structure of the NNX module, if the tree is its state, or None.
    """

    def __init__(self, tree: Any, leaves: Sequence[Any], places: Sequence[int], names: Sequence[str], module: Any):
        self._tree, self._leaves, self._places, self._module = tree, tuple(leaves), tuple(places), module
        self.names = tuple(names)

    @property
    def key(self) -> Any:
        """What decides on the program of a function, apart from the arrays; it is not always hashable."""
        # True equals 1, and yet a function may return something else for it.
        return self._tree, self._places, tuple((type(leaf), leaf) for leaf in self._leaves), self._module

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure) or (self._tree, self._places) != (other._tree, other._places):
            return False
        pairs = zip((*self._leaves, self._module), (*other._leaves, other._module), strict=True)
        return all(a is b or (type(a) is type(b) and a == b) for a, b in pairs)

    def __hash__(self) -> int:
        # The values themselves may have no hash.
        return hash((self._tree.num_leaves, self._places, tuple(map(type, self._leaves))))

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with these arrays."""
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        tree = jax.tree.unflatten(self._tree, leaves)
        return tree if self._module is None else sys.modules["flax.nnx"].merge(self._module, tree)


class Signature:
    """A tree of arguments, taken apart: its arrays, and what stays the same while a function is traced.

    It is a pytree of its arrays. As an argument of `jax.jit` it gives each set of static arguments a program.

    Attributes:
        arrays: the leaves that are arrays; a quantized array is one leaf.
        structure: the rest.
    """

    def __init__(self, tree: Any) -> None:
        tree, module = _split_module(tree)
        paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
        places = [place for place, (_, leaf) in enumerate(paths) if is_array(leaf)]
        leaves = [None if is_array(leaf) else leaf for _, leaf in paths]
        names = _name_paths([paths[place][0] for place in places])
        self.arrays = [paths[place][1] for place in places]
        self.structure = Structure(structure, leaves, places, names, module)

    @property
    def names(self) -> tuple[str, ...]:
        """The path of each array."""
        return self.structure.names

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays."""
        return self.structure.rebuild(arrays)


def _restore_signature(structure: Structure, arrays: Any) -> Signature:
    """Return the signature with these arrays, which may be any objects."""
    signature = object.__new__(Signature)
    signature.arrays, signature.structure = list(arrays), structure
    return signature


jax.tree_util.register_pytree_node(Signature, lambda x: (x.arrays, x.structure), _restore_signature)


def list_programs(signatures: Sequence[Signature]) -> list[Signature]:
    """Return the first of each run of signatures that may have a program of their own.

    These are those with other static values, shapes or dtypes.
    """
    firsts: dict[Any, Signature] = {}
    for signature in signatures:
        leaves, structure = jax.tree.flatten(signature)
        # A Python float takes the dtype of the array that it meets.
        weak = [getattr(x, "weak_type", isinstance(x, float | complex)) for x in leaves]
        shapes = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
        firsts.setdefault((structure, shapes, tuple(weak)), signature)
    return list(firsts.values())


class TracedFunctions:
    """A function of arrays for each structure of arguments, which JAX traces once for each of their shapes and dtypes.

    JAX keeps the trace of a function as long as the function exists, and uses it where its own configuration, the mesh
    and the named axes are the same. So the arrays of the arguments must not be part of the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._kept: dict[Any, Callable[..., Any]] = {}

    def trace(self, parameters: Signature, arguments: Signature, described: Sequence[Any]) -> jaxpr.Trace:
        """Return the program for these arguments.

        Args:
            parameters: the parameters of the function.
            arguments: its other arguments.
            described: the arrays of the parameters, or what stands for them.
        """
        first, second = parameters.structure, arguments.structure

        def call(values: Sequence[Any], others: Sequence[Any]) -> Any:
            positional, named = second.rebuild(others)
            return self._function(first.rebuild(values), *positional, **named)

        key = (first.key, second.key)
        try:
            kept = self._kept.get(key, call)
        except TypeError:  # an argument cannot be hashed
            return jaxpr.trace(call, described, arguments.arrays)
        trace = jaxpr.trace(kept, described, arguments.arrays)
        # Tracers among the constants of a program belong to a `jax.jit` around this call, and are of no use after it.
        if not jaxpr.holds_tracers(jaxpr.Body(trace.program, trace.constants)):
            if kept is call and len(self._kept) == _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = kept
        return trace


def _split_module(tree: Any) -> tuple[Any, Any]:
    """Return the state and the structure of an NNX module, in which a shared variable is one leaf."""
    # If NNX has not been imported, the tree is no module of it.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(tree, nnx.Module):
        return tree, None
    graph, state = nnx.split(tree)
    return state, graph


def _name_path(path: Sequence[Any]) -> str:
    """Return the path of a leaf as `layer/kernel`."""
    # A variable of Flax holds its array as `.value`.
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or "params"


def _name_paths(paths: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Return the names of leaves; leaves that would share a name have keys in brackets."""
    names = [_name_path(path) for path in paths]
    # {"a": {"b": x}} and {"a/b": x} have the same path with separators.
    counts = collections.Counter(names)
    return tuple(
        name if counts[name] == 1 else jax.tree_util.keystr(tuple(path))
        for name, path in zip(names, paths, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A call of a function that has been traced, analyzed and planned.

    Attributes:
        trace: its program.
        analysis: the contractions of the program.
        plan: how each of them runs.
        parameters: the parameters; each is one array, or a quantized array that the function itself reads.
        arguments: the other arrays.
        planned: the places of the parameters that stand for floats if they are quantized.
    """

    trace: jaxpr.Trace
    analysis: analysis.Analysis
    plan: ProgramPlan
    parameters: Signature
    arguments: Signature
    planned: Set[int]

    def list_operands(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the operands of the program for these parameters, in the order of `parameters.arrays`."""
        operands = []
        for place, value in enumerate(parameters):
            is_read = place not in self.planned and is_quantized(value)
            operands += jax.tree.leaves(value) if is_read else [value]
        return [*operands, *jax.tree.leaves(self.arguments.arrays)]

    def bind_statics(self) -> StaticValues | None:
        """Return the values that depend on parameters only, if results are rounded to codes."""
        regions = self.plan.regions
        return None if regions.graph is None else bind_parameters(regions, self.parameters.arrays)

    def rebuild_result(self, arrays: Sequence[Any]) -> Any:
        """Return what the function returns; a number in its program becomes an array."""
        shapes, structure = jax.tree.flatten(self.trace.result)
        # A result that is a number in the program comes back as a number of numpy or Python.
        results = [
            x if isinstance(x, jax.Array) else jnp.asarray(x, like.dtype)
            for x, like in zip(arrays, shapes, strict=True)
        ]
        return jax.tree.unflatten(structure, results)


def trace_call(
    function: TracedFunctions, rules: Sequence[Rule], params: Any, args: Any, kwargs: Any, planned: Set[int],
    given: Mapping[int, QuantSpec],
) -> TracedCall:  # fmt: skip
    """Trace, analyze and plan a call.

    Args:
        function: the function.
        rules: the rules of the plan.
        params: its parameters; some may be quantized.
        args: its other positional arguments.
        kwargs: its keyword arguments.
        planned: the places of the parameters that stand for floats if they are quantized. Other quantized arrays are
            passed to the function as they are.
        given: the specs of the parameters that are quantized before anything is planned.

    Raises:
        ContractTypeError: the function cannot be traced.
    """
    parameters, arguments = Signature(params), Signature((args, kwargs))
    # Floats in place of codes give the program that `prepare` saw.
    described = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if place in planned and is_quantized(x) else x
        for place, x in enumerate(parameters.arrays)
    ]
    try:
        trace = function.trace(parameters, arguments, described)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.NonConcreteBooleanIndexError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        error.add_note(
            "jaxquant traces the function, and treats all arrays and Python floats in its arguments as traced values. "
            "Ints, bools, strings and other objects are static: pass what decides on the program as a static value."
        )
        raise
    except Exception as error:
        codes = [
            name for place, (x, name) in enumerate(zip(described, parameters.names, strict=True)) if is_quantized(x)
        ]
        if codes:
            error.add_note(
                f"The function got codes as they are: {', '.join(codes[:4])}{', ...' if len(codes) > 4 else ''}. "
                "jaxquant passes floats in their place if rules quantize all their contractions and can use the codes: "
                "not if no rule matches, if a scale varies along an axis that is summed, if blocks lie along other "
                "axes, or if the activations of the rule do not fit the codes. `dequantize()` makes floats of them."
            )
        raise
    origins = _list_origins(described, parameters.names, len(trace.program.invars))
    known = analysis.analyze_program(trace, origins, parameters.names)
    shapes = [tuple(getattr(x, "shape", ())) for x in described]
    plan = make_plan(known, rules, parameters.names, shapes, given)
    plan = plan_regions(plan, trace, known, _list_places(described))
    # Also calls without a contraction, if codes go through them.
    known = dataclasses.replace(known, entered=known.entered | plan.regions.entered)
    return TracedCall(trace, known, plan, parameters, arguments, planned)


def _list_places(parameters: Sequence[Any]) -> dict[int, int]:
    """Return the place of the operand of the program for each parameter that is one array."""
    places, start = {}, 0
    for place, x in enumerate(parameters):
        if is_quantized(x):
            start += len(jax.tree.leaves(x))
        else:
            places[place], start = start, start + 1
    return places


def _list_origins(parameters: Sequence[Any], names: Sequence[str], count: int) -> list[views.Origin]:
    """Return the origins of the operands of a program."""
    origins: list[views.Origin] = []
    for place, (x, name) in enumerate(zip(parameters, names, strict=True)):
        if is_quantized(x):
            # The function contracts it by itself.
            origins += [views.Data()] * len(jax.tree.leaves(x))
        elif getattr(x, "dtype", None) in dtypes.FLOATS:
            origins.append(views.view_parameter(place, x.shape, x.dtype))
        else:
            origins.append(views.Lost((place,), f"{name} has dtype {getattr(x, 'dtype', type(x).__name__)}"))
    return origins + [views.Data()] * (count - len(origins))


def check_names(function: str, expected: Sequence[str], names: Sequence[str], argument: str = "params") -> None:
    """Raise ContractValueError unless parameters have the paths that `prepare` saw."""
    if tuple(expected) == tuple(names):
        return
    missing, added = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
    differences = [
        f"{text} {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}"
        for text, paths in (("without", missing), ("with", added))
        if paths
    ]
    wanted = "the arrays of the parameters that prepare saw"
    checks.refuse(function, argument, wanted, "; ".join(differences) or "the same paths in another order")


def check_leaves(
    function: str, names: Sequence[str], planned: Mapping[int, LeafPlan], leaves: Mapping[int, LeafPlan]
) -> None:
    """Raise ContractValueError unless parameters are quantized as `prepare` planned it."""
    for place, plan in leaves.items():
        name, first = names[place], planned.get(place)
        expected = f"arguments at which {name} is quantized as at the arguments of prepare"
        got = f"{plan.spec} in place of {None if first is None else first.spec}; prepare these arguments apart"
        checks.require(first is not None and first.spec == plan.spec, function, "args", expected, got)
        is_folded = [leaf is not None and leaf.fold is not None for leaf in (plan, first)]
        expected = (
            f"arguments at which {name} is multiplied by what follows it, or is not, as at the arguments of prepare"
        )
        checks.require(is_folded[0] == is_folded[1], function, "args", expected, "another program (a training mode?)")
