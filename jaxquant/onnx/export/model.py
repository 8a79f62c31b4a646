"""`export`."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from onnx import GraphProto, ModelProto, NodeProto, helper

from ..._core import checks
from ..._program import jaxpr
from ...transform import Prepared, QuantizedTree
from ...transform.adapters import AdaptedTree
from ...transform.session import read_quantized
from .. import saturation
from ..load.function import FLOATS, FORMULAS, LoadedFunction
from . import program, values
from .exporter import SCAN_CHOICES, Exporter, locate
from .graph import MICROSOFT, ModelGraph, merge_nodes, rename_tensors
from .values import Value

_NAME = "onnx.export"
OPSETS = (13, 25)
FORMS = ("operators", "qdq")
WEIGHTS = ("int8", "uint8")
# The entry of a model's metadata that lists the tensors of its codes, in the order of the program.
POINTS = "jaxquant.quantize_points"
# The entry that tells for each scan of the program whether it is a loop in the model.
SCANS = "jaxquant.scans"


class Options(TypedDict, total=False):
    """The keyword arguments of `export`."""

    form: str
    opset: int
    scan: str
    batch: str | None
    weights: str | None
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    name: str


@overload
def export(function: Callable[..., Any], inputs: Sequence[Any], /, **options: Unpack[Options]) -> ModelProto: ...


@overload
def export(
    function: Callable[..., Any] | Prepared, params: Any, inputs: Sequence[Any], /, **options: Unpack[Options]
) -> ModelProto: ...


def export(
    function: Callable[..., Any] | Prepared,
    /,
    *arguments: Any,
    form: str = "operators",
    opset: int = 21,
    scan: str = "auto",
    batch: str | None = None,
    weights: str | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    name: str = "jaxquant",
) -> ModelProto:
    """Return a function as an ONNX model that computes the same integers.

    `export(function, inputs)` is for a function of its inputs alone, and `export(function, params, inputs)` for one
    with parameters as its first argument: a prepared function with its `QuantizedTree`, what `load` returned, or any
    other. Parameters, and arrays that the function closes over, are initializers of the model. The function is traced,
    not run, so inputs may be `jax.ShapeDtypeStruct`. Layers must be in their mode for inference: no dropout, no update
    of statistics.

    In the form "operators" a layer that returns codes, as with `recipes.onnx_runtime`, is QLinearConv, QLinearMatMul or
    QGemm, and what is between such layers runs on codes, too: QLinearAdd, MaxPool, Reshape. A layer that returns floats
    is QuantizeLinear, MatMulInteger or ConvInteger, Cast, Mul and Add; ConvInteger is slow in ONNX Runtime. ONNX
    Runtime computes the same codes at each level of optimization. Codes of 2 and 4 bits are held in 8 bits.

    Args:
        function: a function of arrays, or of pytrees of arrays; a `Prepared` stands for its `apply`.
        *arguments: params, unless the function has none: a pytree with arrays that become initializers, named by their
            paths; for a `Prepared` what `convert` returned, or `jq.lora.adapt`, whose adapters are two products in the
            model. Then inputs, a list of the other arguments; only their shapes and dtypes matter.
        form: "operators", or "qdq" for floats between QuantizeLinear and DequantizeLinear, which ONNX Runtime fuses to
            integer kernels if the results are codes; a warning names each contraction that would run in floats.
        opset: the version of ONNX's operators, 13 to 25.
        scan: how `jax.lax.scan` is written: "unroll" for step after step, "loop" for ONNX's Scan, "auto" for a loop if
            there are more than 64 steps. A scan of symbolic length is a loop.
        batch: the name of a symbolic dimension, in place of the first dimension of each array in the inputs; None keeps
            the lengths of the example.
        weights: how int8 weights are stored that are multiplied by uint8 activations: ONNX Runtime saturates the sums
            on x86-64 processors without VNNI. "int8" as they are; "uint8" with the zero point 128, which gives the
            function's integers on every processor and is slower. None for "int8" with a SaturationWarning.
        input_names: the names of the inputs, in the order of their leaves. By default the names of the function's
            parameters, or of a loaded model's inputs.
        output_names: the names of the outputs, in the order of the leaves of the result. By default "output", or
            "output_0" and so on.
        name: the name of the graph.

    Returns:
        An `onnx.ModelProto`.

    Raises:
        ValueError: the function contains operations that ONNX cannot express; the error lists all of them with their
            places in the source; it has no result; or an argument has an unsupported value.
        TypeError: an argument has an unsupported type, inputs are no list, or one of them is not an array.

    Warns:
        SaturationWarning: the model has products that can saturate, and `weights` is None. Weights of 7 bits, as of
            `QuantSpec(reduce_range=True)`, cannot.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> w = jq.quantize(jnp.array([[0.5, -1.0], [2.0, 0.25]]), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
        >>> spec = jq.QuantSpec(jnp.uint8)
        >>> def layer(x):
        ...     return jq.matmul(jq.quantize(x, spec, range=(-1.0, 1.55)), w)
        >>> model = jq.onnx.export(layer, [jnp.zeros((4, 2))], batch="N")
        >>> [node.op_type for node in model.graph.node]
        ['QuantizeLinear', 'MatMulInteger', 'Cast', 'Mul']

    Source: ONNX IR 10 and later; the operators of ONNX Runtime.
    """
    _check_options(form, opset, batch, weights)
    checks.check_option(_NAME, "scan", scan, SCAN_CHOICES)
    call, params, inputs = read_call(_NAME, function, arguments, "inputs")
    leaves, structure = jax.tree.flatten(inputs)
    specs = make_specs(leaves, batch)
    names = _choose_names(function, inputs, params, input_names)
    graph = ModelGraph(opset, form, scan)
    if input_names is None:
        names = [graph.make_name(hint) for hint in names]
    graph.reserve_names(names)
    outputs = _write(graph, trace_call(call, params, structure, specs), specs, names)
    model = _make_model(graph, specs, outputs, output_names, name)
    if weights == "uint8":
        return saturation.write_unsigned_weights(model)
    if weights is None:
        _warn_of_saturation(saturation.list_saturating_products(model))
    return model


def read_call(
    name: str, function: Any, arguments: Sequence[Any], last: str
) -> tuple[Callable[..., Any], tuple[Any, ...], list[Any]]:
    """Return the function to call, its parameters, if it has any, and the last argument.

    Args:
        name: the public function, for errors.
        function: its argument of this name.
        arguments: what follows the function (and the model): parameters or not, and a list.
        last: what the list is called.
    """
    is_prepared = isinstance(function, Prepared)
    first = "model, prepared" if name == "onnx.verify" else "prepared"
    expected = f"{first}, q, {last}, with q = prepared.convert(params, ranges)"
    if not is_prepared:
        first = first.replace("prepared", "function")
        expected = f"{first}, {last} or {first}, params, {last}"
    holds = len(arguments) == 2 or (len(arguments) == 1 and not is_prepared)
    got = f"{len(arguments)} after the {'prepared ' if is_prepared else ''}function"
    checks.require_type(holds, name, "arguments", expected, got)
    if not is_prepared:
        checks.check_function(name, "function", function)
    params, inputs = tuple(arguments[:-1]), arguments[-1]
    if is_prepared:
        (q,) = params
        if isinstance(q, AdaptedTree):
            # `apply` has no dropout, and ONNX no keys.
            params = (q.replace(key=None),)
        read_quantized(name, q.frozen if isinstance(q, AdaptedTree) else q)
    is_known = not any(map(checks.is_traced, jax.tree.leaves(params)))
    expected = "arrays with known values; call it outside of jax.jit and the like"
    checks.require_type(is_known, name, "q" if is_prepared else "params", expected, "traced arrays")
    # An array would be taken for its rows, and a dict for its keys.
    is_list = isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes | Mapping | jax.Array | np.ndarray)
    checks.require_type(is_list, name, last, "a list or a tuple", checks.describe_value(inputs))
    return function.apply if is_prepared else function, params, list(inputs)


class Traced(NamedTuple):
    """A function of parameters and inputs, traced.

    Attributes:
        trace: the program; its first arguments are the arrays of the parameters.
        arrays: these arrays.
        names: their paths in the parameters.
    """

    trace: jaxpr.Trace
    arrays: list[Any]
    names: list[str]


def trace_call(function: Callable[..., Any], params: tuple[Any, ...], structure: Any, specs: Sequence[Any]) -> Traced:
    """Return the program of a function of the leaves of its inputs, and of parameters, if it has any."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    places = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, jax.Array | np.ndarray)]
    arrays = [_canonicalize(paths[i][1]) for i in places]

    def flat(*inputs: Any) -> Any:
        # Leaves that are no arrays, such as Python numbers, stay what they are, and may decide about shapes.
        leaves = [leaf for _, leaf in paths]
        for place, array in zip(places, inputs, strict=False):
            leaves[place] = array
        return function(*jax.tree.unflatten(tree, leaves), *jax.tree.unflatten(structure, inputs[len(places) :]))

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    names = [_name_path(paths[i][0], params[0]) for i in places]
    return Traced(program.trace(flat, [*shapes, *specs]), arrays, names)


def _name_path(path: Sequence[Any], params: object) -> str:
    keys = [_read_key(key) for key in path[1:]]
    # These trees have the parameters below names of their own.
    if isinstance(params, AdaptedTree) and keys[0] == "frozen":
        keys = keys[1:]
    is_below = isinstance(params, QuantizedTree | AdaptedTree) and keys[0] == "params"
    return ".".join(keys[1:] if is_below else keys)


def _canonicalize(array: Any) -> Any:
    """Return an array of numpy with the dtype that JAX has for it: 32 bits in place of 64, unless x64 is enabled."""
    if isinstance(array, jax.Array):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _read_key(key: Any) -> str:
    """Return an entry of the path of a leaf as a word."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def _warn_of_saturation(products: Sequence[saturation.SaturatingProduct]) -> None:
    """Warn that a model gives other integers on some processors."""
    if products:
        more = f" and {len(products) - 1} more" if len(products) > 1 else ""
        text = (
            f"jaxquant.{_NAME}: ONNX Runtime on x86-64 without VNNI gives other integers for {products[0]}{more}, "
            'because its sums of uint8 by int8 products saturate there. weights="uint8" or '
            "QuantSpec(reduce_range=True) gives the same integers on every processor; "
            'weights="int8" keeps these weights without a warning.'
        )
        warnings.warn(text, saturation.SaturationWarning, stacklevel=3)


def _check_options(form: str, opset: int, batch: str | None, weights: str | None) -> None:
    checks.check_option(_NAME, "form", form, FORMS)
    if weights is not None:
        checks.check_option(_NAME, "weights", weights, WEIGHTS)
    checks.check_integer(_NAME, "opset", opset)
    checks.require(OPSETS[0] <= opset <= OPSETS[1], _NAME, "opset", f"a number from {OPSETS[0]} to {OPSETS[1]}", opset)
    is_name = batch is None or (isinstance(batch, str) and batch.isidentifier())
    checks.require_type(is_name, _NAME, "batch", "a name or None", repr(batch))


def make_specs(leaves: Sequence[Any], batch: str | None) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the inputs, with a symbolic first dimension if it has a name."""
    # One symbol for all inputs: their batches are equal, and the program may rely on it.
    symbol = None if batch is None else jax_export.symbolic_shape(batch)[0]
    specs = []
    for leaf in leaves:
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
        is_array = not isinstance(leaf, str | bytes) and not (
            dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)
        )
        checks.require_type(is_array, _NAME, "inputs", "arrays of numbers", checks.describe_value(leaf))
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype if dtype is None else dtype)
        shape = (symbol, *shape[1:]) if symbol is not None and len(shape) else tuple(shape)
        specs.append(jax.ShapeDtypeStruct(shape, dtype))
    return specs


