"""Rules for the signatures of public functions: the standards' names and order, JAX's, and what is keyword-only."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import onnx.defs
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # type: ignore[attr-defined]

from tests.project import signatures

PUBLIC = signatures.list_functions()
# jax.checkpoint calls the policy, not a user. The recipes are explained together, by docs/recipes.md.
DESCRIBED = [name for name in PUBLIC if name not in ("save_codes", "onnx.probe_saturation") and ".recipes." not in name]

# oneDNN Graph's operations have no description that a program can read.
ONEDNN_INPUTS = ("src", "scales", "zps")
# JAX's own word for the first array of a function of one array is `a`, `x`, `operand` or `array`, and for two arrays
# `a, b` or `x, y`. Where it is a QuantizedArray, it is `q`.
ARRAYS = ("a", "b", "x", "y", "q", "lhs", "rhs", "operand", "operands", "array", "arrays", "args")
# Static, and positional for other reasons: a spec is the second argument wherever an array is quantized, and JAX's
# collectives have the name of the axis there.
POSITIONAL = ("spec", "second_spec", "axis_name")
# Functions with static arguments that are positional, because another library's function has them there.
POSITIONAL_IN = ("checkpoint.unpack", "distributed.find_shardings")  # numpy.zeros and the like; jax.sharding's order
# An annotation of a parameter that takes arrays, or what holds arrays.
ARRAY = re.compile(r"\b(Array|ArrayLike|QuantizedArray|Quantizer|Operand|Output|KVCache|Tree)\b")
LIMIT = 5


class Standard(NamedTuple):
    """What a standard says about an operator. The names are written as this package writes them."""

    inputs: tuple[str, ...]
    required: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.cache
def list_standards() -> dict[str, Standard]:
    """Return the operators of ONNX and ONNX Runtime that have a scale or a zero point, by their names in lower case."""
    schemas: dict[str, Any] = {}
    for schema in (*onnx.defs.get_all_schemas_with_history(), *runtime.get_all_operator_schema()):
        key, is_runtime = schema.name.lower(), schema.domain == "com.microsoft"
        if schema.domain not in ("", "com.microsoft") or (is_runtime and key in schemas):
            continue
        if key not in schemas or schema.since_version > schemas[key].since_version:
            schemas[key] = schema
    return {key: _read(schema) for key, schema in schemas.items() if _is_quantized(schema)}


def _is_quantized(schema: Any) -> bool:
    names = [value.name.lower() for value in (*schema.inputs, *schema.outputs)]
    return any(re.search(r"_scale|^scales|zero_point", name) for name in names)


def _read(schema: Any) -> Standard:
    inputs = tuple(value.name.lower() for value in schema.inputs)
    required = tuple(value.name.lower() for value in schema.inputs if "Optional" not in str(value.option))
    is_standard = schema.domain == ""
    attributes = [name for name, value in schema.attributes.items() if is_standard or value.required]
    return Standard(inputs, required, tuple(attributes))


def find_standard(name: str) -> Standard | None:
    """Return the operator that a public function is named after."""
    module, _, function = name.rpartition(".")
    return list_standards().get(function.replace("_", "")) if module in ("", "ops") else None


def find_jax_function(name: str) -> Callable[..., Any] | None:
    """Return the function of JAX that a public function has the name of."""
    module, _, function = name.rpartition(".")
    if module not in ("", "codes", "integer", "distributed"):
        return None
    bare = function.removeprefix("quantized_")
    for place in (jax.numpy, jax.nn, jax.lax):
        if inspect.isroutine(getattr(place, bare, None)) or hasattr(getattr(place, bare, None), "__wrapped__"):
            return getattr(place, bare)
    return None


OPERATORS = {name: standard for name in PUBLIC if (standard := find_standard(name)) is not None}
STAND_INS = {name: function for name in PUBLIC if (function := find_jax_function(name)) is not None}


def list_parameters(function: Callable[..., Any], *, positional: bool | None = None) -> list[inspect.Parameter]:
    """Return the parameters of a function: all of them, or only those that may, or may not, be given by position."""
    parameters = inspect.signature(function).parameters.values()
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if positional is None or positional == (p.kind not in keyword)]


def is_described_as_static(function: Callable[..., Any], parameter: str) -> bool:
    doc = inspect.getdoc(function) or ""
    arguments = doc.partition("\nArgs:")[2].partition("\nReturns:")[0]
    return f" {parameter}: Static." in arguments


def test_the_file_of_signatures_is_current() -> None:
    """A change of the public interface is to be seen in the file's diff."""
    written, current = signatures.PATH.read_text().splitlines(), signatures.format_public().splitlines()
    difference = "\n".join(difflib.unified_diff(written, current, "signatures.txt", "the package", lineterm="", n=0))
    assert written == current, f"run {signatures.COMMAND}, and look at what changes:\n{difference}"


