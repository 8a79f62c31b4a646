"""A check of all operators against numpy under different compiler flags, with a new process for each set of flags.

`python -m tests.compiler_flags` prints a table of `docs/measured/exactness.md`. XLA reads `XLA_FLAGS` only once, so
each row is measured in a subprocess with the flags of the row: `python -m tests.compiler_flags --measure`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from .oracles import array_text, contraction_text, onnx_text
from .support import inputs, transforms

FAST_MATH = "--xla_cpu_enable_fast_math=true"
STRICT = {name: f"--xla_cpu_fast_math_honor_{name}=true" for name in ("division", "nans", "infs", "functions")}
LOOSE = {name: flag.replace("true", "false") for name, flag in STRICT.items()}
HONEST = (FAST_MATH, STRICT["division"], STRICT["nans"], STRICT["infs"])  # flags that must not change a result

# The flags of each row.
FLAGS: tuple[tuple[str, ...], ...] = (
    (),
    HONEST,
    (*HONEST, LOOSE["functions"]),
    (FAST_MATH,),
    (FAST_MATH, LOOSE["division"]),
    (FAST_MATH, LOOSE["nans"]),
    (FAST_MATH, LOOSE["infs"]),
    (FAST_MATH, LOOSE["functions"]),
    (FAST_MATH, *LOOSE.values()),
    tuple(LOOSE.values()),
    ("--xla_cpu_enable_fast_min_max=true",),
    ("--xla_cpu_enable_fast_min_max=false",),
    ("--xla_allow_excess_precision=true",),
    ("--xla_allow_excess_precision=false",),
    ("--xla_disable_hlo_passes=algsimp",),
    ("--xla_disable_hlo_passes=simplify-fp-conversions",),
    ("--xla_disable_all_hlo_passes=true",),
    ("--xla_backend_optimization_level=0",),
    ("--xla_cpu_max_isa=AVX2",),
    ("--xla_backend_extra_options=xla_cpu_flatten_after_fusion",),
)  # fmt: skip
KINDS = ("numbers", "infinities", "NaN")
SHAPE = (32, 160)
Check = tuple[str, Callable[..., Any], tuple[Any, ...], Any]


def drawn_values(rng: np.random.Generator, scale: np.ndarray, point: np.ndarray, kind: str) -> np.ndarray:
    """Sample ties of int8 codes and numbers one ulp next to them, with infinities or NaN of both signs."""
    wide = onnx_text.expand(scale, SHAPE, 1, 0)
    x = inputs.near_ties(rng, wide, onnx_text.expand(point, SHAPE, 1, 0).astype(np.int64), (-128, 127), scale.dtype)
    x = np.where(np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) < 1e30), x, wide)
    special = {"numbers": np.nan, "infinities": np.inf, "NaN": np.nan}[kind]
    is_special = (rng.random(SHAPE) < 0.02) & (kind != "numbers")
    signed = np.where(rng.random(SHAPE) < 0.5, special, -special).astype(scale.dtype)
    return np.where(is_special, signed, x)


def list_checks(rng: np.random.Generator, kind: str) -> Iterator[Check]:
    """Yield the name of each operator, the operator, its arguments, and numpy's result."""
    scale, point = inputs.scales(rng, (160,), np.dtype(np.float32)), inputs.zero_points(rng, (160,), "int8")
    x = drawn_values(rng, scale, point, kind)
    codes = onnx_text.quantize_linear(x, scale, point, "int8")
    yield "quantize_linear", jq.quantize_linear, (x, scale, point), codes
    first_scale, first_point = scale[0], point[0]
    values = drawn_values(rng, scale[:1], point[:1], kind)
    yield (
        "quantize_linear",
        jq.quantize_linear,
        (values, first_scale, first_point),
        onnx_text.quantize_linear(values, first_scale, first_point, "int8"),
    )
    floats = onnx_text.quantize_linear(x, scale, None, "float8_e4m3fn")
    to_float8 = lambda x, s: jq.quantize_linear(x, s, output_dtype=jnp.float8_e4m3fn)  # noqa: E731
    yield "quantize_linear float8", to_float8, (x, scale), floats
    fake = onnx_text.dequantize_linear(codes, scale, point)
    yield "fake_quantize_linear", jq.fake_quantize_linear, (x, scale, point), fake
    multiplied = lambda x, s, z: jq.onednn.quantize(x, s, z, qtype="per_channel", dtype="int8")  # noqa: E731
    steps = point.astype(np.int32)
    yield "onednn.quantize", multiplied, (x, scale, steps), onnx_text.onednn_quantize(x, scale, steps, "int8", axis=1)
    yield from list_half_precision_checks(rng, kind)
    for rows in (1, 32):  # XLA reduces 4096 elements and more differently
        part = np.ascontiguousarray(x[:rows])
        y, step, start = onnx_text.dynamic_quantize_linear(part)
        want = y.astype(np.uint8), np.float32(step), np.uint8(start)
        yield "dynamic_quantize_linear", lambda x: tuple(jq.dynamic_quantize_linear(x)), (part,), want
    for dtype in ("int8", "uint8"):
        yield ("quantize", *check_of_spec(x, dtype))
    if kind == "numbers":
        yield from list_contraction_checks(rng)


