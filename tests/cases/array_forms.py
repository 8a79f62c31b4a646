"""Arrays with each of the forms, such as an offset, a nested scale, signed scales or a permutation.

Each comes with its values by the formula in numpy, (codes - zero_point) * scale + offset, with each operation rounded
to float32, or to another dtype where the array says so.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import QuantizedArray

F32 = np.float32
SHAPE = (6, 22)
NAMES = (
    "offset", "nested scale", "nested offset", "signed", "permutation", "block sizes", "real zero point",
    "inverse scale", "bfloat16", "float16", "inverse nested scale", "codebook", "all",
)  # fmt: skip
# Those that contractions of integers refuse.
WEIGHT_ONLY = ("permutation", "codebook", "all", "real zero point", "inverse scale", "bfloat16", "float16")


def repeat(part: Any, shape: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """Return a part with its entries repeated over blocks of the given sizes, the last of which may be short."""
    part = np.asarray(part, F32)
    for axis, (size, length) in enumerate(zip(sizes, shape, strict=True)):
        part = np.repeat(part, size, axis)[(*(slice(None),) * axis, slice(length))]
    return np.broadcast_to(part, shape)


def make_floats(rng: np.random.Generator, shape: tuple[int, ...], *, signed: bool = False) -> np.ndarray:
    """Return floats of many magnitudes; with `signed`, some are negative and some are 0."""
    values = rng.uniform(0.5, 1, shape) * 2.0 ** rng.integers(-12, 12, shape)
    if signed:
        values *= rng.choice((-1, 0, 1), shape)
    return values.astype(F32)


def make_array(name: str, rng: np.random.Generator) -> tuple[QuantizedArray, np.ndarray]:
    """Return an array with one of the forms, and the float32 values of the formula."""
    codes, sizes = rng.integers(0, 16, SHAPE).astype(np.uint8), (1, 4)
    blocks = (6, 6)  # the last block is short
    steps: np.ndarray = codes.astype(F32)
    scale: Any = make_floats(rng, blocks)
    wide = scale
    options: dict[str, Any] = {"block_size": 4}
    parts: dict[str, Any] = {}
    offset = np.zeros((1, 1), F32)
    if name == "codebook":
        options["codebook"], steps = jq.nf4, np.asarray(jq.nf4.levels, F32)[codes]
    if name in ("nested scale", "all"):
        inner = rng.integers(1, 64, blocks).astype(np.uint8)
        step = make_floats(rng, (6, 2)).astype(np.float16)
        scale, wide = QuantizedArray(inner, step, block_size=4), inner * repeat(step, blocks, (1, 4))
    if name == "signed":
        scale = wide = make_floats(rng, blocks, signed=True)
        options["signed_scale"] = True
    if name == "block sizes":
        sizes = (4, 5)
        scale = wide = make_floats(rng, (2, 5))
        options["block_size"] = (4, 5)
    if name in ("offset", "block sizes", "codebook"):
        offset = make_floats(rng, wide.shape, signed=True)
        parts["offset"] = offset.astype(F32)
    if name in ("nested offset", "all"):
        inner = rng.integers(0, 64, blocks).astype(np.uint8)
        step = make_floats(rng, (6, 1), signed=True).astype(np.float16)
        parts["offset"] = QuantizedArray(inner, step, signed_scale=True)
        offset = inner * step.astype(F32)
    if name == "inverse nested scale":
        inner, step = rng.integers(1, 64, blocks).astype(np.uint8), make_floats(rng, (1, 1))
        scale, wide = QuantizedArray(inner, step, inverse_scale=True), inner / step
    step_dtype = {"bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16)}.get(name, np.dtype(F32))
    options["arithmetic"], options["inverse_scale"] = step_dtype, name == "inverse scale"

    def finish(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return x.astype(step_dtype).astype(F32)

    if name in ("real zero point", "bfloat16", "float16"):
        zero_point = rng.uniform(-2, 17, (6, 1)).astype(np.float16 if name == "real zero point" else F32)
        if name == "bfloat16":
            offset, parts["offset"] = finish(zero_point), zero_point
        else:
            parts["zero_point"] = zero_point
            steps = finish(steps - finish(repeat(zero_point, SHAPE, (1, 22))))
    if name == "float16":
        scale = wide = (2.0 ** rng.integers(-8, 8, blocks) * rng.uniform(0.5, 1, blocks)).astype(F32)
    narrow = jnp.asarray(codes).astype(jnp.uint4 if name == "codebook" else jnp.uint8)
    wide = finish(repeat(wide, SHAPE, sizes))
    values = finish(steps / wide if options["inverse_scale"] else steps * wide)
    spread = (sizes if offset.shape[1] > 1 else (1, 22)) if offset.size > 1 else SHAPE
    values = finish(values + repeat(offset, SHAPE, spread))
    if name in ("permutation", "all"):
        parts["permutation"] = rng.permutation(SHAPE[1]).astype(np.int32)
        options["permuted_axis"] = -1
        values, grouped = np.empty_like(values), values
        values[:, parts["permutation"]] = grouped
    return QuantizedArray(narrow, scale, **parts, dtype=F32, **options), values


def check_values(actual: Any, expected: np.ndarray) -> None:
    """Check that two arrays have the same bits; a zero of either sign is the same, as products with 0 have any."""
    np.testing.assert_array_equal(np.asarray(actual), expected)
    assert actual.dtype == expected.dtype
