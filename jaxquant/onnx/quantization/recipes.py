"""`quantize`: a float model of ONNX as one with integers, verified in ONNX Runtime."""

from __future__ import annotations

import fnmatch
import functools
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, version_converter

from ... import calibration, ptq
from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._core.granularity import Blocked
from ...calibration.calibrator import Factory
from ...calibration.loop import check_progress
from ..limits import Limits, ModelError, is_large
from ..model_file import Source, list_opsets, read_checked_model, save
from ..saturation import list_saturating_products
from ..session import make_session, open_session
from . import report, static, weights
from .data import check_batches, list_inputs, make_random
from .graph import GraphEditor, list_subgraphs
from .ranges import (
    Batch,
    MeanObserver,
    MomentsObserver,
    RangeObserver,
    add_outputs,
    make_quiet_options,
    observe,
    open_quiet_session,
)  # fmt: skip
from .report import NodeRow, QuantizationReport

_NAME = "onnx.quantize"
RECIPES = ("static", "dynamic", "weight_only_int8", "weight_only_int4", "gptq")
_CALIBRATORS: dict[str, Factory | None] = {
    "minmax": None, "mse": calibration.mse, "entropy": calibration.entropy,
    "percentile": functools.partial(calibration.percentile, q=99.99),
}  # fmt: skip
CALIBRATORS = tuple(_CALIBRATORS)
FORMS = ("qdq", "operators")
# The least opset with DequantizeLinear of scales along an axis.
_LEAST_OPSET = 13
# Before this version all initializers are constants, and yet inputs.
_LEAST_IR = 4
_RANDOM = 4


