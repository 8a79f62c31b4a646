"""`verify`: an exported model in ONNX Runtime beside the function that it was exported from."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from .._core import checks, dtypes
from .._program.jaxpr import Body
from ..transform import Prepared
from .export import model as exports
from .export import program, values
from .limits import ModelError
from .saturation import SaturatingProduct, list_saturating_products, read_model, write_unsigned_weights
from .session import LEVELS, open_session, probe_saturation

_NAME = "onnx.verify"
Model = ModelProto | str | os.PathLike[str]
_ENTRIES = (exports.POINTS, exports.SCANS)


@dataclasses.dataclass(frozen=True)
class VerificationRow:
    """One tensor of a report.

    Attributes:
        name: the name of the tensor in the model.
        kind: "codes" or "output".
        elements: the number of elements that were compared, in all batches.
        differing: the number of codes that differ, or of floats that differ by more than the tolerance.
        largest: the largest difference, in steps of codes or in the units of the output.
        saturated: the same number for a plain session of ONNX Runtime, where the processor's sums saturate; elsewhere
            None.
    """

    name: str
    kind: str
    elements: int
    differing: int
    largest: float
    saturated: int | None = None


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """The comparison of a model with a function; `str` prints a table.

    Attributes:
        rows: one entry for each quantize point, in the order of the program, then one for each output.
        level: ONNX Runtime's level of optimization.
        tolerance: the largest difference of floats that counts as none.
        saturating: the products of the model that can saturate on x86-64 processors without VNNI.
        processor_saturates: whether ONNX Runtime's sums saturate on this processor.
    """

    rows: tuple[VerificationRow, ...]
    level: str
    tolerance: float
    saturating: tuple[SaturatingProduct, ...] = ()
    processor_saturates: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether all codes are equal, and all floats within the tolerance, in a session that sums exactly.

        Where the processor's sums do not saturate each session does. Elsewhere a session that
        `jaxquant.onnx.make_session` makes does; `is_exact_in_plain_session` tells about all other sessions.
        """
        return not any(row.differing for row in self.rows)

    @property
    def is_exact_in_plain_session(self) -> bool:
        """Whether the same holds, on this processor, for a session of the model as it is."""
        return self.is_exact and not any(row.saturated for row in self.rows)

    def __str__(self) -> str:
        """Return the table, a line that says what differs first, and what can saturate on which processor."""
        is_saturated = any(row.saturated is not None for row in self.rows)
        width = max([len(row.name) for row in self.rows], default=4)
        extra = f"  {'saturated':>9}" if is_saturated else ""
        lines = [f"{'tensor':{width}}  {'kind':6}  {'elements':>9}  {'differing':>9}  {'largest':>9}{extra}"]
        for row in self.rows:
            numbers = f"{row.elements:9}  {row.differing:9}  {row.largest:9.3g}"
            extra = f"  {row.saturated:9}" if is_saturated else ""
            lines.append(f"{row.name:{width}}  {row.kind:6}  {numbers}{extra}")
        first = next((row for row in self.rows if row.differing), None)
        if first is None and not any(row.largest for row in self.rows):
            lines.append(f"All codes are equal, and so are all floats (level {self.level}).")
        elif first is None:
            lines.append(f"All codes are equal, and all floats within {self.tolerance:g} (level {self.level}).")
        elif first.kind == "codes":
            lines.append(f"The first codes that differ: {first.name}. What computes its input gives other floats.")
        else:
            lines.append(f"All codes are equal; the floats of {first.name} differ by up to {first.largest:.3g}.")
        return "\n".join([*lines, *self._describe_saturation()])

    def _describe_saturation(self) -> list[str]:
        """Return what can saturate, whether it does here, and what to do, as lines."""
        if not self.saturating:
            return []
        remedy = (
            'export(..., weights="uint8"), QuantSpec(reduce_range=True) and jaxquant.onnx.make_session give the '
            "function's integers on every processor."
        )
        names = [f"  {product}" for product in self.saturating]
        if not self.processor_saturates:
            text = "In ONNX Runtime on x86-64 without VNNI the sums of these products can saturate; here they do not:"
            return [text, *names, remedy]
        codes, floats = (
            sum(row.saturated or 0 for row in self.rows if row.kind == kind) for kind in ("codes", "output")
        )
        text = (
            "ONNX Runtime's sums of these products saturate on this processor. The columns differing and largest "
            f"compare exact sums; in a plain session {codes} codes and {floats} outputs differ:"
        )
        return [text, *names, remedy]


