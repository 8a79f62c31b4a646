"""The ONNX graph under construction: nodes, initializers and names, in the form that the opset asks for."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from ..._core import dtypes
from . import values
from .values import Shape, Spec, Value

MICROSOFT = "com.microsoft"
_SHARED = 2**10  # constants of up to this many bytes are shared by their content


class ModelGraph:
    """The nodes and initializers of a model.

    Attributes:
        opset: the version of ONNX's operators.
        form: "operators" or "qdq".
        scan: "auto", "unroll" or "loop".
        scope: a prefix for the names of nodes.
        points: the tensors of the codes that the program computes, in its order; for one in the body of a loop, a pair
            of the loop's node and the tensor.
        rolled: for each scan of the program whether it is a loop.
        floats: "jax", or "runtime" if the function has float operators with the bits of ONNX Runtime's.
        formulas: the float constants of one element without a name of the user's.
        requests: names that the function asks for, by the tensors that get them.
        weights: tensors of dequantized constants of 4 bits, with their codes.
        codes: pairs of an array and its scale, with the codes that DynamicQuantizeLinear computed of them.
    """

    def __init__(self, opset: int, form: str, scan: str) -> None:
        self.opset, self.form, self.scan, self.scope = opset, form, scan, ""
        self.nodes: list[NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.points: list[Any] = []
        self.rolled: list[bool] = []
        self.has_microsoft = False
        self.floats = "jax"
        self.formulas: list[str] = []
        self.codes: dict[tuple[str, str], Value] = {}
        self.requests: dict[str, str] = {}
        self.weights: dict[str, Any] = {}
        self.dimensions: dict[str, tuple[str, int]] = {}
        self.warnings: list[str] = []
        self.inputs: list[Any] = []
        self._narrow: dict[str, tuple[str, np.dtype]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._scalars: dict[str, str] = {}
        self._names: dict[str, int] = {}
        self._shared: dict[Any, str] = {}
        self._sources: dict[str, np.ndarray] = {}
        self._held: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._outer: list[list[NodeProto]] = []

    # Names, constants and nodes.

    def make_name(self, hint: str) -> str:
        """Return a name that nothing else has."""
        hint = re.sub(r"[^A-Za-z0-9_./:-]+", "_", hint).strip("_./") or "tensor"
        count = self._names.get(hint, 0)
        self._names[hint] = count + 1
        return hint if count == 0 else self.make_name(f"{hint}_{count}")

    def reserve_names(self, names: Sequence[str]) -> None:
        """Keep names that the caller has chosen, with whatever characters, for its inputs."""
        self._names.update(dict.fromkeys(names, 1))

    def add(self, operator: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Append a node, and return the name of its output, or a list of names if there are several."""
        prefix = f"{self.scope}/" if self.scope else ""
        name = self.make_name(prefix + operator)
        names = [self.make_name(f"{name}.{i}" if outputs > 1 else f"{name}.out") for i in range(outputs)]
        self.has_microsoft = self.has_microsoft or domain == MICROSOFT
        present = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=name, domain=domain, **present))
        return names if outputs > 1 else names[0]

    def hold(self, array: Any) -> np.ndarray:
        """Return a known array in its container: codes of 2 and 4 bits as integers of 8, once for all of its uses."""
        array = np.asarray(array)
        container = values.choose_container(array.dtype)
        if array.dtype == container:
            return array
        key = (*_locate_memory(array), array.dtype)
        if key not in self._held:
            self._held[key] = array, array.astype(container)  # the array, so that its memory is not used again
        return self._held[key][1]

    def add_constant(self, array: Any, hint: str | None = None) -> str:
        """Return the name of an initializer. Views of the same memory share one, as the uses of a tied table do."""
        array = np.asarray(array)
        # Parameters that are equal now need not be so after training, so large ones are shared if they are the same
        # memory, and each small one with a name has a tensor of its own.
        content = array.tobytes() if array.nbytes <= _SHARED else _locate_memory(array)
        key = (array.dtype, array.shape, content, hint)
        if key in self._shared:
            return self._shared[key]
        name = self.make_name(hint or "constant")
        self.arrays[name] = array
        self._sources[name] = array  # also if it is dropped, so that its memory is not used again
        if hint is None and array.size == 1 and array.dtype.kind not in "iub":
            self.formulas.append(name)
        self._shared[key] = name
        return name

    def store(self, value: Value) -> str:
        """Return the name of a value's tensor, which may have dimensions of 1 in place of longer ones."""
        if value.name is not None:
            return value.name
        return self.add_constant(values.shrink_array(self.hold(value.array)), value.hint)

    def store_full(self, value: Value, shape: Shape) -> str:
        """Return the name of a tensor of a value that has all of its elements, in the given shape."""
        if value.is_known:
            array = np.asarray(value.array)
            if values.is_static(shape):
                return self.add_constant(np.broadcast_to(self.hold(array), shape), value.hint)
            return self._expand(value, shape)
        if tuple(value.shape) == tuple(shape):
            assert value.name is not None
            return value.name
        return self._expand(value, shape)

    def _expand(self, value: Value, shape: Shape) -> str:
        name, target = self.store(value), self.add_shape(shape)
        if values.choose_container(value.dtype) != dtypes.BFLOAT16:
            return self.add("Expand", [name, target])
        # ONNX Runtime has no kernel of Expand for bfloat16.
        return self.cast(self.add("Expand", [self.cast(name, np.float32), target]), dtypes.BFLOAT16)

    def fill(self, value: Value, shape: Shape) -> Value:
        """Return a value with all of its elements in the graph."""
        container = values.choose_container(value.dtype)
        return Value(tuple(shape), container, self.store_full(value, shape))

    def cast(self, name: str, dtype: DTypeLike) -> str:
        """Return a tensor in another dtype."""
        source = self._narrow.get(name)
        if source is not None and source[1] == dtype:
            return source[0]
        return self.add("Cast", [name], to=values.derive_element_type(dtype))

    def widen(self, name: str, dtype: DTypeLike, wide: DTypeLike) -> str:
        """Return a tensor of a narrow integer dtype in a wider one; `cast` knows the way back."""
        result = self.cast(name, wide)
        self._narrow[result] = (name, np.dtype(dtype))
        return result

    def ints(self, *numbers: int) -> str:
        """Return the name of a vector of int64."""
        return self.add_constant(np.asarray(numbers, np.int64))

    def read_scalar_name(self, name: str) -> str:
        """Return the scalar that a tensor of one element is a reshaped form of, or the tensor itself."""
        return self._scalars.get(name, name)

    # What the graph knows of its tensors.

    def look_up_node(self, name: str | None) -> NodeProto | None:
        """Return the node that computes a tensor, or None."""
        nodes = (node for part in (self.nodes, *self._outer[::-1]) for node in reversed(part))
        return next((node for node in nodes if name in node.output), None)

    def derive_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype of a tensor of codes, if it is known."""
        if name in self.arrays:
            return np.dtype(self.arrays[name].dtype)
        return self._dtypes.get(name)

    def note_dtype(self, name: str | None, dtype: DTypeLike) -> None:
        """Note the dtype of a tensor."""
        if name is not None:
            self._dtypes[name] = np.dtype(dtype)

    def derive_rank(self, name: str) -> int:
        """Return the rank of a constant, or 2."""
        return self.arrays[name].ndim if name in self.arrays else 2

    def count_elements(self, name: str) -> int:
        """Return the number of elements of a constant; any other tensor is a scalar."""
        return self.arrays[name].size if name in self.arrays else 1

    def add_product(self, a: str, b: str) -> str:
        """Return the product of two tensors, as a constant if both are."""
        if a in self.arrays and b in self.arrays:
            return self.add_constant(self.arrays[a] * self.arrays[b])
        return self.add("Mul", [a, b])

    @staticmethod
    def read_attribute(attribute: Any) -> Any:
        """Return the value of an attribute of a node."""
        return helper.get_attribute_value(attribute)

    # Operators in forms that depend on the opset.

    def reduce(self, operator: str, name: str, axes: Sequence[int], keepdims: bool = False) -> str:
        """Return a reduction over axes."""
        if not axes:
            return name
        # The axes became an input in opset 13 for ReduceSum, and in 18 for the others.
        if self.opset >= 18 or operator == "ReduceSum":
            return self.add(operator, [name, self.ints(*axes)], keepdims=int(keepdims))
        return self.add(operator, [name], axes=list(axes), keepdims=int(keepdims))

    def reshape(self, name: str, shape: Shape) -> str:
        """Return a tensor in another shape, which may have symbolic dimensions."""
        is_single = values.is_static(shape) and math.prod(shape) == 1
        first = self.look_up_node(name) if is_single else None
        if first is not None and first.op_type == "Reshape":
            name = first.input[0]  # each load and export would add one more
        unknown = [axis for axis, n in enumerate(shape) if not values.is_static((n,))]
        if len(unknown) <= 1 and (not unknown or 0 not in shape):
            # -1 is one symbolic dimension, without nodes that compute it. Beside a 0 it would not be determined.
            target = self.ints(*(-1 if axis in unknown else int(n) for axis, n in enumerate(shape)))
        else:
            target = self.add_shape(shape)
        has_zero = any(values.is_static((n,)) and n == 0 for n in shape)
        # Without allowzero, a 0 copies the length of the input. Opset 13 has nothing else.
        result = self.add("Reshape", [name, target], allowzero=1 if has_zero and self.opset >= 14 else None)
        if is_single:
            # ONNX Runtime's fusions look for the scalar itself, not for a reshape of it.
            self._scalars[result] = self._scalars.get(name, name)
        # A reshape must not hide from `cast` that these integers are widened codes.
        if name in self._narrow:
            source, dtype = self._narrow[name]
            self._narrow[result] = (self.reshape(source, shape), dtype)
        return result

    def transpose(self, name: str, permutation: Sequence[int]) -> str:
        """Return a tensor with its dimensions in another order."""
        permutation = [int(axis) for axis in permutation]
        if permutation == list(range(len(permutation))):
            return name
        node = self.look_up_node(name)
        if node is not None and node.op_type == "Transpose":
            # Those between two layers with the channels last undo each other.
            (perm,) = node.attribute
            return self.transpose(node.input[0], [perm.ints[axis] for axis in permutation])
        return self.add("Transpose", [name], perm=permutation)

    def slice(self, name: str, starts: Sequence[Any], limits: Sequence[Any], axes: Sequence[int], steps: Any) -> str:
        """Return a part of a tensor; starts and limits may be symbolic."""
        ends = [self.add_shape(tuple(part)) for part in (starts, limits)]
        return self.add("Slice", [name, *ends, self.ints(*axes), self.ints(*steps)])

    # Dimensions.

    def add_shape(self, shape: Shape) -> str:
        """Return the name of a vector of int64 with these numbers, which may be symbolic."""
        if values.is_static(shape):
            return self.ints(*(int(n) for n in shape))
        parts = []
        for is_known, run in itertools.groupby(shape, lambda n: values.is_static((n,))):
            run = list(run)
            parts += [self.ints(*(int(n) for n in run))] if is_known else [self.add_dimension(n) for n in run]
        return parts[0] if len(parts) == 1 else self.add("Concat", parts, axis=0)

    def add_dimension(self, dimension: Any) -> str:
        """Return the name of a vector of one int64: a symbolic dimension, computed from the shapes of the inputs."""
        text = str(dimension)
        # JAX has no public access to the terms of a symbolic dimension. Its text is an expression of Python.
        key = ("dimension", text)
        if key not in self._shared:
            self._shared[key] = self._compute_dimension(ast.parse(text, mode="eval").body)
        return self._shared[key]

    def add_range(self, length: Any) -> str:
        """Return the name of a vector of int64 that counts from 0 to a length, which may be symbolic."""
        if values.is_static((length,)):
            return self.add_constant(np.arange(int(length), dtype=np.int64))
        limit = self.add("Squeeze", [self.add_dimension(length), self.ints(0)])
        zero, one = (self.add_constant(np.int64(n)) for n in (0, 1))
        return self.add("Range", [zero, limit, one])

    def _compute_dimension(self, node: Any) -> str:
        if isinstance(node, ast.Constant):
            return self.ints(int(node.value))  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return self._measure_input(node.id)
        if isinstance(node, ast.UnaryOp):
            return self.add("Neg", [self._compute_dimension(node.operand)])
        if isinstance(node, ast.BinOp):
            operands = [self._compute_dimension(part) for part in (node.left, node.right)]
            if isinstance(node.op, ast.Pow):
                return self.add("Pow", operands)
            return self.add({ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul"}[type(node.op)], operands)
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        a, b = (self._compute_dimension(part) for part in node.args)
        if node.func.id in ("max", "min"):
            return self.add({"max": "Max", "min": "Min"}[node.func.id], [a, b])
        rest = self.add("Mod", [a, b])  # has the sign of b, as in Python
        return rest if node.func.id == "mod" else self.add("Div", [self.add("Sub", [a, rest]), b])

    def _measure_input(self, variable: str) -> str:
        name, axis = self.dimensions[variable]
        if self.opset >= 15:
            # Shape has no range of axes before opset 15.
            return self.add("Shape", [name], start=axis, end=axis + 1)
        return self.add("Gather", [self.add("Shape", [name]), self.ints(axis)])

    # The bodies of loops.

    def open_body(self) -> tuple[list[Any], set[Any]]:
        """Begin the nodes of a body, which see all tensors so far; return what `close_body` needs."""
        points, self.points = self.points, []
        self._outer.append(self.nodes)
        self.nodes = []
        return points, set(self._shared)

    def close_body(
        self, outer: tuple[list[Any], set[Any]], outputs: Sequence[str]
    ) -> tuple[list[NodeProto], list[Any]]:
        """Return the nodes of a body on which its outputs depend, and its quantize points."""
        nodes, points = select_needed(self.nodes, outputs)[0], self.points
        self.points, shared = outer
        self.nodes = self._outer.pop()
        # Dimensions that the body has computed are not seen from outside. Constants are.
        self._shared = {key: name for key, name in self._shared.items() if key in shared or key[0] != "dimension"}
        return nodes, points

    # The result.

    def drop_unused(self, outputs: Sequence[str]) -> None:
        """Remove the nodes and initializers that no output depends on."""
        self.nodes, needed = select_needed(self.nodes, outputs)
        self.arrays = {name: array for name, array in self.arrays.items() if name in needed}

    def share_transposes(self) -> None:
        """Keep one of the initializers that are transposes of each other, and compute the others from it.

        They are the uses of one array, such as a table that is looked up by rows and contracted with its rows. ONNX
        Runtime computes such a Transpose once, when a session is created.
        """
        groups: dict[Any, list[str]] = {}
        for name, array in self.arrays.items():
            axes = sorted(zip(array.shape, array.strides, strict=True))
            # Small ones cost more nodes than bytes, and axes that cannot be told apart have no permutation.
            if array.nbytes > _SHARED and len(set(axes)) == len(axes):
                groups.setdefault((_locate_memory(array)[0], array.dtype, tuple(axes)), []).append(name)
        for names in groups.values():
            # The one in the order of the memory, in which the parameter itself is, gets the name of the parameter,
            # which the first has.
            first, *others = names
            straight = min(names, key=lambda name: [-stride for stride in self.arrays[name].strides])
            if straight != first:
                rename_tensors(self.nodes, {first: straight, straight: first})
                self.arrays[first], self.arrays[straight] = self.arrays[straight], self.arrays[first]
            places = list(zip(self.arrays[first].shape, self.arrays[first].strides, strict=True))
            for name in others:
                array = self.arrays.pop(name)
                permutation = [places.index(axis) for axis in zip(array.shape, array.strides, strict=True)]
                label = self.make_name(f"{name}.Transpose")
                self.nodes.insert(0, helper.make_node("Transpose", [first], [name], name=label, perm=permutation))

    def make_initializers(self) -> list[TensorProto]:
        """Return the initializers of the model."""
        return [make_tensor(name, array) for name, array in self.arrays.items()]


def _locate_memory(array: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return where the elements of an array are in memory: the address of the first, the shape and the strides."""
    return array.__array_interface__["data"][0], array.shape, array.strides