def quantize(
    model: Source,
    out: str | os.PathLike[str] | None = None,
    *,
    recipe: str = "static",
    data: Iterable[Any] | None = None,
    random: bool = False,
    keep: Sequence[str] = (),
    calibrator: str = "minmax",
    block: int = 32,
    form: str = "qdq",
    exact_everywhere: bool = False,
    progress: bool | None = None,
) -> QuantizationReport:
    """Quantize a float model of ONNX, compare it with the float model in ONNX Runtime, and write it to a file.

    ONNX Runtime's basic optimizations come first: they compute what is constant, and make a batch normalization part of
    the convolution before it. A model below opset 13 is converted to that opset.

    Args:
        model: the path of a file, its bytes, or an onnx.ModelProto, of less than 2 GB.
        out: the path of a regular file to write to, or None. The file is written when all else has succeeded.
        recipe: how to quantize.

            "static": int8 weights with a scale for each output, uint8 activations with ranges of `data`, int32 biases,
            between QuantizeLinear and DequantizeLinear. Convolutions and products by constant matrices run in integers,
            and what is between two convolutions, if ONNX Runtime has a kernel on codes.

            "dynamic": products by constant matrices run in integers, with ranges that each call finds. Other weights
            are int8, and become floats in each call.

            "weight_only_int8": the weights are int8, and become floats in each call.

            "weight_only_int4": constant matrices have 4 bits, with a scale and a zero point for each block of inputs
            (MatMulNBits); other weights are int8.

            "gptq": the same, with codes that GPTQ finds from the inputs in `data`.
        data: batches: tuples of arrays in the order of the inputs, mappings by name, or single arrays. Of four or more
            the last quarter is left for the comparison. "static" and "gptq" need data; without it nothing is compared.
        random: whether to use four batches of random numbers in place of data. Their ranges are not those of real data.
        keep: patterns, as in a shell, of operators and of names of nodes and their outputs that stay in floats. A layer
            stays in floats together with the addition and the Relu or Clip that its codes would contain. Names are
            those after the basic optimizations, as in the report.
        calibrator: only of "static": "minmax", "mse", "percentile" (99.99) or "entropy", as in
            `jaxquant.calibration`.
        block: only of "weight_only_int4" and "gptq": how many inputs share a scale: 16, 32, 64, 128 or 256.
        form: only of "static": "qdq", layers between QuantizeLinear and DequantizeLinear, of ONNX's own operators, as
            other runtimes read them, too; or "operators", the operators on codes that ONNX Runtime makes of them at its
            optimization level "extended", of its own domain com.microsoft in part. ONNX Runtime computes the same
            codes from both at its levels "extended" and "all"; from operators at every level.
        exact_everywhere: whether weights that are multiplied by codes have 7 bits, -64 to 64, with which ONNX Runtime
            has the same integers on every processor, also on x86-64 without VNNI.
        progress: whether to show a progress bar, which needs the package rich; None shows it on a terminal, if that
            package is installed.

    Returns:
        A `QuantizationReport`, with the model.

    Raises:
        ModelError: the model is damaged, unsafe or too large, or ONNX Runtime cannot run it, before or after.
        ValueError: an argument has an unsupported value; a pattern of `keep` fits nothing; data is missing, does not
            fit the inputs, or is not finite, also in a value inside of the model.
        TypeError: an argument has a wrong type.
        OSError: the file cannot be written.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import jaxquant as jq
        >>> w = jax.random.normal(jax.random.key(0), (32, 32)) / 6
        >>> model = jq.onnx.export(lambda x: jnp.tanh(x @ w), [jnp.zeros((1, 32))], batch="N", input_names=["x"])
        >>> batches = list(np.random.default_rng(0).normal(size=(8, 4, 32)).astype(np.float32))
        >>> report = jq.onnx.quantize(model, data=batches)
        >>> [(row.operator, row.form) for row in report.rows], report.outputs["output"] > 35
        ([('MatMul', 'integer')], True)
        >>> [node.op_type for node in report.model.graph.node]
        ['DequantizeLinear', 'QuantizeLinear', 'DequantizeLinear', 'MatMul', 'Tanh']

    Source: ONNX Runtime 1.32, "Quantize ONNX Models"; Frantar et al., arXiv 2210.17323 (GPTQ).
    """
    checks.check_option(_NAME, "recipe", recipe, RECIPES)
    checks.check_option(_NAME, "calibrator", calibrator, CALIBRATORS)
    checks.check_option(_NAME, "form", form, FORMS)
    for name, value in (("random", random), ("exact_everywhere", exact_everywhere)):
        checks.check_flag(_NAME, name, value)
    is_size = isinstance(block, int | np.integer) and block in (16, 32, 64, 128, 256)
    checks.require(is_size, _NAME, "block", "16, 32, 64, 128 or 256", block)
    for name, value, default, recipes in (
        ("calibrator", calibrator, "minmax", ("static",)),
        ("block", block, 32, ("weight_only_int4", "gptq")),
        ("form", form, "qdq", ("static",)),
    ):
        expected = f"{default!r}, as the recipe {recipe!r} does not use it"
        checks.require(recipe in recipes or value == default, _NAME, name, expected, value)
    check_progress(_NAME, progress)
    are_patterns = not isinstance(keep, str) and isinstance(keep, Iterable)
    keep = tuple(keep) if are_patterns else ()
    are_patterns = are_patterns and all(isinstance(pattern, str) for pattern in keep)
    checks.require_type(are_patterns, _NAME, "keep", "a sequence of patterns, such as ('Gemm',)", repr(keep))
    is_source = isinstance(model, str | bytes | os.PathLike | ModelProto)
    checks.require_type(is_source, _NAME, "model", "a path, bytes or an onnx.ModelProto", type(model).__name__)
    path = check_output("out", out)
    given = read_checked_model(model, Limits())
    size = report.count_bytes(given)
    floats = _simplify(given)
    seen, tested, text = _read_data(floats, recipe, data, random)
    copy = ModelProto()
    copy.CopyFrom(floats)
    graph = GraphEditor(copy)
    kept = _find_kept(graph, keep)
    most = 64 if exact_everywhere else 127
    if recipe == "static":
        rows = _write_static(graph, floats, kept, seen, _CALIBRATORS[calibrator], most, progress)
    else:
        rows = _write_weights(graph, floats, kept, seen, recipe, block, most, progress)
    result = graph.finish()
    _set_opsets(result)
    # The values between the nodes have names in QDQ only.
    rows = _measure_rows(floats, result, rows, tested[:1]) if recipe == "static" else rows
    if form == "operators":
        result = _optimize(result, "extended")
    before, after = open_quiet_session(floats), make_session(result, options=make_quiet_options())
    errors = report.compare_outputs(before, after, tested, [info.name for info in floats.graph.output])
    times = _measure_times([floats, result], tested)
    saturating = list_saturating_products(result)
    if path is not None:
        _write_file(result, path)
    return QuantizationReport(
        result, tuple(rows), errors, size, report.count_bytes(result), times[0], times[1], text, saturating
    )


