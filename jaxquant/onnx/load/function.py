"""A model as a pure function of its parameters and inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax.core import Tracer

from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks, dtypes
from ..limits import Limits, ModelError
from ..model_file import Source, read_checked_model
from ..saturation import FLOAT_RESULTS, PRODUCTS, TYPE_SOURCES, count_pairs
from .fuse import fuse_graph
from .fused_graph import Deviation, warn_of_deviations
from .graph import Graph, Node, convert_model, look_up_operator, read_declaration
from .interpret import Run, list_static_names
from .parameters import Parameters, can_train, list_scalars, split_constants, spread_parameters
from .trainable import Unfolded, make_trainable, quantize_constants, unfold_products
from .values import UnknownValueError, canonicalize_dtype, convert_to_jax

_NAME = "onnx.load"
_CALL = "onnx.LoadedFunction"
# The entry of an exported model's metadata that names the source of its float operators, "jax" or "runtime".
FLOATS = "jaxquant.floats"
# The entry that lists its scalars without a name of the user's, the constants of formulas.
FORMULAS = "jaxquant.formula_constants"
_LINEAR = ("QuantizeLinear", "DequantizeLinear")
_FUSIONS = ("all", "safe", "none")


@dataclasses.dataclass(frozen=True)
class Input:
    """An input or output of a model, as the model declares it.

    Attributes:
        name: its name.
        dtype: its dtype in ONNX.
        shape: its lengths; a name, or None, for one that is not fixed, for which some exporters write -1; None for an
            unknown rank.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int | str | None, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedFunction:
    """A model as a pure function: `fn(params, *inputs)`, with inputs in the model's order or by name.

    It returns an array, or a tuple if the model has several outputs. jax.jit, jax.vmap and jax.grad apply to it.

    Attributes:
        inputs: the declared inputs.
        outputs: the names of the outputs.
        graph: the graph that is run, after fusing.
        limits: what a run may take.
        is_exported: whether the float operators are JAX's, as in a function that was exported, and not ONNX Runtime's,
            where its formulas are known: `load` with `floats`.
        fusions: which patterns became operators on codes: "all", "safe" or "none".
        deviations: the nodes that ONNX Runtime with all optimizations computes otherwise than the model says, by more
            than rounding; empty unless `fusions` is "all".
    """

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    graph: Graph
    limits: Limits
    _parameters: Parameters
    _static: frozenset[str]
    is_exported: bool = False
    fusions: str = "all"
    deviations: tuple[Deviation, ...] = ()
    _examined: set[Any] = dataclasses.field(default_factory=set)
    _source: Unfolded | None = None
    _weights: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def static_inputs(self) -> frozenset[str]:
        """The inputs that decide about shapes or branches, and must be numpy arrays when the function is traced.

        `load` with `constants` makes constants of them.
        """
        return self._static

    @property
    def scales(self) -> frozenset[str]:
        """The parameters that are scales, which must stay positive in training; none without trainable=True."""
        if self._source is None:
            return frozenset()
        return _list_scales(self._source.graph) & set(self._parameters.params)

    def __repr__(self) -> str:
        names = ", ".join(x.name for x in self.inputs)
        return f"LoadedFunction(params, {names}) -> {', '.join(self.outputs)}"

    def __call__(self, params: Mapping[str, Any], /, *inputs: Any, **named: Any) -> Any:
        """Run the model.

        Args:
            params: the parameters that `load` returned, or others of the same structure.
            *inputs: arrays, in the order of the model's inputs. An input that decides about shapes or branches, see
                `static_inputs`, must be a numpy array when the function is traced.
            **named: inputs by name.

        Returns:
            The output, or a tuple of the outputs. int64 is int32 and float64 is float32, unless x64 is enabled.

        Raises:
            ValueError: an input or a parameter is missing, or an input does not have its declared shape.
            TypeError: an input does not have its declared dtype.
            ModelError: the values need more memory than the limits allow, or a node cannot be run on these inputs, or
                an input is traced that must be known.
        """
        values = self._read_inputs(inputs, named)
        params = self._read_params(params)
        try:
            self._examine(params, values)
            outputs = self._run(params, values)
        except UnknownValueError as error:
            raise self._explain(error, values) from error
        return outputs[0] if len(outputs) == 1 else outputs

    def describe(self, params: Mapping[str, Any]) -> str:
        """Return a table of the nodes that run: which compute with codes, and the bytes of their constants.

        Args:
            params: the parameters that `load` returned.
        """
        return describe_function(self, {**self._weights, **params})

    def convert(self, params: Mapping[str, Any]) -> tuple[LoadedFunction, dict[str, Any]]:
        """Return the integer function, and its parameters, of a function that was loaded with trainable=True.

        Args:
            params: the trained parameters.

        Returns:
            What `load` would return for the model with these weights and scales.

        Raises:
            ValueError: the function was not loaded with trainable=True, or a scale is not positive.
        """
        source = self._source
        checks.require(source is not None, "onnx", "convert", "a function loaded with trainable=True", repr(self))
        assert source is not None
        # Training moves scales freely, but the codes of a scale of 0 or below mean nothing.
        for name in sorted(_list_scales(source.graph) & set(params)):
            positive = bool(np.all(np.asarray(params[name]) > 0))
            checks.require(positive, "onnx.convert", name, "a positive scale", np.asarray(params[name]).min())
        graph = source.fold(quantize_constants(source.graph, params))
        fn, converted = _make_function(graph, self.inputs, self.limits, self.is_exported, self.fusions)
        warn_of_deviations(fn.deviations, stacklevel=2)
        return fn, converted

    def _explain(self, error: UnknownValueError, values: Mapping[str, Any]) -> UnknownValueError:
        """Return the error for inputs that are traced and must be known, with how to pass them."""
        names = [name for name in error.names if name in values]
        if not names:
            return UnknownValueError(f"jaxquant.{_CALL}: {error}", error.names)
        entries = ", ".join(f"{name!r}: value" for name in names)
        traced = [x.name for x in self.inputs if x.name not in names]
        arguments = ", ".join(f"{x.name}={x.name}" for x in self.inputs)
        what, got = ("a value that is", "a traced array") if len(names) == 1 else ("values that are", "traced arrays")
        text = checks.format_message(_CALL, ", ".join(names), f"{what} known when the function is traced", got)
        advice = (
            f"Load the model with constants={{{entries}}}, or pass numpy arrays that are no arguments of the jitted "
            f"function: jax.jit(lambda {', '.join(['params', *traced])}: fn(params, {arguments}))"
        )
        return UnknownValueError(f"{text}: {str(error).rstrip('.')}. {advice}", names)

    def _run(
        self, params: Mapping[str, Any], values: Mapping[str, Any], cut: set[str] | None = None
    ) -> tuple[Any, ...]:  # fmt: skip
        # A model is typed and broadcasts by numpy's rules, whatever the user has forbidden in code of their own.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            constants = spread_parameters(params, self._parameters)
            run = Run(self.limits, self.is_exported, set() if cut is None else cut)
            outputs = run.run_graph(self.graph, {**constants, **values})
            return tuple(convert_to_jax(value) for value in outputs)

    def _examine(self, params: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Trace the function once for each set of shapes before it runs, so that nothing large is allocated."""
        known = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
        traced = {name: x for name, x in values.items() if name not in known}
        # Known inputs are part of the key: they decide about shapes.
        leaves = jax.tree.leaves((params, traced))
        if any(isinstance(x, Tracer) for x in leaves):
            return  # the trace in progress counts
        key = (tuple((x.shape, str(x.dtype)) for x in leaves), tuple((n, x.tobytes()) for n, x in known.items()))
        if key not in self._examined:
            jax.eval_shape(lambda p, v: self._run(p, {**known, **v}), params, traced)
            self._examined.add(key)

    def _read_inputs(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        names = [x.name for x in self.inputs]
        checks.require(len(inputs) <= len(names), _CALL, "inputs", f"at most {len(names)}", f"{len(inputs)}")
        given = {**dict(zip(names, inputs, strict=False)), **named}
        holds = set(given) == set(names) and len(given) == len(inputs) + len(named)
        checks.require(holds, _CALL, "inputs", f"each of {names} once", f"{[*names[: len(inputs)], *named]}")
        return {x.name: self._read_input(x, given[x.name]) for x in self.inputs}

    def _read_params(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters, numbers of Python among them as arrays."""
        checks.require_type(isinstance(params, Mapping), _CALL, "params", "a mapping", checks.describe_value(params))
        names, given = set(self._parameters.params) - set(self._weights), set(params)
        # A constant may have an entry, too: it was a parameter when the entries were saved.
        unknown = given - names - set(self._parameters.constants) - self._parameters.list_parts()
        parts = [("missing", names - given), ("unknown", unknown)]
        got = ", ".join(f"{what} {sorted(map(str, part))}" for what, part in parts if part)
        checks.require(not got, _CALL, "params", "the entries that load returned", got)
        given = {n: jnp.asarray(x) if isinstance(x, bool | int | float) else x for n, x in params.items()}
        return {**self._weights, **given}

    def _read_input(self, declared: Input, value: Any) -> Any:
        if isinstance(value, list):  # a sequence of ONNX
            return [convert_to_jax(np.asarray(part)) for part in value]
        array = _check_input(_CALL, declared.name, declared, value)
        is_known = declared.name in self._static and not isinstance(array, Tracer)
        return np.asarray(array) if is_known else convert_to_jax(array)


def _check_input(function: str, argument: str, declared: Input, value: Any) -> Any:
    """Return an input as an array; raise unless it has the declared dtype and shape."""
    checks.check_readable(function, argument, None if isinstance(value, np.ndarray) else value)
    dtype = None if hasattr(value, "dtype") else declared.dtype
    array = value if isinstance(value, jax.Array) else np.asarray(value, dtype)
    expected = (declared.dtype, canonicalize_dtype(declared.dtype))
    checks.require_type(array.dtype in expected, function, argument, f"dtype {declared.dtype}", array.dtype)
    if declared.shape is not None:
        fits = len(declared.shape) == array.ndim and all(
            not isinstance(n, int) or n == m for n, m in zip(declared.shape, array.shape, strict=True)
        )
        checks.require(fits, function, argument, f"shape {declared.shape}", f"shape {array.shape}")
    return array


def load(
    model: Source,
    *,
    limits: Limits | None = None,
    trainable: bool = False,
    fusions: str = "all",
    constants: Mapping[str, Any] | bool | None = None,
    parameters: Collection[str] = (),
    floats: str | None = None,
) -> tuple[LoadedFunction, dict[str, Any]]:
    """Return an ONNX model as a pure function and its parameters: y = fn(params, *inputs).

    The file may be damaged or hostile: it is checked first, as by `check`, and the shapes of all values are examined
    against the limits before anything is computed. Operators on codes are jaxquant's, which have ONNX Runtime's
    integers. Where ONNX Runtime fuses DequantizeLinear, an operator and QuantizeLinear into one operator on codes, so
    does this function, with the same formulas; then the result equals ONNX Runtime's with all optimizations.
    Where such a fusion changes the value of the model by more than rounding, a FusionWarning names the node, and
    `fn.deviations` lists them.

    Args:
        model: the path of a file, its bytes, or an onnx.ModelProto, which may not have external data.
        limits: Static. What the model may take; None means Limits().
        trainable: Static. For a model in QDQ form, or one that `export` wrote with static ranges and float results:
            whether the function is fake-quantized instead, in floats, with straight-through gradients. The parameters
            are then floats: the dequantized weights and biases, and the scales of weights and of activations, which
            `fn.scales` names. `fn.convert(params)` returns the integer function of trained ones.
        fusions: Static. "all": what ONNX Runtime fuses with all optimizations. "safe": of that what changes the
            value of the model by no more than rounding. "none": the graph as it is written, in floats between
            DequantizeLinear and QuantizeLinear, as ONNX Runtime runs it with optimizations disabled.
        constants: Static. Values of inputs by name, such as {"sr": 16000}. They are no inputs of the function any more.
            What they decide, such as a branch or a shape, is then known when the function is traced. True: the weights
            are constants, and no parameters are returned but those that `parameters` names. A compiled program then
            holds the weights in the form that it computes with, so that a call does not rearrange them; the program
            takes longer to compile if they are large, and each set of input shapes keeps a copy of them.
        parameters: Static. The names of float constants that are parameters, too: scalars, such as the bounds of a
            Clip, which stay inside the function otherwise.
        floats: Static. "runtime": operators on floats round as ONNX Runtime's, where its formulas are known, so that
            codes that are computed from floats are ONNX Runtime's, too. "jax": they are JAX's, as in the function that
            `export` wrote. None: "jax" for a model that `export` wrote, "runtime" for any other.

    Returns:
        fn: a LoadedFunction, to which jax.jit, jax.vmap and jax.grad apply.
        params: the parameters by name: floats as arrays; constant codes with their scale and zero point as
            QuantizedArray, other codes as arrays. Scalars that are no weights, shapes, and the scales of activations
            stay inside the function.

    Raises:
        ModelError: the model is damaged, unsafe, needs more than its limits, or has operators that are not supported,
            which the error lists.
        TypeError: `model` is none of these types, or a constant does not have the dtype of the input.
        ValueError: `fusions` or `floats` is none of these words, a constant does not have the shape of the input, or a
            name is none of an input or of a constant.

    Warns:
        FusionWarning: with `fusions="all"`, a fusion of ONNX Runtime changes the value by more than rounding.

    Example:
        >>> import numpy as np, onnx
        >>> from onnx import helper, numpy_helper
        >>> import jaxquant as jq
        >>> weight = numpy_helper.from_array(np.array([[2.0], [0.5]], np.float32), "w")
        >>> x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
        >>> graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
        >>> model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        >>> fn, params = jq.onnx.load(model)
        >>> fn(params, np.array([[1.0, 4.0]], np.float32))
        Array([[4.]], dtype=float32)

    Source: ONNX opsets 7 to 28; com.microsoft operators of ONNX Runtime 1.31 and 1.32.
    """
    limits = Limits() if limits is None else limits
    checks.check_flag(_NAME, "trainable", trainable)
    checks.require_type(isinstance(limits, Limits), _NAME, "limits", "Limits or None", checks.describe_value(limits))
    checks.check_option(_NAME, "fusions", fusions, _FUSIONS)
    if floats is not None:
        checks.check_option(_NAME, "floats", floats, ("runtime", "jax"))
    is_frozen = constants is True
    checks.require(not (is_frozen and trainable), _NAME, "constants", "a mapping if trainable=True", "True")
    constants = {} if constants is None or is_frozen else constants
    expected = "a mapping of names to values, or True"
    checks.require_type(isinstance(constants, Mapping), _NAME, "constants", expected, checks.describe_value(constants))
    assert isinstance(constants, Mapping)
    names = not isinstance(parameters, str | bytes) and isinstance(parameters, Collection)
    checks.require_type(names, _NAME, "parameters", "a collection of names", checks.describe_value(parameters))
    proto = read_checked_model(model, limits)
    try:
        written = next((entry.value for entry in proto.metadata_props if entry.key == FLOATS), "runtime")
        is_exported = (floats or written) == "jax"
        names = frozenset(parameters)
        fn, params = _build_function(proto, limits, bool(trainable), fusions, constants, names, is_exported)
    except (ModelError, checks.ContractTypeError, checks.ContractValueError):
        raise
    except Exception as error:  # whatever a damaged model makes JAX or numpy raise
        raise ModelError(f"the model cannot be loaded: {type(error).__name__}: {error}") from error
    warn_of_deviations(fn.deviations, stacklevel=2)
    if not is_frozen:
        return fn, params
    kept = {name: value for name, value in params.items() if name in names}
    return dataclasses.replace(fn, _weights={n: x for n, x in params.items() if n not in kept}), kept


def _build_function(
    proto: onnx.ModelProto,
    limits: Limits,
    trainable: bool,
    fusions: str,
    constants: Mapping[str, Any],
    parameters: frozenset[str],
    is_exported: bool,
) -> tuple[LoadedFunction, dict[str, Any]]:
    graph = convert_model(proto, limits)
    _check_operators(graph)
    inputs = tuple(_read_input(value) for value in proto.graph.input if value.name in set(graph.inputs))
    graph = _bind_constants(graph, inputs, constants)
    inputs = tuple(x for x in inputs if x.name not in constants)
    _check_parameters(graph, parameters)
    # A function that trains must not move a 0.5 of its formulas.
    formulas = _read_formula_constants(proto)
    literals = graph.literals | (list_scalars(graph) if formulas is None else formulas)
    graph = dataclasses.replace(graph, literals=literals - parameters, requested=parameters)
    if trainable:
        source = unfold_products(graph)
        return _make_function(make_trainable(source.graph), inputs, limits, is_exported, fusions, source)
    return _make_function(graph, inputs, limits, is_exported, fusions)


def _make_function(
    graph: Graph, inputs: tuple[Input, ...], limits: Limits, is_exported: bool, fusions: str,
    source: Unfolded | None = None,
) -> tuple[LoadedFunction, dict[str, Any]]:  # fmt: skip
    """Return the function of a graph and its parameters; `source` is the graph that a trainable one was made of."""
    parameters = split_constants(graph)
    missing = sorted(graph.requested - set(parameters.params) - parameters.list_parts())
    expected = "names of constants that no operator needs to know when it is traced"
    checks.require(not missing, _NAME, "parameters", expected, missing)
    names = set(graph.constants)
    graph, deviations = fuse_graph(graph, is_exported, fusions)
    # Fusing makes constants of its own: zero points that the model leaves out, and zero points of uint8.
    made = {name: array for name, array in graph.constants.items() if name not in names}
    parameters = parameters._replace(constants={**parameters.constants, **made})
    static = frozenset(list_static_names(graph) & set(graph.inputs))
    # The constants of the graph would stay in memory beside the caller's `params`.
    bare = dataclasses.replace(graph, constants={})
    fn = LoadedFunction(
        inputs, graph.outputs, bare, limits, parameters, static, is_exported, fusions, deviations, _source=source
    )
    cut = _trace_declared(fn, parameters.params)
    if cut is not None:
        # The rules do not know the lengths, with which windows may turn out to lie within the padding.
        kept = tuple(d for d in deviations if d.op != "AveragePool" or any(label.startswith(d.node) for label in cut))
        fn = dataclasses.replace(fn, deviations=kept)
    return fn, dict(parameters.params)


def _list_scales(graph: Graph) -> frozenset[str]:
    return frozenset(name for node in graph.nodes if node.op in _LINEAR for name in node.inputs[1:2])


def _bind_constants(graph: Graph, inputs: Sequence[Input], values: Mapping[str, Any]) -> Graph:
    """Return a graph in which inputs are constants."""
    declared = {x.name: x for x in inputs}
    arrays: dict[str, np.ndarray] = {}
    for name, value in values.items():
        checks.require(name in declared, _NAME, "constants", f"names of inputs, {sorted(declared)}", repr(name))
        is_known = value is not None and not isinstance(value, Tracer)
        got = "None" if value is None else "a traced array"
        checks.require_type(is_known, _NAME, f"constants[{name!r}]", "a known value", got)
        array = np.asarray(_check_input(_NAME, f"constants[{name!r}]", declared[name], value))
        arrays[name] = array.astype(declared[name].dtype, copy=False)
    kept = tuple(name for name in graph.inputs if name not in arrays)
    return dataclasses.replace(graph, inputs=kept, constants={**graph.constants, **arrays}, bound=frozenset(arrays))


def _check_parameters(graph: Graph, names: Collection[str]) -> None:
    """Raise unless all names name constants that can be parameters."""
    for name in sorted(names):
        array = graph.constants.get(name)
        checks.require(array is not None, _NAME, "parameters", "names of constants of the graph", repr(name))
        assert array is not None
        holds = can_train(array)
        checks.require_type(holds, _NAME, "parameters", "names of floats or codes", f"{name!r}, of {array.dtype}")


def _read_formula_constants(proto: onnx.ModelProto) -> frozenset[str] | None:
    """Return the names that `export` lists as constants of formulas; None if it has not written the model."""
    if all(entry.key != FORMULAS for entry in proto.metadata_props):
        return None
    names: list[Any] = []
    for entry in proto.metadata_props:
        if entry.key == FORMULAS:
            try:
                names = json.loads(entry.value)
            except ValueError as error:
                raise ModelError(f"the metadata of the model is damaged: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("the metadata of the model is damaged: expected a list of names")
    initializers = {tensor.name for tensor in proto.graph.initializer}
    return frozenset(name for name in names if name in initializers)


def _check_operators(graph: Graph) -> None:
    """Raise ModelError that lists all operators that are not supported."""
    unknown: set[str] = set()
    pending = [graph]
    while pending:
        for node in pending.pop().nodes:
            subgraphs = [value for value in node.attributes.values() if isinstance(value, Graph)]
            pending += [*subgraphs, *([node.body] if node.body is not None else [])]
            if node.body is None and look_up_operator(node) is None:
                unknown.add(f"{node.domain}.{node.op}" if node.domain else node.op)
    if unknown:
        raise ModelError(f"operators that are not supported: {', '.join(sorted(unknown))}")


def _read_input(value: onnx.ValueInfoProto) -> Input:
    declared = read_declaration(value)
    return Input(value.name, declared.dtype, declared.shape)


def _trace_declared(fn: LoadedFunction, params: Any) -> set[str] | None:
    """Examine the shapes of all values now, if the model fixes the shapes of its inputs.

    Return the nodes that have windows beyond the padding, or None if the model leaves lengths open.
    """
    shapes = {x.name: x.shape for x in fn.inputs}
    required = list_static_names(fn.graph, with_kept=False) & set(shapes)
    if required or any(s is None or not all(isinstance(n, int) for n in s) for s in shapes.values()):
        return None
    inputs: dict[str, Any] = {}
    for x in fn.inputs:
        inputs[x.name] = jax.ShapeDtypeStruct(x.shape, canonicalize_dtype(x.dtype))  # type: ignore[arg-type]
    # An input may be the trip count of a Loop.
    with contextlib.suppress(UnknownValueError):
        cut: set[str] = set()
        jax.eval_shape(lambda p, v: fn._run(p, v, cut), params, inputs)
        return cut
    return None


# A table of the nodes: what computes with codes, what with floats, and the bytes of constants.


# Operators that read or write codes, under names that do not begin with QLinear.
_QUANTIZED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QGemm"),
    *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits", "QuantizeBias"),
    "QAttention",
)
# Operators that give elements of their first input.
_ARRANGEMENTS = (
    *("Concat", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice", "Split", "Squeeze"),
    *("Tile", "Transpose", "Unsqueeze"),
)
_CODES = (*dtypes.INTEGERS, *dtypes.SMALL_FLOATS)
_UINT8 = np.dtype(np.uint8)
# The input that has the dtype of the result.
_POINTS = {**TYPE_SOURCES, "QuantizeLinear": 2}


def describe_function(fn: LoadedFunction, params: Any) -> str:
    """Return a table of the nodes that run, after fusing.

    Args:
        fn: the function that `load` returned.
        params: its parameters.

    Returns:
        A line for each node: its name, its operator, "integer" if it computes with codes or moves them, "quantized" if
        it converts between codes and floats or reads codes as floats, "float" otherwise, and the bytes of the constants
        it reads.
        The last lines are totals, and the products that can saturate in ONNX Runtime on x86-64 without VNNI.
    """
    sizes = {name: _count_bytes(value) for name, value in params.items()}
    sizes.update({name: _count_bytes(array) for name, array in fn._parameters.constants.items()})
    codes = {name for name, value in params.items() if any(x.dtype in _CODES for x in jax.tree.leaves(value))}
    results: set[str] = set()  # tensors of codes that nodes compute
    rows = [("node", "operator", "kind", "bytes")]
    totals: dict[str, list[int]] = {}
    for label, node in _list_nodes(fn.graph, ""):
        kind = "integer" if _is_arrangement(node, results) else _classify_node(node, codes)
        if kind == "integer" or node.op in ("QuantizeLinear", "DynamicQuantizeLinear"):
            results.update(node.outputs if _is_arrangement(node, results) else _list_codes(node))
        # Removed, so that a constant counts for the first node that reads it only.
        size = sum(sizes.pop(name, 0) for name in dict.fromkeys(node.inputs))
        operator = f"{node.domain}.{node.op}" if node.domain else node.op
        rows.append((label, operator, kind, f"{size:,}"))
        total = totals.setdefault(kind, [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + size
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3].rjust(widths[3])]) for row in rows]
    lines += [f"{kind}: {count} nodes, {size:,} bytes of constants" for kind, (count, size) in sorted(totals.items())]
    saturating = list(_list_saturating(fn, params))
    if saturating:
        names = ", ".join(saturating)
        lines.append(f"can saturate in ONNX Runtime on x86-64 without VNNI: {len(saturating)} products, {names}")
    return "\n".join(lines)