def _choose_names(
    function: Callable[..., Any] | Prepared, inputs: list[Any], params: tuple[Any, ...], names: Sequence[str] | None
) -> list[str]:  # fmt: skip
    """Return a name for each input: the caller's, or the path of the leaf in the function's arguments."""
    # The leaves have the order of the specs, which come from the same flattening.
    paths = jax.tree_util.tree_flatten_with_path(inputs)[0]
    if names is not None:
        return _check_names("input_names", names, len(paths))
    positional = _list_positional(function)[len(params) :]
    found = []
    for path, _ in paths:
        place = path[0].idx
        first = positional[place] if place < len(positional) else f"input_{place}"
        found.append(".".join([first, *(_read_key(key) for key in path[1:])]))
    return found


def _check_names(argument: str, names: Sequence[str], count: int) -> list[str]:
    """Return the names that the caller gives inputs or outputs, as a list."""
    is_list = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
    checks.require_type(is_list, _NAME, argument, "a sequence of strings", repr(names))
    expected = f"{count} distinct names, none of them empty"
    checks.require(len(names) == len(set(names)) == count and all(names), _NAME, argument, expected, names)
    return [str(name) for name in names]


def _list_positional(function: Callable[..., Any] | Prepared) -> list[str]:
    """Return the names of a function's positional parameters; a loaded model's parameters are its inputs."""
    # `apply` has the arguments of the function that was prepared.
    prepared = getattr(function, "__self__", function)
    called: Any = prepared.function if isinstance(prepared, Prepared) else function
    if isinstance(called, LoadedFunction):
        return ["params", *(x.name for x in called.inputs)]
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _write(
    graph: ModelGraph, traced: Traced, specs: Sequence[Any], names: Sequence[str]
) -> list[tuple[str, Any]]:  # fmt: skip
    """Write a traced function into the graph, and return the names and types of its results."""
    inputs = []
    for spec, name in zip(specs, names, strict=True):
        inputs.append(Value(tuple(spec.shape), values.choose_container(spec.dtype), name))
        for axis, n in enumerate(spec.shape):
            if not isinstance(n, int):
                graph.dimensions.setdefault(str(n), (name, axis))
    trace = traced.trace
    # ONNX Runtime does not load a model without outputs.
    checks.require(bool(trace.program.outvars), _NAME, "function", "a result of one array or more", "none")
    graph.inputs = [x.name for x in inputs]
    params = [values.make_known(array, hint) for array, hint in zip(traced.arrays, traced.names, strict=True)]
    exporter = Exporter(graph)
    shown = _list_debug_calls(trace.program)
    if shown:
        text = f"the model is without {', '.join(shown)}, for which ONNX has no operator"
        graph.warnings.append(f"jaxquant.{_NAME}: {text}")
    results = exporter.evaluate_body(jaxpr.Body(trace.program, trace.constants), [*params, *inputs])
    expected = "operations that ONNX can express"
    checks.require(not exporter.unsupported, _NAME, "function", expected, "; ".join(exporter.unsupported))
    # What comes after the program belongs to none of its scopes.
    graph.scope = ""
    types = [(jaxpr.read_shape(v), values.choose_container(jaxpr.read_dtype(v))) for v in trace.program.outvars]
    written = [graph.store_full(x, shape) for x, (shape, _) in zip(results, types, strict=True)]
    return list(zip(written, types, strict=True))