@overload
def verify(
    model: Model, function: Callable[..., Any], batches: Iterable[Any], /, *, level: str = ..., tolerance: float = ...
) -> VerificationReport: ...


@overload
def verify(
    model: Model, function: Callable[..., Any] | Prepared, params: Any, batches: Iterable[Any], /, *,
    level: str = ..., tolerance: float = ...,
) -> VerificationReport: ...  # fmt: skip


def verify(
    model: Model,
    function: Callable[..., Any] | Prepared,
    /,
    *arguments: Any,
    level: str = "all",
    tolerance: float = 1e-5,
) -> VerificationReport:
    """Run a model in ONNX Runtime beside the function that it was exported from, and compare what they compute.

    The codes of each quantize point are compared one by one: the inputs of the integer contractions, and what they
    return as codes. Floats are compared at the outputs, relative to the largest magnitude if that is above 1.

    On an x86-64 processor without VNNI the sums of ONNX Runtime's products of uint8 by int8 saturate. There the model
    runs twice: as it is, and with weights of uint8, which have exact sums. The report has the differences of both, and
    names the products that can saturate, on every processor.

    Args:
        model: what `export` returned, or the name of a file.
        function: the function that was exported.
        *arguments: params, unless the function has none: the pytree that was passed to `export`. Then batches, a list
            of tuples of the other arguments; a single array counts as a tuple of one. Each may have the shape that the
            model accepts.
        level: ONNX Runtime's level of optimization: "disabled", "basic", "extended" or "all".
        tolerance: the largest difference of floats that counts as none, in units of the largest magnitude if that is
            above 1. The default is for float32; two libraries differ by 1e-3 in float16, and by 1e-2 in bfloat16.

    Returns:
        A `VerificationReport`.

    Raises:
        TypeError: model is neither an `onnx.ModelProto` nor the name of a file.
        ModelError: the file is damaged or unsafe, or ONNX Runtime cannot run it.
        ValueError: the model was not exported from this function, or a batch does not have the shapes of its inputs.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> w = jq.quantize(jnp.array([[0.5, -1.0], [2.0, 0.25]]), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
        >>> def layer(x):
        ...     return jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.55)), w)
        >>> x = jnp.array([[0.495, 0.015], [-2.0, 3.0]])  # two ties, and values that saturate
        >>> report = jq.onnx.verify(jq.onnx.export(layer, [x]), layer, [x])
        >>> report.is_exact, [(row.kind, row.elements, row.differing) for row in report.rows]
        (True, [('codes', 4, 0), ('output', 4, 0)])

    Source: `onnxruntime.InferenceSession`.
    """
    checks.check_option(_NAME, "level", level, tuple(LEVELS))
    call, params, batches = exports.read_call(_NAME, function, arguments, "batches")
    model = read_model(_NAME, model)
    entries = _read_entries(model)
    is_exported = exports.POINTS in entries
    checks.require(
        is_exported, _NAME, "model", "a model that jaxquant.onnx.export returned", "one without its metadata"
    )
    stored, rolled = (entries.get(key, []) for key in _ENTRIES)
    saturating = list_saturating_products(model)
    processor_saturates = bool(saturating) and probe_saturation()
    # Where the runtime's own sums saturate, it runs twice: with exact sums, and as it would run the model.
    exact = write_unsigned_weights(model) if processor_saturates else model
    session, points = _open_checked_session(exact, stored, level)
    plain = _open_checked_session(model, stored, level)[0] if processor_saturates else None
    totals: dict[int, list[Any]] = {}
    outputs = [info.name for info in model.graph.output]
    for batch in batches:
        inputs = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        feeds = _make_feeds(model, inputs)
        codes, results = _compute(call, inputs, params, rolled)
        holds = len(codes) == len(points) and len(results) == len(outputs)
        expected = f"{len(points)} quantize points and {len(outputs)} outputs, as the model has"
        checks.require(holds, _NAME, "function", expected, f"{len(codes)} and {len(results)}")
        names = [name for name in dict.fromkeys([*points, *outputs]) if name]
        fetched = _run_session(session, names, feeds)
        saturated = None if plain is None else _run_session(plain, names, feeds)
        pairs = [*zip(points, codes, strict=True), *zip(outputs, results, strict=True)]
        for i, (name, value) in enumerate(pairs):
            if not name:  # no output depends on these codes
                continue
            kind, value = "codes" if i < len(points) else "output", np.asarray(value)
            # Codes of small floats are compared as codes, too.
            allowed = 0.0 if kind == "codes" else tolerance
            count, differing, largest = _compare(np.asarray(fetched[name]), value, allowed)
            total = totals.setdefault(i, [name, kind, 0, 0, 0.0, None])
            total[2:5] = [total[2] + count, total[3] + differing, max(total[4], largest)]
            if saturated is not None:
                total[5] = (total[5] or 0) + _compare(np.asarray(saturated[name]), value, allowed)[1]
    rows = tuple(VerificationRow(*total) for total in totals.values())
    return VerificationReport(rows, level, tolerance, saturating, processor_saturates)


