"""Rules for the source that no tool checks: sizes, names, comments, docstrings, public signatures, a light import."""

from __future__ import annotations

import ast
import collections
import inspect
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import jaxquant as jq
from jaxquant import checkpoint, distributed, optim, ptq, report
from jaxquant import flax as jqf
from jaxquant import onnx as jqonnx
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

PACKAGE = pathlib.Path(jq.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]

PACKAGES = {
    "": jq,
    "calibration.": jq.calibration,
    "checkpoint.": checkpoint,
    "codes.": jq.codes,
    "distributed.": distributed,
    "flax.": jqf,
    "flax.linen.": qnn,
    "flax.nnx.": qnnx,
    "integer.": jq.integer,
    "onednn.": jq.onednn,
    "onnx.": jqonnx,
    "ops.": jq.ops,
    "optim.": optim,
    "ptq.": ptq,
    "report.": report,
}
LOADED_ON_FIRST_USE = {
    "": {"checkpoint", "distributed", "flax", "onnx", "optim", "ptq", "report"},
    "flax.": {"nnx"},
}
# Packages that do not import each other.
INDEPENDENT = ("flax/", "onnx/export/", "onnx/load/", "ptq/", "report/", "transform/")
# jax.checkpoint calls the policy, not a user.
POLICIES = ("save_codes",)