def _list_debug_calls(program: jaxpr.Program) -> list[str]:
    """Return the calls of `jax.debug` in a program and where they are."""
    return [
        f"{jaxpr.read_name(equation)} at {locate([equation])}"
        for equation in jaxpr.list_equations(program)
        if jaxpr.read_name(equation) in jaxpr.DEBUG_CALLS
    ]


def _make_model(
    graph: ModelGraph, specs: Sequence[Any], outputs: Sequence[Any], output_names: Sequence[str] | None, name: str
) -> ModelProto:
    outputs = _rename_requested(graph, outputs)
    if output_names is None:
        output_names = _choose_output_names(graph, [tensor for tensor, _ in outputs])
    output_names = _check_names("output_names", output_names, len(outputs))
    # An output may be an input, an initializer, or twice the same tensor, so each of them has its own node.
    named = {tensor for (tensor, _), output in zip(outputs, output_names, strict=True) if tensor == output}
    is_free = not (_list_tensors(graph) - named).intersection(output_names)
    checks.require(is_free, _NAME, "output_names", "names that no tensor has", output_names)
    _rename_outputs(graph, outputs, output_names)
    merge_nodes(graph, output_names)
    graph.drop_unused(output_names)
    graph.share_transposes()
    points = [_keep_point(graph.nodes, point) for point in graph.points]
    input_infos = [values.describe(x, spec.shape, spec.dtype) for x, spec in zip(graph.inputs, specs, strict=True)]
    output_infos = [values.describe(x, *kind) for x, (_, kind) in zip(output_names, outputs, strict=True)]
    body = helper.make_graph(graph.nodes, name, input_infos, output_infos, graph.make_initializers())
    domains = [helper.make_opsetid("", graph.opset)]
    if graph.has_microsoft:
        domains.append(helper.make_opsetid(MICROSOFT, 1))
    model = helper.make_model(body, opset_imports=domains, producer_name="jaxquant")
    # onnx writes its newest IR version by default, which the installed runtime may not read.
    model.ir_version = max(helper.find_min_ir_version_for(domains, True), 8)
    stored = {POINTS: json.dumps(points), SCANS: json.dumps(graph.rolled), "jaxquant.form": graph.form}
    stored[FLOATS] = graph.floats
    stored[FORMULAS] = json.dumps([name for name in graph.formulas if name in graph.arrays])
    helper.set_model_props(model, stored)
    for text in graph.warnings:
        warnings.warn(text, stacklevel=3)
    return model


