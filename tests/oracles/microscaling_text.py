"""Blocks of small floats as their producers quantize them: the OCP MX specification 1.0, and the packages' own rules.

Everything is computed in float64 and rounded to float32 where a producer works in float32. `ml_dtypes` decodes, and
rounds to the nearest code with ties to even.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

F32 = np.float32
FORMATS = {
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
LARGEST = {"float4_e2m1fn": 6.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
DIGITS = {"float4_e2m1fn": 1, "float8_e4m3fn": 3, "float8_e5m2": 2}


def choose_exponent(rule: str, amax: np.floating, name: str) -> int:
    """Return the exponent of the scale of a block with the largest magnitude `amax`, positive and finite."""
    emax = math.floor(math.log2(LARGEST[name]))
    digits, exponent = math.frexp(float(amax))
    digits, exponent = 2 * digits, exponent - 1  # amax = digits * 2**exponent, 1 <= digits < 2
    if rule == "floor":
        return exponent - emax
    if rule == "ceil":
        return exponent - emax + (digits > 1)
    if rule in ("even", "compressed_tensors"):
        # Half a step above the last number with that many digits, a tie goes up.
        count = DIGITS[name] if rule == "even" else 1
        return exponent - emax + (digits >= 2 - 2.0 ** -(count + 1))
    quotient = F32(F32(amax) / F32(LARGEST[name]))
    digits, exponent = math.frexp(float(quotient))
    digits, exponent = 2 * digits, exponent - 1
    return exponent + (digits > 1 if rule == "rceil" else digits * digits > 2)


def round_to_codes(values: np.ndarray, name: str, ties: str = "even") -> np.ndarray:
    """Return float32 values as bytes of the codes, saturating at the largest; -0 is kept."""
    clipped = np.clip(values.astype(F32), -F32(LARGEST[name]), F32(LARGEST[name]))
    if ties == "even":
        return clipped.astype(FORMATS[name]).view(np.uint8)
    levels = np.arange(8, dtype=np.uint8).view(FORMATS[name]).astype(np.float64)
    middles = (levels[1:] + levels[:-1]) / 2
    size = (np.abs(clipped[..., None].astype(np.float64)) > middles).sum(-1)
    return (size + 8 * np.signbit(clipped)).astype(np.uint8)


def quantize_block(block: np.ndarray, rule: str, name: str, ties: str = "even") -> tuple[int, np.ndarray]:
    """Return the exponent and the bytes of the codes of one block of float32; its range is not empty."""
    exponent = choose_exponent(rule, np.abs(block).max(), name)
    return exponent, round_to_codes(block * F32(2.0**-exponent), name, ties)


def draw_blocks(rng: np.random.Generator, count: int, size: int, name: str) -> np.ndarray:
    """Return float32 blocks with their largest magnitudes on the edges of all rules and one unit beside them."""
    blocks = rng.standard_normal((count, size)).astype(F32)
    blocks *= np.exp2(rng.integers(-20, 20, (count, 1))).astype(F32)
    edges = [
        1.0,
        1.25,
        1.5,
        1.75,
        1.875,
        1.9375,
        2.0,
        math.sqrt(2),
        LARGEST[name] / 2.0 ** math.floor(math.log2(LARGEST[name])),
    ]
    edges += [F32(math.sqrt(2)) * edges[-1] / 2]
    for block in blocks[: count // 2]:
        edge = F32(F32(rng.choice(np.asarray(edges, F32))) * F32(2.0 ** rng.integers(-20, 20)))
        edge = rng.choice([np.nextafter(edge, F32(0)), edge, np.nextafter(edge, F32(np.inf))])
        block[:] = np.clip(block, -edge, edge)
        block[rng.integers(size)] = edge * rng.choice([-1, 1])
    # Ties of E2M1 and their neighbors, below the largest value.
    for block in blocks[count // 2 :: 2]:
        middle = rng.choice(np.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32), size)
        unit = np.spacing(middle) * rng.integers(-1, 2, size).astype(F32)
        block[:] = (middle + unit) * rng.choice([-1, 1], size) * F32(2.0 ** rng.integers(-20, 20))
    return blocks.astype(F32)


def quantize_nvfp4(
    x: np.ndarray, rule: str, size: int = 16, reached: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.floating, np.ndarray]:
    """Return the codes and the block scales as bytes, the float32 for all blocks, and the divisors of the blocks.

    The float32 multiplies the block scales with ModelOpt's rule, and divides them with compressed-tensors' rule.

    x is finite, and its last dimension consists of whole blocks. Each operation is rounded to float32. The float32 for
    all blocks follows from the largest magnitude of x, or from `reached`.
    """
    e4m3 = ml_dtypes.float8_e4m3fn
    amax = np.abs(x.reshape(*x.shape[:-1], -1, size)).max(-1).astype(F32)
    largest = amax.max() if reached is None else F32(reached)
    if rule == "modelopt":
        shared = F32(largest / F32(2688))
        wide = (amax / F32(F32(6) * shared)).astype(F32)
        wide[wide == 0] = 1
        scale = np.clip(wide, F32(2.0**-9), F32(448)).astype(e4m3)
        divisor = (scale.astype(F32) * shared).astype(F32)
    else:
        shared = F32(F32(F32(1) / largest) * F32(2688))  # as torch divides a number by a tensor
        scale = np.clip((shared * (amax / F32(6)).astype(F32)).astype(F32), 0, F32(448)).astype(e4m3)
        scale[scale.astype(F32) == 0] = 0.125
        divisor = (scale.astype(F32) / shared).astype(F32)
    codes = round_to_codes((x / np.repeat(divisor, size, -1)).astype(F32), "float4_e2m1fn")
    return codes, scale.view(np.uint8), shared, divisor