def check_output(name: str, out: Any) -> pathlib.Path | None:
    """Return the path to write to, an argument with a name; raise before the work begins if nothing can be written."""
    if out is None:
        return None
    is_path = isinstance(out, str | os.PathLike)
    checks.require_type(is_path, _NAME, name, "the path of a file, or None", type(out).__name__)
    path = pathlib.Path(out)
    checks.require(path.parent.is_dir(), _NAME, name, "a path in a folder that exists", str(path))
    # A pipe or a device, such as /dev/null, would be replaced by the file.
    is_file = path.is_file() or not path.exists()
    expected = "the path of a file" if path.is_dir() else "the path of a regular file"
    checks.require(is_file, _NAME, name, expected, f"the folder {path}" if path.is_dir() else str(path))
    return path


def _write_file(model: ModelProto, path: pathlib.Path) -> None:
    """Write a model; a reader sees the old file, or all of the new one."""
    handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        save(model, name)
        os.chmod(name, 0o666 & ~_read_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _simplify(model: ModelProto) -> ModelProto:
    """Return a model after ONNX Runtime's basic optimizations, in opset 13 or later."""
    if is_large(model):
        raise ModelError("expected a model of less than 2 GB")
    if model.ir_version < _LEAST_IR:
        model = _list_no_constants(model)
    if list_opsets(model.opset_import).get("", _LEAST_OPSET) < _LEAST_OPSET:
        try:
            model = version_converter.convert_version(model, _LEAST_OPSET)
        except Exception as error:  # RuntimeError and what onnx's C++ throws
            raise ModelError(f"onnx cannot convert the model to opset {_LEAST_OPSET}: {error}") from error
    result = _optimize(model, "basic")
    _set_opsets(result)
    return result


def _optimize(model: ModelProto, level: str) -> ModelProto:
    """Return a model as ONNX Runtime's optimizations of a level leave it."""
    options = make_quiet_options()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options.optimized_model_filepath = os.path.join(folder, "model.onnx")
        open_session(model, level, options)
        return onnx.load(options.optimized_model_filepath)


def _list_no_constants(model: ModelProto) -> ModelProto:
    """Return a model of which no input is an initializer, as in IR versions that require this of constants."""
    result = ModelProto()
    result.CopyFrom(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    del result.graph.input[:]
    result.graph.input.extend(info for info in model.graph.input if info.name not in constants)
    result.ir_version = _LEAST_IR
    return result


def _set_opsets(model: ModelProto) -> None:
    """Name the domains of the nodes and no others: ONNX Runtime names all that it knows."""
    used, pending = {""}, [model.graph]
    while pending:
        for node in pending.pop().node:
            used.add("" if node.domain == "ai.onnx" else node.domain)
            pending += list_subgraphs(node)
    versions = list_opsets(model.opset_import)
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(domain, versions.get(domain, 1)) for domain in sorted(used))


def _read_data(
    model: ModelProto, recipe: str, data: Iterable[Any] | None, random: bool
) -> tuple[list[Batch], list[Batch], str]:  # fmt: skip
    """Return the batches for calibration and for the comparison, and what they are."""
    inputs = list_inputs(model)
    checks.require(data is None or not random, _NAME, "random", "False, if there is data", random)
    expected = f"batches for the recipe {recipe!r}, or random=True for random numbers"
    checks.require(data is not None or random or recipe not in ("static", "gptq"), _NAME, "data", expected, "None")
    if data is None and not random:
        return [], [], "none: nothing was compared"
    batches = make_random(inputs, _RANDOM) if data is None else check_batches(inputs, data)
    kind = "random batches" if data is None else "batches"
    count = len(batches) // 4 if len(batches) >= 4 else 0
    if not count or recipe not in ("static", "gptq"):
        return batches, batches, f"{len(batches)} {kind}, all of them also for the comparison"
    return batches[:-count], batches[-count:], f"{len(batches) - count} {kind}, {count} others for the comparison"


def _find_kept(graph: GraphEditor, keep: Sequence[str]) -> set[int]:
    """Return the nodes that patterns name; raise for a pattern that fits nothing."""
    kept: set[int] = set()
    for pattern in keep:
        found = [node for node in graph.nodes if _fits(node, pattern)]
        checks.require(
            bool(found), _NAME, "keep", "patterns that fit a node, its output or its operator", repr(pattern)
        )
        kept.update(map(id, found))
    return kept


def _fits(node: NodeProto, pattern: str) -> bool:
    # Names may contain brackets, which are special in a pattern.
    names = (node.name, node.op_type, *node.output)
    return pattern in names or any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _write_static(
    graph: GraphEditor, floats: ModelProto, kept: set[int], seen: Sequence[Batch], factory: Factory | None, most: int,
    progress: bool | None,
) -> list[NodeRow]:  # fmt: skip
    plan = static.make_plan(graph, kept)
    ranges = {name: RangeObserver(name, factory) for name in plan.scaled}
    means = {name: MeanObserver(axis) for name, axis in plan.inputs.items()}
    observers: dict[str, list[Any]] = {name: [observer] for name, observer in ranges.items()}
    for name, observer in means.items():
        observers.setdefault(name, []).append(observer)
    observe(floats, seen, observers, progress)
    scales = {name: static.choose_scale(*x.read(), plan.tops.get(name)) for name, x in ranges.items()}
    rows = _list_static_rows(graph, plan, kept)
    _store_other_weights(graph, {id(layer.node) for layer in plan.layers} | kept)
    static.write_plan(graph, plan, scales, means, most)
    return rows


def _list_static_rows(graph: GraphEditor, plan: static.Plan, kept: set[int]) -> list[NodeRow]:
    """Return a row for each node with weights or on codes."""
    integer = {id(layer.node): layer for layer in plan.layers}
    others = {id(node) for node in plan.others}
    rows = []
    for node in graph.nodes:
        if id(node) in integer:
            rows.append(NodeRow(integer[id(node)].result, node.op_type, "integer"))
        elif id(node) in others:
            rows.append(NodeRow(node.output[0], node.op_type, "codes"))
        else:
            rows += _list_float_rows(graph, node, kept)
    return rows


def _list_float_rows(graph: GraphEditor, node: NodeProto, kept: set[int]) -> list[NodeRow]:
    """Return a row for a node with weights that computes with floats."""
    name = node.output[0] if node.output else node.name
    if id(node) in kept:
        return [NodeRow(name, node.op_type, "float", "kept by `keep`")]
    if any(True for _ in list_subgraphs(node)):
        return [NodeRow(name, node.op_type, "float", "what is in branches and loops stays as it is")]
    if weights.list_weights(graph, node):
        reason = "" if node.op_type == "Gather" else "only the weights are codes"
        return [NodeRow(name, node.op_type, "weights", reason)]
    if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "RNN"):
        names = [name for name in node.input[:2] if name]
        reason = "no operand is constant"
        if any(name in graph.producers and graph.producers[name].op_type == "DequantizeLinear" for name in names[1:]):
            reason = "its weights are codes already"
        elif any(graph.find_weight(name) is not None for name in names):
            reason = "its weights are few"
        elif any(map(graph.is_constant, names)):
            reason = "its weights are not finite numbers of float32"
        elif any(name in graph.defaults for name in names):
            reason = "its weights are inputs of the model, with defaults"
        return [NodeRow(name, node.op_type, "float", reason)]
    return []