def _keep_point(nodes: Sequence[Any], point: Any) -> Any:
    """Return a quantize point, or "" if no output depends on it; one in a loop has the name of the loop before it."""
    if isinstance(point, str):
        return point if any(point in node.output for node in nodes) else ""
    loop = next((node for node in nodes if node.name == point[0]), None)
    inner = "" if loop is None else _keep_point(read_body(loop).node, point[1])
    return [point[0], inner] if inner else ""


def read_body(loop: NodeProto) -> GraphProto:
    """Return the graph of a Scan."""
    return next(attribute.g for attribute in loop.attribute if attribute.name == "body")


def _rename_outputs(graph: ModelGraph, outputs: Sequence[Any], names: Sequence[str]) -> None:
    """Give the results of nodes the names of the outputs, or copy them where that is not possible."""
    produced = {out: node for node in graph.nodes for out in node.output}
    written, points = [tensor for tensor, _ in outputs], [x for x in graph.points if isinstance(x, str)]
    for tensor, name in zip(written, names, strict=True):
        if tensor == name:
            continue
        # No node gives its result a second name, and a quantize point keeps the name that the metadata has.
        if tensor not in produced or written.count(tensor) > 1 or tensor in points:
            graph.nodes.append(helper.make_node("Identity", [tensor], [name], name=graph.make_name(f"{name}.copy")))
            continue
        rename_tensors(graph.nodes, {tensor: name})


