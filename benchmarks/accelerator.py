"""Speed on a GPU or a TPU, beside the rates of the device measured in the same run: `python -m benchmarks.accelerator`.

A program multiplies a few rows with each of several square weights in turn, as the layers of a decoder do. The weights
of each program are larger than the caches. At few rows the bytes of the weights bound the time, and at many rows the
number of multiplications. So the table gives, for each recipe of `jq.recipes`, the microseconds of one product, the
weights in GB/s and the operations in TFLOP/s (a multiplication and an addition are two), and the time relative to
bfloat16's. The limit is the time of reading the weights at the rate at which a copy reads and writes, or of the
operations at the rate of a large product of bfloat16, int8 or float8, whichever is longer; both rates are measured
first. The second table gives functions of single elements, in bytes read and written per second beside a copy.

The first product of each recipe is compared with the same product on the CPU. The column counts the elements that
have another value, and gives the largest difference as a part of the largest element: 0 is expected of integers, while
float sums are added in another order, and on a CPU weights are rounded to bfloat16. The exit status is 1 if the results
of an integer recipe differ, or those of another by more than 1 % of the largest.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

_INTEGER = ("w8a8_dynamic", "w4a8")
_FLOAT8 = ("fp8_dynamic", "mxfp8")
_REPEATS = 5


def list_recipes() -> dict[str, Sequence[jq.Rule] | None]:
    """Return the rules by name; None multiplies floats."""
    return {
        "bfloat16": None,
        "float32": None,
        "weight_only_int8": jq.recipes.weight_only_int8(),
        "weight_only_int4": jq.recipes.weight_only_int4(),
        "weight_only_fp8": jq.recipes.weight_only_fp8(),
        "gguf Q4_0": jq.recipes.gguf("Q4_0"),
        "gguf Q4_K": jq.recipes.gguf("Q4_K"),
        "gguf Q6_K": jq.recipes.gguf("Q6_K"),
        "w8a8_dynamic": jq.recipes.w8a8_dynamic(),
        "w4a8": jq.recipes.w4a8(),
        "fp8_dynamic": jq.recipes.fp8_dynamic(),
        "mxfp8": jq.recipes.mxfp8(),
        "nvfp4": jq.recipes.nvfp4(),
    }


def multiply_layers(params: Any, x: jax.Array) -> jax.Array:
    """Return a few rows multiplied with each weight in turn."""
    for w in params:
        x = jax.nn.standardize(x @ w).astype(x.dtype)
    return x


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
    print(f"{options.layers} products of [rows, {options.width}] with [{options.width}, {options.width}]\n")
    wrong: list[str] = []
    if not options.no_products:
        _measure_products(options, wrong)
    if not options.no_elements:
        _measure_elements(options.elements)
    print("wrong: " + "; ".join(wrong) if wrong else "results agree with the CPU's")
    return 1 if wrong else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.accelerator", description=__doc__)
    parser.add_argument("--width", type=int, default=8192, metavar="N", help="rows and columns of a weight")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="number of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128, 2048], metavar="N")
    parser.add_argument("--elements", type=int, default=2**28, metavar="N", help="of the second table")
    parser.add_argument("--only", nargs="+", default=[], metavar="RECIPE", help="names of the first column")
    parser.add_argument("--hlo", type=pathlib.Path, metavar="FOLDER", help="writes the compiled programs there")
    parser.add_argument("--no-products", action="store_true", help="only the second table")
    parser.add_argument("--no-elements", action="store_true", help="only the first table")
    return parser.parse_args(arguments)


def _measure_products(options: argparse.Namespace, wrong: list[str]) -> None:
    width, keys = options.width, jax.random.split(jax.random.key(0), options.layers + 1)
    baseline: dict[int, float] = {}
    rates = _measure_rates(width)
    print("; ".join([f"a copy: {rates['copy'] / 1e9:.0f} GB/s", *(
        f"products of {name}: {rate / 1e12:.1f} TFLOP/s" for name, rate in rates.items() if name != "copy"
    )]) + "\n")  # fmt: skip
    head = ["recipe", "rows", "us", "GB/s", "TFLOP/s", "limit us", "of bfloat16's time", "differ from CPU", "compile s"]
    _print_line(head)
    _print_line(["---", *["--:"] * (len(head) - 1)])
    for name, rules in list_recipes().items():
        if options.only and name not in (*options.only, "bfloat16"):
            continue
        dtype = jnp.float32 if name == "float32" else jnp.bfloat16
        params = [jax.random.normal(key, (width, width), dtype) * dtype(width**-0.5) for key in keys[1:]]
        differ = "-"
        for rows in options.rows:
            x = jax.random.normal(keys[0], (rows, width), dtype)
            try:
                if rules is not None and rows == options.rows[0]:
                    differ = _compare_first(name, rules, params, x, wrong)
                line = _measure_recipe(name, rules, params, x, options, baseline, rates, differ)
            except Exception as error:
                wrong.append(f"{name} at {rows} rows: {type(error).__name__}")
                line = [name, rows, f"{type(error).__name__}: {str(error)[:300]}"]
            _print_line(line)
        del params


def _measure_recipe(
    name: str, rules: Sequence[jq.Rule] | None, params: list[jax.Array], x: jax.Array, options: argparse.Namespace,
    baseline: dict[int, float], rates: dict[str, float], differ: str,
) -> list[Any]:  # fmt: skip
    """Return the line of one recipe and one number of rows."""
    rows, width = x.shape
    q: Any = params
    function: Callable[..., jax.Array] = multiply_layers
    if rules is not None:
        prepared = jq.prepare(multiply_layers, params, x, rules=rules)
        q, function = jax.jit(prepared.convert)(params), prepared.apply
    began = time.perf_counter()
    compiled = jax.jit(function).lower(q, x).compile()
    took = time.perf_counter() - began
    if options.hlo:
        options.hlo.mkdir(parents=True, exist_ok=True)
        (options.hlo / f"{name.replace(' ', '_')}_{rows}.txt").write_text(compiled.as_text())
    seconds = measure(lambda: compiled(q, x)) / options.layers
    if name == "bfloat16":
        baseline[rows] = seconds
    size = sum(leaf.nbytes for leaf in _list_stored(q)) / options.layers
    operations = 2 * rows * width**2
    kind = "int8" if name in _INTEGER else "float8" if name in _FLOAT8 else "bfloat16"
    limit = max(size / rates["copy"], operations / rates[kind])
    ratio = f"{seconds / baseline[rows]:.2f}" if rows in baseline else "-"
    found = [f"{size / seconds / 1e9:.0f}", f"{operations / seconds / 1e12:.1f}", f"{limit * 1e6:.1f}"]
    return [name, rows, f"{seconds * 1e6:.1f}", *found, ratio, differ, f"{took:.1f}"]


def _measure_rates(width: int) -> dict[str, float]:
    """Return the bytes per second that a copy reads and writes, and the operations per second of large products."""
    x = jax.random.normal(jax.random.key(2), (4 * width, width), jnp.float32)
    copy = jax.jit(lambda x: -x)
    rates = {"copy": 2 * x.nbytes / measure(lambda: copy(x))}
    for name, dtype in (("bfloat16", jnp.bfloat16), ("int8", jnp.int8), ("float8", jnp.float8_e4m3fn)):
        a = x[:width].astype(dtype)
        out = jnp.int32 if dtype == jnp.int8 else jnp.float32
        multiply = jax.jit(functools.partial(jnp.matmul, preferred_element_type=out))
        rates[name] = 2 * width**3 / measure(lambda: multiply(a, a))  # noqa: B023
    return rates


def _list_stored(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, jq.QuantizedArray))


def _compare_first(name: str, rules: Sequence[jq.Rule], params: list[jax.Array], x: jax.Array, wrong: list[str]) -> str:
    """Return how many elements of the first product differ from the CPU's, and by how much of the largest."""
    params, x = [params[0][:, :512]], jnp.tile(x[:1], (8, 1))

    def multiply(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return x @ params[0]

    prepared = jq.prepare(multiply, params, x, rules=rules)
    found: list[np.ndarray] = []
    codes: list[list[np.ndarray]] = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        there = jax.device_put((params, x), device)
        q = jax.jit(prepared.convert)(there[0])
        codes.append([np.asarray(leaf) for leaf in jax.tree.leaves(q)])
        found.append(np.asarray(jax.jit(prepared.apply)(q, there[1])).astype(np.float32))
    parts = sum(int((one.view(np.uint8) != other.view(np.uint8)).sum()) for one, other in zip(*codes, strict=True))
    if parts:
        wrong.append(f"{name}: {parts} bytes of the converted weights")
    different = int((found[0] != found[1]).sum())
    error = float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max())
    if different if name in _INTEGER else error > 0.01:
        wrong.append(f"{name}: {different} of {found[0].size} results, by {error:.1e} of the largest")
    return f"{different} ({error:.0e})"