def test_operators_have_a_standard() -> None:
    """An operator has the name that ONNX or ONNX Runtime gives it."""
    ours = {name for name, function in PUBLIC.items() if function.__module__.startswith("jaxquant._onnx_ops.")}
    assert ours == set(OPERATORS), "expected names of ONNX's or ONNX Runtime's operators that _is_quantized knows"


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_inputs_of_their_standard(name: str) -> None:
    """The inputs are positional, in the standard's order. Those that the standard does not have come after them."""
    standard, parameters = OPERATORS[name], list_parameters(PUBLIC[name], positional=True)
    names = [parameter.name for parameter in parameters]
    known = [name for name in standard.inputs if name in names]
    assert names[: len(known)] == known
    assert set(standard.required) <= set(names)
    # An input that the standard requires may have a default, where the operator returns floats without it.
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    assert set(required) <= set(standard.inputs)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_attributes_of_their_standard(name: str) -> None:
    """The attributes are keyword-only: all of ONNX's, and the ones that ONNX Runtime requires."""
    names = {parameter.name for parameter in list_parameters(PUBLIC[name], positional=False)}
    assert set(OPERATORS[name].attributes) <= names


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if name.startswith("onednn.") or name == "dynamic_dequantize"]
)
def test_onednn_operators_have_the_inputs_of_their_standard(name: str) -> None:
    names = [parameter.name for parameter in list_parameters(PUBLIC[name], positional=True)]
    assert tuple(names) == ONEDNN_INPUTS[: len(names)]


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_have_the_parameters_of_jax(name: str) -> None:
    """A parameter of both functions comes in JAX's order, and a positional one is JAX's, an array, or a spec."""
    theirs = list(inspect.signature(STAND_INS[name]).parameters)
    if list_parameters(PUBLIC[name])[0].name == "spec":
        return  # a calibrator that finds a range by JAX's function of this name
    positional = [parameter.name for parameter in list_parameters(PUBLIC[name], positional=True)]
    shared = [parameter for parameter in positional if parameter in theirs]
    assert shared == [parameter for parameter in theirs if parameter in positional]
    assert set(positional) - set(theirs) <= {*ARRAYS, "output"}
    for place, parameter in enumerate(positional):
        assert parameter not in theirs or theirs.index(parameter) >= place


@pytest.mark.parametrize("name", PUBLIC)
def test_static_arguments_are_keyword_only(name: str) -> None:
    """A function that stands in for one of JAX's has the static arguments where JAX has them."""
    permitted = {*POSITIONAL, *(inspect.signature(STAND_INS[name]).parameters if name in STAND_INS else ())}
    if name not in POSITIONAL_IN:
        for parameter in list_parameters(PUBLIC[name], positional=True):
            assert parameter.name in permitted or not is_described_as_static(PUBLIC[name], parameter.name)


@pytest.mark.parametrize("name", PUBLIC)
def test_functions_of_arrays_say_what_is_static(name: str) -> None:
    """Everything that is keyword-only is static, unless it is an array. A loop on the host traces no arguments."""
    first = [str(parameter.annotation) for parameter in list_parameters(PUBLIC[name], positional=True)[:1]]
    if any(ARRAY.search(annotation) for annotation in first):
        for parameter in list_parameters(PUBLIC[name], positional=False):
            is_static = is_described_as_static(PUBLIC[name], parameter.name)
            assert is_static != bool(ARRAY.search(str(parameter.annotation))), parameter


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - OPERATORS.keys() - STAND_INS.keys()))
def test_few_arguments_are_positional(name: str) -> None:
    """An operator has all the inputs of its standard, however many, and a function like JAX's has JAX's parameters."""
    positional = [p.name for p in list_parameters(PUBLIC[name], positional=True) if p.name not in ("args", "inputs")]
    assert len(positional) <= LIMIT or name in POSITIONAL_IN


@pytest.mark.parametrize("name", DESCRIBED)
def test_docstrings_have_their_sections(name: str) -> None:
    """Ruff checks that every argument is described (D417); here are the sections, and that there is an example."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    places = [doc.find(f"\n{section}:") for section in ("Args", "Returns", "Raises", "Example", "Source")]
    assert places == sorted(places), "sections are out of order"
    assert places[0] > 0, "a section is missing"
    assert ">>>" in doc, "there is no executed example"