def _rename_requested(graph: ModelGraph, outputs: Sequence[Any]) -> list[Any]:
    """Give tensors the names that operators ask for; return the outputs with these names."""
    taken, names = _list_tensors(graph), list(graph.requests.values())
    is_free = len(set(names)) == len(names) and not taken.intersection(names)
    checks.require(is_free, _NAME, "specified_outputs_name", "names that no other tensor has", names)
    rename_tensors(graph.nodes, graph.requests)
    graph.points = [_rename_point(point, graph.requests) for point in graph.points]
    return [(graph.requests.get(tensor, tensor), kind) for tensor, kind in outputs]


def _rename_point(point: Any, names: dict[str, str]) -> Any:
    return names.get(point, point) if isinstance(point, str) else [point[0], _rename_point(point[1], names)]


def _choose_output_names(graph: ModelGraph, tensors: Sequence[str]) -> list[str]:
    """Return the names of the outputs: what operators ask for, or numbers."""
    names = ["output"] if len(tensors) == 1 else [f"output_{i}" for i in range(len(tensors))]
    requested, taken = set(graph.requests.values()), _list_tensors(graph)
    for i, name in enumerate(names):
        # An input may have the name of a parameter of the function, such as `output`.
        while names[i] in taken:
            names[i] = graph.make_name(name)
    for i, tensor in enumerate(tensors):
        if tensor in requested and tensor not in names:
            names[i] = tensor
    return names


def _list_tensors(graph: ModelGraph) -> set[str]:
    return {*graph.inputs, *graph.arrays, *(name for node in graph.nodes for name in node.output)}