def list_half_precision_checks(rng: np.random.Generator, kind: str) -> Iterator[Check]:
    """Yield checks of 16-bit floats, which are divided and multiplied in 16 bits."""
    for name in ("float16", "bfloat16"):
        dtype = onnx_text.dtype(name)
        scale, point = inputs.scales(rng, (160,), dtype), inputs.zero_points(rng, (160,), "int8")
        x = drawn_values(rng, scale, point, kind)
        codes = onnx_text.quantize_linear(x, scale, point, "int8")
        yield f"quantize_linear {name}", jq.quantize_linear, (x, scale, point), codes
        fake = onnx_text.dequantize_linear(codes, scale, point)
        wide = lambda x, s, z: jq.dequantize_linear(x, s, z).astype(jnp.float32)  # noqa: E731
        yield f"dequantize_linear {name}", wide, (codes, scale, point), fake.astype(np.float32)


def check_of_spec(x: np.ndarray, dtype: str) -> tuple[Callable[..., Any], tuple[np.ndarray, ...], Any]:
    """Return a check of `quantize` with one scale per row."""
    spec = jq.QuantSpec(dtype, jq.PerAxis(0))
    with np.errstate(all="ignore"):
        low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
        symmetric, narrow = bool(spec.symmetric), bool(spec.narrow_range)
        scale, point = array_text.parameters(low, high, dtype, symmetric, narrow)
        wide = np.broadcast_to(scale, x.shape)
        points = None if point is None else np.broadcast_to(point, x.shape)
        codes = array_text.codes(x, wide, points, dtype, narrow)

    def quantized(x: Any) -> Any:
        q = jq.quantize(x, spec)
        return q.codes, q.scale, q.zero_point

    return quantized, (x,), (codes, scale, None if point is None else point.astype(dtype))


def list_contraction_checks(rng: np.random.Generator) -> Iterator[Check]:
    """Yield checks of the contractions, one for each form of their programs."""
    a, b = rng.integers(0, 256, (16, 24)).astype(np.uint8), rng.integers(-128, 128, (24, 40)).astype(np.int8)
    a_scale, b_scale = inputs.scales(rng, (16,), np.dtype(np.float32)), inputs.scales(rng, (40,), np.dtype(np.float32))
    left, right = np.uint8(131), np.int8(-3)
    exact = contraction_text.matmul_integer(a, b, left, right)
    yield "matmul_integer", jq.matmul_integer, (a, b, left, right), exact
    bias = rng.normal(size=40).astype(np.float32)
    operands = (a, b, a_scale, b_scale, left, right, bias)
    want = contraction_text.matmul_integer_to_float(*operands)
    yield "matmul_integer_to_float", jq.ops.matmul_integer_to_float, operands, want
    requantized = (a, a_scale[0], left, b, b_scale, np.zeros(40, np.int8) + right, np.float32(90), np.uint8(7))
    yield "qlinear_matmul", jq.qlinear_matmul, requantized, contraction_text.qlinear_matmul(*requantized)
    blocks = jq.QuantSpec("int4", jq.Blocked(0, 8))
    w = jq.quantize(rng.normal(size=(24, 40)).astype(np.float32), blocks)
    q = jq.quantize(bias[:24], jq.QuantSpec("int8"))
    codes, scales = np.asarray(w.codes).astype(np.int64), np.asarray(w.scale)
    row, parts = np.asarray(q.codes).astype(np.int64), None
    for i in range(3):
        run = slice(8 * i, 8 * i + 8)
        part = (row[run] @ codes[run]).astype(np.float32) * (np.asarray(q.scale) * scales[i])
        parts = part if parts is None else parts + part
    yield "matmul", lambda values, scale: jq.matmul(q, w.replace(codes=values, scale=scale)), (w.codes, scales), parts


def count_mismatches(seed: int) -> dict[str, dict[str, int]]:
    """Return the number of elements that differ from numpy's, by kind of input and by operator."""
    counts_by_kind: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        counts = counts_by_kind.setdefault(kind, {})
        for name, op, args, expected in list_checks(np.random.default_rng([seed, KINDS.index(kind)]), kind):
            fixed = lambda x, op=op, rest=args[1:]: op(x, *rest)  # noqa: E731
            for actual in (op(*args), jax.jit(fixed)(args[0])):  # also with constant scales
                wrong = transforms.mismatches(actual, expected)
                counts[name] = counts.get(name, 0) + wrong
    return {kind: {name: n for name, n in counts.items() if n} for kind, counts in counts_by_kind.items()}


def measure(flags: tuple[str, ...], seed: int) -> dict[str, dict[str, int]] | str:
    """Return the counts of a process with these flags, or its error."""
    variables = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "tests.compiler_flags", "--measure", "--seed", str(seed)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if "Error" in line or "error" in line]
        return f"fails: {errors[-1][:200] if errors else ran.returncode}"
    return json.loads(ran.stdout)


def main() -> None:
    """Print the table, or with --measure the counts for the flags of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(count_mismatches(options.seed)))
        return
    print(f"jax {jax.__version__}, seed {options.seed}\n\n| XLA_FLAGS | {' | '.join(KINDS)} |\n|---|---|---|---|")
    for flags in FLAGS:
        counts = measure(flags, options.seed)
        cells = [counts] if isinstance(counts, str) else [describe_counts(counts[kind]) for kind in KINDS]
        print(f"| {' '.join(f'`{flag}`' for flag in flags) or 'none'} | {' | '.join(cells)} |", flush=True)


def describe_counts(counts: dict[str, int]) -> str:
    """Return the text of one cell."""
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "0"


if __name__ == "__main__":
    main()