def _store_other_weights(graph: GraphEditor, done: set[int]) -> None:
    """Store the weights of all other nodes as int8."""
    for node in graph.nodes:
        for weight in weights.list_weights(graph, node) if id(node) not in done else ():
            weights.store_weight(graph, node, weight)


def _write_weights(
    graph: GraphEditor, floats: ModelProto, kept: set[int], seen: Sequence[Batch], recipe: str, block: int, most: int,
    progress: bool | None,
) -> list[NodeRow]:  # fmt: skip
    products = {} if recipe == "weight_only_int8" else {
        id(node): (node, product) for node in graph.nodes
        if id(node) not in kept and (product := weights.read_product(graph, node)) is not None
    }  # fmt: skip
    moments: dict[str, MomentsObserver] = {}
    if recipe == "gptq":
        moments = {node.input[0]: MomentsObserver(node.input[0]) for node, _ in products.values()}
        observe(floats, seen, {name: [observer] for name, observer in moments.items()}, progress)
    form = "integer" if recipe == "dynamic" else "weights"
    rows = []
    for node in graph.nodes:
        if id(node) in products:
            rows.append(NodeRow(node.output[0], node.op_type, form, "" if form == "integer" else "4 bits"))
        else:
            rows += _list_float_rows(graph, node, kept)
    _store_other_weights(graph, products.keys() | kept)
    for node, product in products.values():
        if recipe == "dynamic":
            weights.quantize_dynamic_product(graph, node, product, most)
            continue
        moment = moments.get(node.input[0])
        second = None if moment is None else moment.read()
        weights.quantize_blocks(graph, node, product, block, lambda w, h=second: _round_blocks(w, h, block))
    return rows