def _measure_elements(count: int) -> None:
    x = jax.random.normal(jax.random.key(0), (count // 4096, 4096), jnp.float32)
    codes = jax.random.randint(jax.random.key(1), x.shape, -128, 128, jnp.int8)
    scale, zero = jnp.float32(0.05), jnp.int8(3)
    rows = jnp.full((x.shape[0],), 0.05, jnp.float32)
    spec = jq.QuantSpec("int8", jq.PerAxis(0))
    blocks = jq.QuantSpec("int4", jq.Blocked(1, 32))
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
        "copy": (lambda x: -x, (x,), 8),
        "quantize_linear": (jq.quantize_linear, (x, scale, zero), 5),
        "quantize_linear, scale of each row": (lambda x, s: jq.quantize_linear(x, s, axis=0), (x, rows), 5),
        "dynamic_quantize_linear": (jq.dynamic_quantize_linear, (x,), 9),
        "quantize, int8 of each row": (lambda x: jq.quantize(x, spec), (x,), 5),
        "quantize, int4 in blocks of 32": (lambda x: jq.quantize(x, blocks), (x,), 4.625),
        "fake_quantize, int8 of each row": (lambda x: jq.fake_quantize(x, spec), (x,), 8),
        "dequantize_linear": (jq.dequantize_linear, (codes, scale, zero), 5),
    }
    print()
    _print_line(["function", "ms", "GB/s", "of the copy's rate"])
    _print_line(["---", *["--:"] * 3])
    copy = 0.0
    for name, (function, arguments, size) in functions.items():
        compiled = jax.jit(function)
        seconds = measure(lambda: compiled(*arguments))  # noqa: B023
        rate = size * x.size / seconds
        copy = copy or rate
        _print_line([name, f"{seconds * 1e3:.2f}", f"{rate / 1e9:.0f}", f"{rate / copy:.2f}"])


def measure(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call, of ten calls that are waited for together."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for _ in range(9):
            call()
        jax.block_until_ready(call())
        samples.append((time.perf_counter() - began) / 10)
    return statistics.median(samples)


def _print_line(cells: Sequence[Any]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
