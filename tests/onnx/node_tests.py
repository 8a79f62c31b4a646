"""onnx's backend node tests, run through `jaxquant.onnx.load`: `python -m tests.onnx.node_tests` prints how many pass.

With arguments it runs the cases with names that contain one of them, and prints why each fails. With `--export` it
counts instead how many of the functions that `load` returns, and JAX can trace, are exported again, and how many of
these models ONNX Runtime computes as JAX does.
"""

from __future__ import annotations

import collections
import sys
import warnings
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from jaxquant import onnx as jqonnx


def collect_cases() -> list[Any]:
    """Return all cases of onnx's node tests."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own casts, as it computes what it expects
        return collect_testcases(None)


def read_value(value: Any) -> Any:
    """Return an input or an output of a case as an array, or a list of arrays."""
    if isinstance(value, onnx.TensorProto):
        return np.asarray(numpy_helper.to_array(value))
    if isinstance(value, list | tuple):
        return [read_value(part) for part in value]
    return np.asarray(value)


def compare(expected: Any, actual: Any, rtol: float, atol: float) -> None:
    """Raise AssertionError unless a result is the expected one."""
    if isinstance(expected, list):
        assert len(expected) == len(actual), "another number of elements in a sequence"
        for left, right in zip(expected, actual, strict=True):
            compare(left, right, rtol, atol)
        return
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    narrow = {"int64": "int32", "uint64": "uint32", "float64": "float32"}
    names = (expected.dtype.name, narrow.get(expected.dtype.name))
    assert actual.dtype.name in names, f"dtype {actual.dtype}, expected {expected.dtype}"
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected)
    else:
        wide = (x if x.dtype.kind in "fc" else x.astype(np.float32) for x in (actual, expected))
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)


def run_case(case: Any) -> None:
    """Load the model of a case and compare its outputs; raise if it cannot be loaded or a result differs."""
    fn, params = jqonnx.load(case.model)
    for inputs, outputs in case.data_sets:
        actual = fn(params, *map(read_value, inputs))
        results = actual if isinstance(actual, tuple) else (actual,)
        for expected, result in zip(outputs, results, strict=True):
            compare(read_value(expected), result, max(case.rtol, 1e-3), max(case.atol, 1e-5))


def run_cases_at_once(cases: list[Any]) -> None:
    """Run the first data set of several cases in one compiled program, which takes less time than each operation."""
    functions, known, traced, expected = [], [], [], []
    for case in cases:
        fn, params = jqonnx.load(case.model)
        inputs, outputs = case.data_sets[0]
        values = {x.name: read_value(value) for x, value in zip(fn.inputs, inputs, strict=True)}
        known.append({name: value for name, value in values.items() if name in fn.static_inputs})
        traced.append({name: value for name, value in values.items() if name not in fn.static_inputs})
        functions.append((fn, params))
        expected.append([read_value(value) for value in outputs])

    def run_all(arrays: list[Any]) -> list[Any]:
        pairs = zip(functions, known, arrays, strict=True)
        return [fn(params, **statics, **values) for (fn, params), statics, values in pairs]

    for case, results, outputs in zip(cases, jax.jit(run_all)(traced), expected, strict=True):
        actual = results if isinstance(results, tuple) else (results,)
        for result, output in zip(actual, outputs, strict=True):
            try:
                compare(output, result, max(case.rtol, 1e-3), max(case.atol, 1e-5))
            except AssertionError as error:
                raise AssertionError(f"{case.name}: {error}") from error


def count_passed(cases: list[Any], verbose: bool = False) -> tuple[int, collections.Counter[str]]:
    """Return how many cases pass, and how many fail for each error."""
    passed, failures = 0, collections.Counter[str]()
    for i, case in enumerate(cases):
        try:
            if case.model is None:
                raise ValueError("no model")
            run_case(case)
            passed += 1
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = " ".join(lines[:4])[:300] if lines else ""
            failures[f"{case.name}: {type(error).__name__}: {text}" if verbose else f"{text[:90]}"] += 1
        if i % 100 == 99:
            jax.clear_caches()
    return passed, failures


def trace_case(case: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the function of a case and its inputs by name; None if JAX cannot trace it."""
    try:
        fn, params = jqonnx.load(case.model)
        values = {x.name: read_value(v) for x, v in zip(fn.inputs, case.data_sets[0][0], strict=True)}
        known = {name: values.pop(name) for name in fn.static_inputs}

        def function(inputs: dict[str, Any]) -> Any:
            return fn(params, **known, **inputs)

        jax.eval_shape(function, values)
    except Exception:  # an operator that is not supported, or a shape that depends on data
        return None
    return function, values


def count_exports(cases: list[Any]) -> tuple[collections.Counter[str], list[str]]:
    """Return how many traced functions are exported, run by ONNX Runtime, and equal, and why the others are not."""
    counts, failures = collections.Counter[str](), []
    for i, case in enumerate(cases):
        traced = None if case.model is None else trace_case(case)
        if traced is not None:
            reached = "traced"
            counts[reached] += 1
            try:
                model = jqonnx.export(traced[0], [traced[1]])
                onnx.checker.check_model(model, full_check=True)
                reached = "exported"
                counts[reached] += 1
                # Two libraries differ by the last digits of bfloat16.
                tolerance = 1e-2 if "bf16" in case.name else max(case.rtol, 1e-3)
                report = jqonnx.verify(model, traced[0], [(traced[1],)], tolerance=tolerance)
                reached = "run"
                counts[reached] += 1
                assert report.is_exact, str(report)
                counts["equal"] += 1
            except Exception as error:
                failures.append(f"{case.name} ({reached}): {' '.join(str(error).split())[:300]}")
        if i % 100 == 99:
            jax.clear_caches()
    return counts, failures


def main() -> None:
    """Run the cases and print the numbers."""
    words = [word for word in sys.argv[1:] if word != "--export"]
    cases = [case for case in collect_cases() if not words or any(word in case.name for word in words)]
    if "--export" in sys.argv:
        counts, failures = count_exports(cases)
        print(*failures, sep="\n")
        runtime = f"ONNX Runtime {onnxruntime.__version__}"
        print(f"{counts['exported']} of {counts['traced']} functions of the node tests of onnx {onnx.__version__} are")
        print(f"exported; {runtime} runs {counts['run']} of them, and {counts['equal']} as JAX computes them")
        return
    passed, failures = count_passed(cases, verbose=True)
    for text, _ in failures.most_common():
        print(text)
    print(f"{passed} of {len(cases)} node tests of onnx {onnx.__version__} pass")


if __name__ == "__main__":
    main()