def _list_nodes(graph: Graph, prefix: str) -> list[tuple[str, Node]]:
    """Return all nodes with a label that says in which subgraph they are."""
    result = []
    for node in graph.nodes:
        label = f"{prefix}{node.outputs[0] or node.op}"
        result.append((label, node))
        for value in (*node.attributes.values(), node.body):
            if isinstance(value, Graph):
                result += _list_nodes(value, f"{label}/")
    return result


def _list_saturating(fn: LoadedFunction, params: Any) -> Iterator[str]:
    """Yield the labels of products of uint8 codes by int8 weights in which a pair of products can leave int16."""
    values: dict[str, Any] = {**fn._parameters.constants}
    for name, value in params.items():
        values[name] = value.codes if isinstance(value, QuantizedArray) else value
    kinds = {x.name: np.dtype(x.dtype) for x in fn.inputs}
    for label, node in _list_nodes(fn.graph, ""):
        _note_codes(node, values, kinds)
        for operands in PRODUCTS.get((node.domain, node.op), ()):
            names = [*node.inputs, *[""] * 12]  # trailing inputs may be left out
            weights = values.get(names[operands.weights])
            kind = _UINT8 if operands.activations is None else kinds.get(names[operands.activations])
            if kind != _UINT8 or weights is None or weights.dtype != np.int8 or operands.weight_zero_point is None:
                continue
            if node.op != "ConvInteger" and count_pairs(node.op, np.asarray(weights), node.attributes)[0]:
                yield label
                break