def _round_blocks(w: np.ndarray, second: np.ndarray | None, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 4-bit codes of a matrix, outputs by inputs, and the scales and zero points of its blocks."""
    spec = QuantSpec(jnp.uint4, Blocked(1, block), symmetric=False)
    method = ptq.Nearest("whole") if second is None else ptq.GPTQ()
    q: Any = method.quantize(jnp.asarray(w), None if second is None else jnp.asarray(second)[None], spec, 0)
    codes, scale, point = (np.asarray(part) for part in (q.codes, q.scale, q.zero_point))
    return codes.astype(np.uint8), scale.astype(np.float32), point.astype(np.uint8)


def _measure_times(models: Sequence[ModelProto], tested: Sequence[Batch]) -> list[float]:
    """Return the time of a call of each model in seconds, with one thread; NaN without a batch."""
    if not tested:
        return [np.nan] * len(models)
    return report.measure_times([open_quiet_session(model, threads=1) for model in models], tested[0])


def _measure_rows(
    floats: ModelProto, result: ModelProto, rows: Sequence[NodeRow], batches: Sequence[Batch]
) -> list[NodeRow]:
    """Return the rows with the errors of their outputs."""
    names = [row.name for row in rows if row.form in ("integer", "codes")]
    before, after = (open_quiet_session(add_outputs(part, names), "basic") for part in (floats, result))
    errors = report.compare_outputs(before, after, batches, names)
    return [NodeRow(row.name, row.operator, row.form, row.reason, errors.get(row.name)) for row in rows]
