"""Rules of the source that no tool checks: sizes, docstrings, public names, a light import."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import pytest

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant import flax as jqf
from jaxquant.flax import nnx as qnnx

ROOT = pathlib.Path(jq.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TESTS = pathlib.Path(__file__).parent.parent
IDS = [str(f.relative_to(ROOT)) for f in FILES]

CHECKPOINT = {
    "pack": ["values"],
    "unpack": ["packed", "dtype", "shape"],
    "to_arrays": ["tree"],
    "from_arrays": ["tree"],
    "save_safetensors": ["path", "tree"],
    "load_safetensors": ["path"],
    "save_orbax": ["path", "tree"],
    "load_orbax": ["path", "like"],
}
FLAX = {
    "dot_general": ["weight_spec", "activation_spec", "weight_range", "activation_range", "backward"],
    "conv_general_dilated": ["weight_spec", "activation_spec", "weight_range", "activation_range", "backward"],
    "promote_dtype": ["inputs", "kernel", "bias", "dtype", "inexact"],
    "calibrate": ["module", "variables", "batches", "method", "rngs", "checkpoint", "progress", "arguments"],
    "check_calibrated": ["variables"],
    "convert": ["module", "variables"],
    "fold_batch_norm": ["layer", "norm", "stats", "epsilon", "axis"],
}
NNX = {
    "dot_general": [
        *("weight_spec", "activation_spec", "rngs", "weight_range", "activation_range", "backward"),
        *("use_running_average", "kernel_shape"),
    ],
    "promote_dtype": ["operands", "dtype", "inexact"],
    "start": ["model", "inputs", "method"],
    "calibrate": ["model", "batches", "method", "checkpoint", "progress", "arguments"],
    "calibration_view": ["model"],
    "check_calibrated": ["model"],
    "convert": ["model"],
    "fold_batch_norm": ["layer", "norm"],
}
NNX["conv_general_dilated"] = NNX["dot_general"]
POLICIES = ("save_codes",)  # what jax.checkpoint calls, not a user
MODULE_HOOKS = ("__getattr__", "__dir__")  # PEP 562
PUBLIC = {
    **{n: f for n, f in vars(jq).items() if inspect.isfunction(f) and n not in (*POLICIES, *MODULE_HOOKS)},
    **{
        f"onednn.{name}": f for name, f in vars(jq.onednn).items() if inspect.isfunction(f) and name not in MODULE_HOOKS
    },
    **{
        f"integer.{name}": f
        for name, f in vars(jq.integer).items()
        if inspect.isfunction(f) and name not in MODULE_HOOKS
    },
    **{f"checkpoint.{name}": getattr(checkpoint, name) for name in CHECKPOINT},
    **{f"flax.{n}": f for n, f in vars(jqf).items() if inspect.isfunction(f) and n not in MODULE_HOOKS},
    **{f"flax.nnx.{n}": f for n, f in vars(qnnx).items() if inspect.isfunction(f) and n in NNX},
}
# Loops on the host, of which nothing is traced but what they call.
LOOPS = ("flax.calibrate", "flax.nnx.calibrate")
# What stands in for a JAX function has its argument order, dimension numbers and all; its zero points come last.
LIKE_JAX = (
    "integer.dot_general",
    "integer.conv_general_dilated",
    "dot_general",
    "conv_general_dilated",
    "einsum",
    "take",
    "concatenate",
    "quantized_dot_general",
    "quantized_einsum",
    "quantized_conv_general_dilated",
)
TRACED_IN_JAX = (
    *("lhs_spec", "rhs_spec", "specs", "key"),
    *("lhs", "rhs", "lhs_zero_point", "rhs_zero_point", "operands", "q", "indices", "arrays"),
)
# A factory of functions: all that it is told is static, and what may stand in its place is not marked.
FACTORIES = ("absmax", "entropy", "minmax", "moving_average", "mse", "percentile")
# A standard's operator has its standard's inputs, however many.
MANY_INPUTS = ("qlinear_matmul", "qlinear_conv", "matmul_integer_to_float")


def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_budgets(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 400
    assert ast.get_docstring(tree(path)), "a module says what it is for"
    outer = [n for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    methods = [m for c in outer if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef)]
    for node in [*(n for n in outer if isinstance(n, ast.FunctionDef)), *methods]:
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        assert (node.end_lineno or 0) - first.lineno < 40, f"{node.name} is too long"
        if not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
    assert not re.search(r"utils|helpers|common|cfg", path.name)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_custom_vjp_triples(path: pathlib.Path) -> None:
    """`f`, `_f_fwd`, `_f_bwd` and then `f.defvjp(_f_fwd, _f_bwd)`."""
    text = path.read_text()
    for name in re.findall(r"custom_vjp.*\)\ndef (\w+)\(", text):
        bare = name.lstrip("_")
        assert re.search(rf"{name}.defvjp\(_{bare}_fwd, _{bare}_bwd(, symbolic_zeros=True)?\)", text)


def test_no_test_imports_another() -> None:
    """What two of them share is in tests/support, tests/oracles or tests/cases."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = [part for name in (*names, module or "") for part in name.split(".")]
            found += [f"{path.name} imports {part}" for part in parts if part.startswith("test_")]
    assert not found