def _note_codes(node: Node, values: Mapping[str, Any], kinds: dict[str, np.dtype]) -> None:
    """Store the dtype of the codes that a node returns, if it returns codes."""
    if node.op == "DynamicQuantizeLinear":
        kinds[node.outputs[0]] = _UINT8
    elif node.op in FLOAT_RESULTS:
        return
    elif node.op in _POINTS:
        place = _POINTS[node.op]
        point = values.get(node.inputs[place]) if len(node.inputs) > place else None
        if point is not None:
            kinds[node.outputs[0]] = np.dtype(point.dtype)
        elif node.op == "QuantizeLinear":
            kinds[node.outputs[0]] = _UINT8
    elif node.inputs and node.inputs[0] in kinds:  # an operator that moves codes, or one on codes of one dtype
        kinds.update(dict.fromkeys(node.outputs, kinds[node.inputs[0]]))


def _is_arrangement(node: Node, results: set[str]) -> bool:
    """Return whether a node moves codes: it is no computation with floats, though its operator has no Q."""
    return node.op in _ARRANGEMENTS and bool(node.inputs) and node.inputs[0] in results


def _list_codes(node: Node) -> tuple[str, ...]:
    """Return the results of a node that are codes; QGemm without a zero point of the result returns floats."""
    if node.op == "QGemm":
        return tuple(node.outputs[:1]) if len(node.inputs) > 8 and node.inputs[8] else ()
    return tuple(node.outputs[:1]) if node.op.startswith("QLinear") or node.op.endswith("QuantizeLinear") else ()


def _classify_node(node: Node, codes: set[str]) -> str:
    if node.op in (
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QuantizeBias",
        "MatMulNBits",
        "MatMulBnb4",
    ):
        return "quantized"
    if node.op in _QUANTIZED or node.op.startswith("QLinear"):
        return "integer"
    return "quantized" if codes.intersection(node.inputs) else "float"


def _count_bytes(value: Any) -> int:
    """Return the bytes of an array or QuantizedArray, with codes of 4 and 2 bits packed."""
    total = 0
    for x in jax.tree.leaves(value):
        width = dtypes.count_packed_bits(np.dtype(x.dtype)) if x.dtype in _CODES else 8 * np.dtype(x.dtype).itemsize
        total += -(-x.size * width // 8)
    return total