def select_needed(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> tuple[list[NodeProto], set[str]]:
    """Return the nodes on which outputs depend, in their order, and the names of all tensors that these read."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(list_reads(node))
    return kept[::-1], needed


def rename_tensors(nodes: Sequence[Any], names: dict[str, str]) -> None:
    """Rename tensors in nodes, and in the bodies of loops."""
    for node in nodes if names else ():
        for field in (node.input, node.output):
            for i, entry in enumerate(field):
                if entry in names:
                    field[i] = names[entry]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename_tensors(attribute.g.node, names)


def list_reads(node: NodeProto) -> list[str]:
    """Return the tensors that a node reads, also in its body, each as often as it is read."""
    inner = (part for attribute in node.attribute if attribute.HasField("g") for part in attribute.g.node)
    return [*node.input, *(name for part in inner for name in list_reads(part))]


def make_tensor(name: str, array: np.ndarray) -> TensorProto:
    """Return an array as a TensorProto."""
    array = np.ascontiguousarray(array) if array.ndim else array
    if np.dtype(array.dtype) == dtypes.BFLOAT16:
        return helper.make_tensor(name, TensorProto.BFLOAT16, array.shape, array.tobytes(), raw=True)
    return numpy_helper.from_array(array, name)


# Pairs of nodes that ONNX has one node for. Without merging them, a loaded model would be exported with more nodes.

_REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd")


def merge_nodes(graph: ModelGraph, outputs: Sequence[str]) -> None:
    """Merge pairs of nodes where only the second reads the first, also in the bodies of loops.

    A reduction keeps its dimensions if they are inserted again. A slice of one entry without its dimension is a
    Gather, but not in the form "qdq": ONNX Runtime moves a quantization past Slice and Squeeze, and not past Gather.

    Args:
        graph: the graph.
        outputs: the tensors that have to keep their names; so have the quantize points of the graph.
    """
    graph.nodes[:] = _merge(graph, graph.nodes, {*outputs, *_list_names(graph.points)})


def _list_names(points: Sequence[Any]) -> Iterator[str]:
    """Yield the tensors of quantize points, which have the names of their loops before them."""
    for point in points:
        if isinstance(point, str):
            yield point
        else:
            yield from _list_names(point)


def _merge(graph: ModelGraph, nodes: Sequence[NodeProto], kept: Collection[str]) -> list[NodeProto]:
    uses = Counter(name for node in nodes for name in list_reads(node))
    produced = {name: node for node in nodes for name in node.output}
    merged = []
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _merge_body(graph, attribute.g, kept)
        first = produced.get(node.input[0]) if node.input else None
        if first is not None and uses[node.input[0]] == 1 and node.input[0] not in kept:
            node = _merge_reduction(graph, first, node) or _merge_slice(graph, first, node) or node
        merged.append(node)
    # What nothing reads any more is dropped with all other unused nodes.
    return merged


def _merge_body(graph: ModelGraph, body: GraphProto, kept: Collection[str]) -> None:
    outputs = [output.name for output in body.output]
    nodes = select_needed(_merge(graph, body.node, {*kept, *outputs}), outputs)[0]
    del body.node[:]
    body.node.extend(nodes)


def _merge_reduction(graph: ModelGraph, first: NodeProto, second: NodeProto) -> NodeProto | None:
    """Return a reduction that keeps its dimensions, or None."""
    if first.op_type not in _REDUCTIONS or second.op_type != "Unsqueeze":
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in first.attribute}
    axes = attributes["axes"] if "axes" in attributes else _read_constant(graph, first.input[1])
    inserted = _read_constant(graph, second.input[1])
    if attributes["keepdims"] or axes is None or inserted is None or sorted(axes) != sorted(inserted):
        return None
    attributes["keepdims"] = 1
    return helper.make_node(first.op_type, list(first.input), list(second.output), name=second.name, **attributes)


def _merge_slice(graph: ModelGraph, first: NodeProto, second: NodeProto) -> NodeProto | None:
    """Return a Gather of one entry, or None."""
    if first.op_type != "Slice" or second.op_type != "Squeeze" or graph.form == "qdq" or len(second.input) < 2:
        return None
    parts = [_read_constant(graph, name) for name in (*first.input[1:], second.input[1])]
    if len(parts) != 5 or any(part is None or len(part) != 1 for part in parts):
        return None
    (start,), (end,), (axis,), (step,), (gone,) = parts  # type: ignore[misc]
    if axis != gone or step != 1 or start < 0 or end != start + 1:
        return None
    index = graph.add_constant(np.int64(start))
    return helper.make_node("Gather", [first.input[0], index], list(second.output), name=second.name, axis=int(axis))


def _read_constant(graph: ModelGraph, name: str) -> list[int] | None:
    array = graph.arrays.get(name)
    return None if array is None else [int(n) for n in array.reshape(-1)]


# The tables from JAX's primitives, and from jaxquant's marks, to functions that write ONNX nodes.


class WriterCall(NamedTuple):
    """One equation.

    Attributes:
        name: the primitive or the mark.
        inputs: the operands.
        parameters: the parameters of the primitive, or the arguments of the mark by name.
        outputs: the shapes and dtypes of the results.
    """

    name: str
    inputs: Sequence[Value]
    parameters: dict[str, Any]
    outputs: Sequence[Spec]


Writer = Callable[[ModelGraph, WriterCall], Any]  # returns a Value, or a list of them
PRIMITIVES: dict[str, Writer] = {}
MARKS: dict[str, Writer] = {}


def writes(*names: str) -> Callable[[Writer], Writer]:
    """Return a decorator that registers the writer of primitives."""

    def decorate(writer: Writer) -> Writer:
        PRIMITIVES.update(dict.fromkeys(names, writer))
        return writer

    return decorate


def writes_mark(*names: str) -> Callable[[Writer], Writer]:
    """Return a decorator that registers the writer of marks."""

    def decorate(writer: Writer) -> Writer:
        MARKS.update(dict.fromkeys(names, writer))
        return writer

    return decorate