@pytest.mark.parametrize("name", list(PUBLIC))
def test_docstrings(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    places = [doc.find(f"\n{section}:") for section in ("Args", "Returns", "Raises", "Example", "Source")]
    assert places == sorted(places), "sections are out of order"
    assert places[0] > 0, "a section is missing"
    assert ">>>" in doc, "an example is executed"
    arguments = doc[places[0] : places[1]]
    for parameter in inspect.signature(PUBLIC[name]).parameters.values():
        assert re.search(rf" (\*\*)?{parameter.name}: ", arguments), f"{parameter.name} is not described"
        is_static = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if name in LIKE_JAX:
            is_static = parameter.name not in TRACED_IN_JAX
        is_static |= parameter.name == "spec" and name not in FACTORIES
        is_static |= name == "checkpoint.unpack" and parameter.name in ("dtype", "shape")
        if name not in LOOPS:
            assert is_static == (f" {parameter.name}: Static." in arguments)
    if name not in (*LIKE_JAX, *MANY_INPUTS):
        kinds = [p.kind for p in inspect.signature(PUBLIC[name]).parameters.values()]
        assert sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds) <= 5


CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
# In jax.lax's order; what follows there says nothing of integers.
DOT = list(inspect.signature(jax.lax.dot_general).parameters)[:3]
CONV = list(inspect.signature(jax.lax.conv_general_dilated).parameters)[:9]