def _make_feeds(model: ModelProto, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the inputs of the model by name; raise if they do not have the declared shapes."""
    leaves, inputs = jax.tree.leaves(arguments), model.graph.input
    expected = f"{len(inputs)} arrays, as the model has inputs"
    checks.require(len(leaves) == len(inputs), _NAME, "batches", expected, f"{len(leaves)}")
    feeds = {}
    for info, leaf in zip(inputs, leaves, strict=True):
        array = np.asarray(leaf)
        kind = info.type.tensor_type
        lengths = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
        fits = len(lengths) == array.ndim and all(
            isinstance(n, str) or n == length for n, length in zip(lengths, array.shape, strict=True)
        )
        expected = f"{info.name} of shape {lengths}"
        if len(lengths) == array.ndim > 0 and lengths[1:] == list(array.shape[1:]):
            expected += ', as it was exported; export(..., batch="N") makes a model for any number of examples'
        checks.require(fits, _NAME, "batches", expected, f"shape {list(array.shape)}")
        # The dtype that JAX has for a number of Python or an array of numpy is the model's.
        array = array.astype(values.choose_container(jax.dtypes.canonicalize_dtype(array.dtype)))
        feeds[info.name] = array.astype(np.float32) if array.dtype in (dtypes.BFLOAT16, *dtypes.FLOAT8) else array
    return feeds


def _run_session(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Return the tensors of these names."""
    try:
        return dict(zip(names, session.run(names, feeds), strict=True))
    except Exception as error:  # the runtime's own types, which it does not document
        raise ModelError(f"ONNX Runtime cannot run the model: {error}") from error


def _read_entries(model: ModelProto) -> dict[str, Any]:
    """Return the entries that `export` added to a model's metadata."""
    try:
        return {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key in _ENTRIES}
    except ValueError as error:
        raise ModelError(f"the metadata of the model is damaged: {error}") from error


def _open_checked_session(
    model: ModelProto, stored: Sequence[Any], level: str
) -> tuple[onnxruntime.InferenceSession, list[str]]:
    """Return what `_open_session` returns; raise ModelError if the metadata names what the model does not have."""
    try:
        # The metadata is text of a file: it may name loops, bodies and tensors that the model does not have.
        return _open_session(model, stored, level)
    except ModelError:  # ONNX Runtime's own, such as the lack of a kernel
        raise
    except (StopIteration, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"the metadata of the model is damaged: {type(error).__name__}: {error}") from error


def _open_session(
    model: ModelProto, stored: Sequence[Any], level: str
) -> tuple[onnxruntime.InferenceSession, list[str]]:  # fmt: skip
    """Return a session with the quantize points among its outputs, and the names of the points."""
    # The caller's model keeps its outputs.
    copy = ModelProto()
    copy.CopyFrom(model)
    stacks: dict[str, str] = {}
    constants = {tensor.name: tensor.data_type for tensor in copy.graph.initializer}
    types = [_read_narrow_type(copy.graph, point, constants) for point in stored]
    points = [_lift_point(copy.graph, point, stacks) for point in stored]
    present = {info.name for info in model.graph.output}
    for name, kind in dict(zip(points, types, strict=True)).items():
        if name and name not in present:
            copy.graph.output.append(helper.make_empty_tensor_value_info(name))
            if kind is not None:
                copy.graph.output[-1].type.tensor_type.elem_type = kind
    _widen_ends(copy.graph)
    return open_session(copy, level), points


# ONNX Runtime's Python interface takes no bfloat16 or float8 of numpy, so a session has such inputs and outputs as
# float32.
_NARROW = (TensorProto.BFLOAT16, *(values.derive_element_type(dtype) for dtype in dtypes.FLOAT8))


def _read_narrow_type(graph: GraphProto, point: Any, constants: dict[str, int]) -> int | None:
    """Return the type of a quantize point that holds small floats, or None; `constants` has the types of constants."""
    if not isinstance(point, str):
        loop = next(node for node in graph.node if node.name == point[0])
        return _read_narrow_type(exports.read_body(loop), point[1], constants)
    node = next((node for node in graph.node if point and point in node.output), None)
    kind = None
    if node is not None and node.op_type == "Cast":
        kind = helper.get_node_attr_value(node, "to")
    elif node is not None and node.op_type == "QuantizeLinear" and len(node.input) > 2:
        kind = constants.get(node.input[2])
    return kind if kind in _NARROW else None


def _widen_ends(graph: GraphProto) -> None:
    """Make small floats among the inputs and the outputs of a graph float32, with a Cast to and from them."""
    for info in [info for info in graph.input if info.type.tensor_type.elem_type in _NARROW]:
        kind = info.type.tensor_type
        inner = f"{info.name}/narrow"
        exports.rename_tensors(graph.node, {info.name: inner})
        graph.node.insert(0, helper.make_node("Cast", [info.name], [inner], to=kind.elem_type))
        kind.elem_type = TensorProto.FLOAT
    for info in [info for info in graph.output if info.type.tensor_type.elem_type in _NARROW]:
        inner = f"{info.name}/narrow"
        exports.rename_tensors(graph.node, {info.name: inner})
        graph.node.append(helper.make_node("Cast", [inner], [info.name], to=TensorProto.FLOAT))
        info.type.tensor_type.elem_type = TensorProto.FLOAT


def _lift_point(graph: GraphProto, point: Any, stacks: dict[str, str]) -> str:
    """Return the tensor of a quantize point; of one in a loop, an output that the loop gets for it."""
    if isinstance(point, str):
        return point
    loop = next(node for node in graph.node if node.name == point[0])
    body = exports.read_body(loop)
    inner = _lift_point(body, point[1], stacks)
    # The body computes the codes of one step, and only an output of the loop stacks the codes of all steps.
    key = f"{point[0]}/{inner}"
    if key not in stacks:
        stacks[key] = key
        # The output of a body has a type; it is taken from the node that computes it.
        body.output.append(helper.make_empty_tensor_value_info(inner))
        loop.output.append(key)
        _turn_last(loop)
    return stacks[key]


def _turn_last(loop: NodeProto) -> None:
    """Give the last output of a Scan that reads its inputs backwards the same direction."""
    attributes = {attribute.name: attribute for attribute in loop.attribute}
    if "scan_input_directions" not in attributes:
        return
    name = "scan_output_directions"
    if name not in attributes:
        loop.attribute.append(helper.make_attribute(name, [1]))
    else:
        attributes[name].ints.append(1)


def _compute(
    function: Callable[..., Any], inputs: Sequence[Any], params: tuple[Any, ...], rolled: Sequence[bool]
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Return the codes of the function's quantize points, and the leaves of its result."""
    leaves, structure = jax.tree.flatten(list(inputs))
    traced = exports.trace_call(function, params, structure, exports.make_specs(leaves, None))
    trace = traced.trace

    @jax.jit
    def run_both(*arrays: jax.Array) -> Any:
        tap = program.Tap(rolled)
        # Parameters are known here, as in the export: what depends on them alone is folded in both, and the points
        # match.
        constants, known = ([tap.read_known(x) for x in part] for part in (trace.constants, traced.arrays))
        results = tap.evaluate_body(Body(trace.program, constants), [*known, *arrays])
        return tap.codes, results

    return run_both(*leaves)


def _compare(runtime: np.ndarray, value: np.ndarray, tolerance: float) -> tuple[int, int, float]:
    """Return how many elements there are, how many differ, and by how much at most."""
    if runtime.shape != value.shape and runtime.size < value.size:
        runtime = np.broadcast_to(runtime, value.shape)  # the model holds one copy of codes that repeat
    if runtime.shape != value.shape:
        return max(runtime.size, value.size), max(runtime.size, value.size), np.inf
    if not value.size:
        return 0, 0, 0.0
    is_float = jnp.issubdtype(value.dtype, np.floating)
    a, b = runtime.astype(np.float64), value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Equal infinities are equal, though their difference is NaN, and so are two NaN.
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    # What is left is a NaN on one side only.
    distance = np.where(np.isnan(distance), np.inf, distance)
    finite = b[np.isfinite(b)]
    # The rounding of a sum is proportional to its largest terms, also in elements that are small.
    limit = tolerance * max(1.0, float(np.abs(finite).max(initial=0.0))) if is_float else 0.0
    return value.size, int((distance > limit).sum()), float(distance.max())