def list_public_functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by their path below jaxquant; the operators of the root only under that path."""
    functions = {}
    for prefix, package in PACKAGES.items():
        for name in package.__all__:
            is_new = prefix != "ops." or name not in jq.__all__
            if inspect.isfunction(getattr(package, name)) and name not in POLICIES and is_new:
                functions[prefix + name] = getattr(package, name)
    return functions


PUBLIC = list_public_functions()
# A loop on the host: its arguments are not traced.
LOOPS = (
    *("flax.calibrate", "flax.nnx.calibrate", "ptq.collect", "ptq.apply", "ptq.smooth", "ptq.equalize"),
    *(
        "ptq.correct_bias",
        "ptq.tune",
        "ptq.collect_gradients",
        "ptq.rotate",
        "ptq.allocate_bits",
        "report.compare",
        "onnx.export",
        "onnx.make_session",
        "onnx.verify",
    ),
    *("optim.quantize_state", "distributed.check_processes", "distributed.count_traffic"),
    "distributed.find_shardings",
)
# A function that replaces one of JAX has JAX's argument order, static arguments included; zero points come last.
LIKE_JAX = (
    "integer.dot_general",
    "integer.conv_general_dilated",
    "dot_general",
    "conv_general_dilated",
    "einsum",
    "take",
    "concatenate",
    *("codes.max_pool", "codes.average_pool", "codes.mean", "codes.reshape", "codes.transpose", "codes.pad"),
    *("distributed.all_gather", "distributed.all_to_all", "distributed.ppermute", "distributed.psum"),
    *("distributed.pmean", "distributed.psum_scatter", "distributed.psum_with_error_feedback"),
    "distributed.compare_devices",
    "quantized_dot_general",
    "quantized_einsum",
    "quantized_conv_general_dilated",
    *("attention", "quantized_dot_product_attention"),
)
TRACED_IN_JAX = (
    *("lhs_spec", "rhs_spec", "specs", "key", "query_spec", "key_spec", "value_spec"),
    *("query", "value", "mask", "query_seq_lengths", "key_value_seq_lengths", "cache", "query_positions"),
    *("x", "residual", "tree"),
    *("lhs", "rhs", "lhs_zero_point", "rhs_zero_point", "operands", "q", "indices", "arrays", "output", "bias"),
)
# A factory of functions: all its arguments are static, and only the keyword-only ones are marked as such.
FACTORIES = (
    "calibration.absmax",
    "calibration.entropy",
    "calibration.minmax",
    "calibration.moving_average",
    "calibration.mse",
    "calibration.percentile",
)
# An operator has all the inputs of its standard, however many.
MANY_INPUTS = (
    *("qlinear_matmul", "qlinear_conv", "ops.matmul_integer_to_float"),
    *("ops.qlinear_add", "ops.qlinear_mul", "ops.qlinear_where"),
)

CONV_ATTRIBUTES = "auto_pad dilations group kernel_shape pads strides"
POOL_ATTRIBUTES = "count_include_pad pads strides"
ONE_TENSOR = "x x_scale x_zero_point y_scale y_zero_point"
# Of JAX's parameters only the first ones: the later ones do not apply to integers.
DOT = " ".join(list(inspect.signature(jax.lax.dot_general).parameters)[:3])
CONV = " ".join(list(inspect.signature(jax.lax.conv_general_dilated).parameters)[:9])
LAYER = "weight_spec activation_spec weight_range activation_range backward"
NNX_LAYER = "weight_spec activation_spec rngs weight_range activation_range backward use_running_average kernel_shape"

SIGNATURES = {
    "prepare": "function params args rules strict kwargs",
    "quantize_linear": "x y_scale y_zero_point axis block_size saturate output_dtype precision",
    "dequantize_linear": "x x_scale x_zero_point axis block_size output_dtype",
    "dynamic_quantize_linear": "x dtype axis training lda_coeff name specified_outputs_name",
    "fake_quantize_linear": "x scale zero_point dtype axis block_size training lda_coeff name specified_outputs_name",
    "dynamic_fake_quantize_linear": "x dtype axis training lda_coeff name specified_outputs_name",
    "dynamic_dequantize": "src scales zps qtype axis group_shape",
    "matmul_integer": "a b a_zero_point b_zero_point",
    "qlinear_matmul": "a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point bias",
    "conv_integer": f"x w x_zero_point w_zero_point {CONV_ATTRIBUTES}",
    "qlinear_conv": f"x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point b {CONV_ATTRIBUTES}",
    "ops.dynamic_quantize_matmul": "a b b_scale b_zero_point bias",
    "ops.matmul_integer_to_float": "a b a_scale b_scale a_zero_point b_zero_point bias",
    "ops.matmul_nbits": "a b scales zero_points bias K N bits block_size",
    "ops.qlinear_add": "a a_scale a_zero_point b b_scale b_zero_point c_scale c_zero_point",
    "ops.qlinear_mul": "a a_scale a_zero_point b b_scale b_zero_point c_scale c_zero_point",
    "ops.qlinear_average_pool": f"{ONE_TENSOR} kernel_shape auto_pad ceil_mode channels_last {POOL_ATTRIBUTES}",
    "ops.qlinear_global_average_pool": f"{ONE_TENSOR} channels_last",
    "ops.qlinear_reduce_mean": "data data_scale data_zero_point reduced_scale reduced_zero_point axes keepdims",
    "ops.qlinear_concat": "y_scale y_zero_point inputs axis",
    "ops.qlinear_where": "condition x x_scale x_zero_point y y_scale y_zero_point z_scale z_zero_point",
    "ops.qlinear_sigmoid": ONE_TENSOR,
    "ops.qlinear_leaky_relu": f"{ONE_TENSOR} alpha",
    "ops.qlinear_softmax": f"{ONE_TENSOR} axis opset",
    "integer.dot_general": f"{DOT} lhs_zero_point rhs_zero_point out_sharding",
    "integer.conv_general_dilated": f"{CONV} lhs_zero_point rhs_zero_point",
    "quantize": "x spec range stored_last",
    "onnx_view": "q",
    "from_onnx": "x x_scale x_zero_point axis block_size output_dtype",
    "dot_general": f"{DOT} precision preferred_element_type out_sharding bias output",
    "matmul": "lhs rhs precision preferred_element_type out_sharding bias output",
    "einsum": "subscripts operands precision preferred_element_type out_sharding bias output",
    "conv_general_dilated": f"{CONV} precision preferred_element_type bias output",
    "take": "q indices axis mode out_sharding",
    "concatenate": "arrays axis output",
    "codes.add": "a b output",
    "codes.multiply": "a b output",
    "codes.relu": "q",
    "codes.max_pool": "q window_shape strides padding channels_last",
    "codes.average_pool": "q window_shape strides padding count_include_pad channels_last output",
    "codes.mean": "q axis keepdims output",
    "codes.reshape": "q shape",
    "codes.transpose": "q axes",
    "codes.pad": "q pad_width",
    "codes.quantize_bias": "bias lhs_scale rhs_scale",
    "quantization_error": "x q",
    "fake_quantize": "x spec scale zero_point gradient",
    "quantized_dot_general": (f"{DOT} lhs_spec rhs_spec backward key precision preferred_element_type out_sharding"),
    "quantized_einsum": "subscripts operands specs backward key precision preferred_element_type out_sharding",
    "quantized_conv_general_dilated": f"{CONV} lhs_spec rhs_spec backward key precision preferred_element_type",
    "attention": "q cache mask bias query_positions spec scale weight_digits",
    "quantized_dot_product_attention": (
        "query key value bias mask scale is_causal query_seq_lengths key_value_seq_lengths local_window_size "
        "implementation query_spec key_spec value_spec weight_digits"
    ),
    "calibration.minmax": "spec",
    "calibration.absmax": "spec",
    "calibration.moving_average": "spec decay",
    "calibration.percentile": "spec q bins every",
    "calibration.mse": "spec bins grid every",
    "calibration.entropy": "spec bins every",
    "onnx.export": "function arguments form opset scan batch weights input_names output_names name",
    "onnx.save": "model path",
    "onnx.find_saturating_products": "model",
    "onnx.convert_weights_to_uint8": "model",
    "onnx.make_session": "model level options providers",
    "count_saturating_pairs": "weights contracting_axis",
    "onnx.verify": "model function arguments level tolerance",
    "onnx.check": "model limits",
    "onnx.load": "model limits trainable fusions constants parameters",
    "ptq.gptq": "w hessian spec grid axis activation_order damping sweeps stored_last diagnostics",
    "ptq.hqq": "w spec p beta growth steps stored_last diagnostics",
    "ptq.adaround": "w hessian spec grid axis steps rate penalty sweeps stored_last",
    "ptq.search_range": "w spec importance least steps",
    "ptq.awq": "w moments spec axis channel steps",
    "ptq.smoothquant": "w x_max alpha channel",
    "ptq.second_moments": "groups",
    "ptq.collect": "prepared params batches limit checkpoint progress arguments",
    "ptq.collect_gradients": "prepared params batches key progress arguments",
    "ptq.apply": "prepared params data method ranges match_floats gradients state on_layer progress arguments",
    "ptq.smooth": "prepared params stats batch method alpha arguments",
    "ptq.equalize": "prepared params batch arguments",
    "ptq.rotate": "prepared params batch key arguments",
    "ptq.correct_bias": "prepared params q data batch arguments",
    "ptq.tune": "prepared params q batches held_out rounds rate codes code_rate progress arguments",
    "ptq.allocate_bits": "prepared params batches budget most_damage dtypes arguments",
    "report.compare": "prepared params q batches arguments",
    "optim.quantize_state": "tx spec second_spec overrides min_size seed",
    "optim.describe_state": "state",
    "report.plot_notes": "notes path",
    "report.plot_plan": "plan path",
    "onednn.quantize": "src scales zps qtype axis dtype",
    "onednn.dequantize": "src scales zps qtype axis",
    "onednn.dynamic_quantize": "src scales zps qtype axis dtype",
    "onednn.dynamic_dequantize": "src scales zps qtype axis group_shape",
    "checkpoint.pack": "values",
    "checkpoint.unpack": "packed dtype shape",
    "checkpoint.to_arrays": "tree",
    "checkpoint.from_arrays": "tree",
    "checkpoint.save_safetensors": "path tree",
    "checkpoint.load_safetensors": "path like",
    "checkpoint.save_orbax": "path tree",
    "checkpoint.load_orbax": "path like",
    "distributed.all_gather": "x axis_name spec axis tiled backward_spec",
    "distributed.all_to_all": "x axis_name split_axis concat_axis spec tiled key",
    "distributed.ppermute": "x axis_name perm spec key",
    "distributed.psum": "x axis_name spec key",
    "distributed.pmean": "x axis_name spec key",
    "distributed.psum_scatter": "x axis_name spec scatter_dimension tiled key",
    "distributed.psum_with_error_feedback": "x residual axis_name spec key",
    "distributed.compare_devices": "tree axis_name",
    "distributed.check_processes": "tree name",
    "distributed.count_traffic": "compiled",
    "distributed.find_shardings": "tree mesh partitions whole_blocks",
    "flax.dot_general": LAYER,
    "flax.conv_general_dilated": LAYER,
    "flax.promote_dtype": "inputs kernel bias dtype inexact",
    "flax.calibrate": "module variables batches method rngs checkpoint progress arguments",
    "flax.check_calibrated": "variables",
    "flax.convert": "module variables",
    "flax.fold_batch_norm": "layer norm stats epsilon axis",
    "flax.nnx.dot_general": NNX_LAYER,
    "flax.nnx.conv_general_dilated": NNX_LAYER,
    "flax.nnx.promote_dtype": "operands dtype inexact",
    "flax.nnx.start": "model inputs method",
    "flax.nnx.calibrate": "model batches method checkpoint progress arguments",
    "flax.nnx.calibration_view": "model",
    "flax.nnx.check_calibrated": "model",
    "flax.nnx.convert": "model",
    "flax.nnx.fold_batch_norm": "layer norm",
}


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a module, and its classes and functions at any depth."""
    blocks: list[ast.AST] = [tree]
    while blocks:
        block = blocks.pop()
        if isinstance(block, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield block
        # No expression holds a definition, and most nodes of a tree are expressions.
        blocks += [node for node in ast.iter_child_nodes(block) if not isinstance(node, ast.expr)]


def find_docstring_lines(text: str) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in list_definitions(ast.parse(text)):
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def find_comment_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold a comment and no code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_module_is_named_after_its_subject(path: pathlib.Path) -> None:
    assert not re.search(r"utils|helpers|common|cfg", path.name)


def test_few_modules_define_the_same_function_name() -> None:
    """One name has one meaning. Python's own names, such as `__call__`, may be defined anywhere.

    The packages on one level do not know each other, and name their private functions independently. So the modules of
    `onnx.load`, `onnx.export`, `ptq` and so on are counted with those of the levels below, but not together.

    A Protocol declares methods, and the classes that follow it have to define them.
    """
    definitions = [(path, node) for path in FILES for node in list_definitions(parse(path))]
    methods = [
        (path, node, any(getattr(base, "id", "") == "Protocol" for base in definition.bases))
        for path, definition in definitions
        if isinstance(definition, ast.ClassDef)
        for node in definition.body
        if isinstance(node, ast.FunctionDef)
    ]
    declared = {node.name for _, node, is_protocol in methods if is_protocol}
    implementing = {(path, node.lineno) for path, node, _ in methods if node.name in declared}
    modules = collections.defaultdict(set)
    for path, node in definitions:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (path, node.lineno) not in implementing and not re.fullmatch(r"__\w+__", node.name):
            modules[node.name].add(str(path.relative_to(PACKAGE)))
    public = {
        name
        for prefix in ("", "codes.", "integer.", "onednn.", "ops.", "flax.", "flax.nnx.")
        for name in PACKAGES[prefix].__all__
    }
    public.add("nbytes")  # numpy's name
    repeated = {}
    for name, paths in modules.items():
        lower = [path for path in paths if not path.startswith(INDEPENDENT)]
        upper = max((sum(path.startswith(start) for path in paths) for start in INDEPENDENT), default=0)
        if len(lower) + upper > (4 if name in public else 3):
            repeated[name] = sorted(paths)
    text = "expected a function name in at most 3 modules (4 for a public name)"
    assert not repeated, f"{text}, got {repeated}: merge the functions, or name what differs"


def test_comments_explain_the_code() -> None:
    """Comments say why, in at least 0.05 lines for each line of code."""
    comments = code = 0
    for path in FILES:
        text = path.read_text()
        prose = find_docstring_lines(text) | find_comment_lines(text)
        comments += len(find_comment_lines(text))
        code += sum(bool(line.strip()) and n not in prose for n, line in enumerate(text.splitlines(), 1))
    density = comments / code
    assert density >= 0.05, (
        f"expected 0.05 comment lines for each line of code, got {comments} / {code} = {density:.3f}"
    )


def list_prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; of Python code, `floor`, a function, is removed."""
    text = path.read_text()
    prose = find_docstring_lines(text) | find_comment_lines(text) if path.suffix == ".py" else None
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line if prose is None or number in prose else re.sub(r"\b[Ff]loor\b", "", line)


def test_no_metaphors_of_buildings() -> None:
    words = re.compile(r"\b(houses?|rooms?|doors?|upstairs|downstairs)\b|\bfloors?\b(?!\()", re.IGNORECASE)
    folders = [ROOT / name for name in ("jaxquant", "tests", "docs", "examples", "benchmarks")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    found = []
    for path in sorted({*paths, ROOT / "README.md"} - {pathlib.Path(__file__)}):
        if not words.search(path.read_text()):
            continue  # to find the docstrings takes longer
        for number, line in list_prose(path):
            found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for match in words.finditer(line)]
    assert not found, f"expected the field's words, got metaphors of buildings: {found}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_custom_vjp_triples(path: pathlib.Path) -> None:
    """`f`, `_f_fwd`, `_f_bwd` and then `f.defvjp(_f_fwd, _f_bwd)`."""
    text = path.read_text()
    for name in re.findall(r"custom_vjp.*\)\ndef (\w+)\(", text):
        bare = name.lstrip("_")
        assert re.search(rf"{name}.defvjp\(_{bare}_fwd, _{bare}_bwd(, symbolic_zeros=True)?\)", text)


@pytest.mark.slow
def test_no_test_imports_another() -> None:
    """Shared code is in tests/support, tests/oracles or tests/cases."""
    found = []
    for path in TEST_FILES:
        for node in ast.walk(parse(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = [part for name in (*names, module or "") for part in name.split(".")]
            found += [f"{path.name} imports {part}" for part in parts if part.startswith("test_")]
    assert not found


@pytest.mark.parametrize("prefix", PACKAGES)
def test_dir_lists_the_public_names(prefix: str) -> None:
    package: types.ModuleType = PACKAGES[prefix]
    assert set(dir(package)) == {*package.__all__, *LOADED_ON_FIRST_USE.get(prefix, ())}
    assert len(package.__all__) == len(set(package.__all__)), "a name is listed twice"
    for name in dir(package):
        assert getattr(package, name) is not None


def test_public_signatures() -> None:
    signatures = {name: " ".join(inspect.signature(function).parameters) for name, function in PUBLIC.items()}
    assert signatures == SIGNATURES


@pytest.mark.parametrize("name", list(PUBLIC))
def test_docstrings(name: str) -> None:
    """Ruff checks that every argument is described (D417); here are the sections and the word Static."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    places = [doc.find(f"\n{section}:") for section in ("Args", "Returns", "Raises", "Example", "Source")]
    assert places == sorted(places), "sections are out of order"
    assert places[0] > 0, "a section is missing"
    assert ">>>" in doc, "there is no executed example"
    arguments = doc[places[0] : places[1]]
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    for parameter in parameters:
        is_static = parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in ("bias", "output")
        if name in LIKE_JAX:
            is_static = parameter.name not in TRACED_IN_JAX
        is_static |= parameter.name == "spec" and name not in FACTORIES
        is_static |= name == "checkpoint.unpack" and parameter.name in ("dtype", "shape")
        if name not in LOOPS:
            assert is_static == (f" {parameter.name}: Static." in arguments)
    if name not in (*LIKE_JAX, *MANY_INPUTS):
        assert sum(parameter.kind is not inspect.Parameter.KEYWORD_ONLY for parameter in parameters) <= 5


@pytest.mark.slow
def test_import_is_light() -> None:
    """Importing jaxquant imports no framework. The program prints the time that docs/quickstart.md states."""
    program = (
        "import sys, time, jax, jax.numpy, chex; t = time.perf_counter(); import jaxquant;"
        "print(time.perf_counter() - t, [m for m in ('flax', 'onnx', 'onnxruntime', 'torch', 'optax', 'haiku',"
        " 'orbax', 'safetensors') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    _, frameworks = run.stdout.strip().split(" ", 1)
    assert frameworks == "[]"