def test_the_public_names_are_the_issue_s() -> None:
    wanted: dict[str, list[Any]] = {
        "quantize_linear": [
            "x",
            "y_scale",
            "y_zero_point",
            "axis",
            "block_size",
            "saturate",
            "output_dtype",
            "precision",
        ],
        "dequantize_linear": ["x", "x_scale", "x_zero_point", "axis", "block_size", "output_dtype"],
        "dynamic_quantize_linear": ["x", "dtype", "axis", "training", "lda_coeff", "name"],
        "fake_quantize_linear": [
            *("x", "scale", "zero_point", "dtype", "axis", "block_size", "training", "lda_coeff", "name")
        ],
        "dynamic_fake_quantize_linear": ["x", "dtype", "axis", "training", "lda_coeff", "name"],
        "dynamic_dequantize": ["src", "scales", "zps", "qtype", "axis", "group_shape"],
        "matmul_integer": ["a", "b", "a_zero_point", "b_zero_point"],
        "qlinear_matmul": [
            *("a", "a_scale", "a_zero_point", "b", "b_scale", "b_zero_point", "y_scale", "y_zero_point")
        ],
        "conv_integer": ["x", "w", "x_zero_point", "w_zero_point", *CONVOLUTION],
        "qlinear_conv": [
            *("x", "x_scale", "x_zero_point", "w", "w_scale", "w_zero_point", "y_scale", "y_zero_point", "b"),
            *CONVOLUTION,
        ],
        "dynamic_quantize_matmul": ["a", "b", "b_scale", "b_zero_point", "bias"],
        "matmul_integer_to_float": ["a", "b", "a_scale", "b_scale", "a_zero_point", "b_zero_point", "bias"],
        "matmul_nbits": ["a", "b", "scales", "zero_points", "bias", "K", "N", "bits", "block_size"],
        "integer.dot_general": [*DOT, "lhs_zero_point", "rhs_zero_point", "out_sharding"],
        "integer.conv_general_dilated": [*CONV, "lhs_zero_point", "rhs_zero_point"],
        "quantize": ["x", "spec", "lo", "hi", "range"],
        "onnx_view": ["q"],
        "from_onnx": ["x", "x_scale", "x_zero_point", "axis", "block_size", "output_dtype"],
        "dot_general": [*DOT, "precision", "preferred_element_type", "out_sharding"],
        "matmul": ["lhs", "rhs", "precision", "preferred_element_type", "out_sharding"],
        "einsum": ["subscripts", "operands", "precision", "preferred_element_type", "out_sharding"],
        "conv_general_dilated": [*CONV, "precision", "preferred_element_type"],
        "take": ["q", "indices", "axis", "mode", "out_sharding"],
        "concatenate": ["arrays", "axis"],
        "quantization_error": ["x", "q"],
        "fake_quantize": ["x", "spec", "scale", "zero_point", "gradient"],
        "quantized_dot_general": [
            *DOT,
            *("lhs_spec", "rhs_spec", "backward", "key", "precision", "preferred_element_type", "out_sharding"),
        ],
        "quantized_einsum": [
            *(
                "subscripts",
                "operands",
                "specs",
                "backward",
                "key",
                "precision",
                "preferred_element_type",
                "out_sharding",
            )
        ],
        "quantized_conv_general_dilated": [
            *CONV,
            *("lhs_spec", "rhs_spec", "backward", "key", "precision", "preferred_element_type"),
        ],
        "minmax": ["spec"],
        "absmax": ["spec"],
        "moving_average": ["spec", "decay"],
        "percentile": ["spec", "q", "bins", "every"],
        "mse": ["spec", "bins", "grid", "every"],
        "entropy": ["spec", "bins", "every"],
        "onednn.quantize": ["src", "scales", "zps", "qtype", "axis", "dtype"],
        "onednn.dequantize": ["src", "scales", "zps", "qtype", "axis"],
        "onednn.dynamic_quantize": ["src", "scales", "zps", "qtype", "axis", "dtype"],
        "onednn.dynamic_dequantize": ["src", "scales", "zps", "qtype", "axis", "group_shape"],
        **{f"checkpoint.{name}": arguments for name, arguments in CHECKPOINT.items()},
        **{f"flax.{name}": arguments for name, arguments in FLAX.items()},
        **{f"flax.nnx.{name}": arguments for name, arguments in NNX.items()},
    }
    assert {name: list(inspect.signature(f).parameters) for name, f in PUBLIC.items()} == wanted


def test_import_is_light() -> None:
    """No framework is imported with it; docs/quickstart.md has the time that it takes, by this program."""
    program = (
        "import sys, time, jax, jax.numpy, chex; t = time.perf_counter(); import jaxquant;"
        "print(time.perf_counter() - t, [m for m in ('flax', 'onnx', 'onnxruntime', 'torch', 'optax', 'haiku',"
        " 'orbax', 'safetensors') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    _, frameworks = run.stdout.strip().split(" ", 1)
    assert frameworks == "[]"
