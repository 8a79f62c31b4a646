"""Convolutions that contract patches of the image: their integers against numpy, and the form of their programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import contraction_text
from ..support.hlo import Program

LAST = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NHWDC", "HWDIO", "NHWDC")}
# Kernels with dimensions of 1 in every place, strides and dilations that differ, and more elements than are sliced.
KERNELS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "5": ((5,), (2,), (1,)),
    "3x3": ((3, 3), (1, 1), (1, 1)),
    "3x3, strides": ((3, 3), (2, 1), (1, 2)),
    "1x4": ((1, 4), (2, 2), (1, 1)),
    "4x1": ((4, 1), (1, 2), (2, 1)),
    "1x1, strides": ((1, 1), (2, 3), (1, 1)),
    "2x1x3": ((2, 1, 3), (1, 2, 1), (2, 1, 1)),
    "9x8": ((9, 8), (1, 2), (1, 1)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize("groups", [1, 2])
def test_integers_are_those_of_numpy(name: str, groups: int, rng: np.random.Generator) -> None:
    kernel, strides, dilations = KERNELS[name]
    rank = len(kernel)
    spatial = tuple(int(n) for n in rng.integers(1, 4, rank) + (np.array(kernel) - 1) * dilations + 1)
    x = rng.integers(0, 256, (2, 4, *spatial)).astype(np.uint8)
    w = rng.integers(-128, 128, (6, 4 // groups, *kernel)).astype(np.int8)
    x_point, w_point = np.uint8(rng.integers(0, 256)), rng.integers(-128, 128, 6).astype(np.int8)
    pads = tuple(int(n) for n in rng.integers(0, 2, 2 * rank))
    want = contraction_text.conv_integer(
        x, w, x_point, w_point, strides=strides, pads=pads, dilations=dilations, group=groups
    )
    padding = tuple(zip(pads[:rank], pads[rank:], strict=True))
    options: dict[str, Any] = {"rhs_dilation": dilations, "feature_group_count": groups}

    def first(x: jax.Array, w: jax.Array) -> jax.Array:
        return jq.integer.conv_general_dilated(
            x, w, strides, padding, **options, lhs_zero_point=x_point, rhs_zero_point=w_point
        )

    def last(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jnp.moveaxis(x, 1, -1), jnp.moveaxis(w, (0, 1), (-1, -2))
        y = jq.integer.conv_general_dilated(
            x, w, strides, padding, **options, dimension_numbers=LAST[rank], lhs_zero_point=x_point,
            rhs_zero_point=w_point,
        )  # fmt: skip
        return jnp.moveaxis(y, -1, 1)

    for convolve in (first, last):
        np.testing.assert_array_equal(convolve(jnp.asarray(x), jnp.asarray(w)), want)
    images, kernels = jnp.stack([x, x ^ 255]), jnp.stack([w, w])
    results = jax.jit(jax.vmap(last))(images, kernels)
    np.testing.assert_array_equal(results[0], want)
    np.testing.assert_array_equal(results[1], last(images[1], kernels[1]))


@pytest.mark.slow
def test_patches_are_stacked_in_two_steps_and_the_kernel_is_not_copied() -> None:
    """A stack of 9 slices would be a loop for each of them, and a kernel in HWIO layout needs no transpose."""
    x = jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.uint8)
    w = jax.ShapeDtypeStruct((3, 3, 3, 16), jnp.int8)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jq.integer.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=LAST[2], lhs_zero_point=jnp.uint8(3)
        )

    program = Program(convolve, x, w)
    arrays = [array for i in program.in_memory() for array in i.results]
    assert ("s8", (16, 27)) not in arrays
    assert ("s8", (16, 3, 3, 3)) not in arrays
    stacks = [i for body in program.computations.values() for i in body if i.opcode == "concatenate"]
    assert all(len(i.rest.split(")")[0].split("%")) - 1 <= 3 for i in stacks)
    assert len(stacks) == 2


@pytest.mark.slow
def test_few_pixels_of_many_features(rng: np.random.Generator) -> None:
    """The patches are contracted with OIHW weights as they are."""
    x = rng.integers(0, 256, (1, 20, 5, 6)).astype(np.uint8)
    w = rng.integers(-128, 128, (48, 20, 2, 3)).astype(np.int8)
    x_point, w_point = np.uint8(rng.integers(0, 256)), rng.integers(-128, 128, 48).astype(np.int8)
    options: dict[str, Any] = {"strides": (2, 1), "dilations": (1, 2), "pads": (1, 0, 0, 1)}

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jq.conv_integer(x, w, x_point, w_point, **options)

    want = contraction_text.conv_integer(x, w, x_point, w_point, **options)
    assert want[0, 0].size * 4 <= 48
    np.testing.assert_array_equal(jax.jit(convolve)(x, w), want)
    images, kernels = jnp.stack([x, x ^ 255]), jnp.stack([w, w[::-1]])
    over_images = jax.jit(jax.vmap(convolve, (0, None)))(images, w)
    np.testing.assert_array_equal(over_images[0], want)
    np.testing.assert_array_equal(over_images[1], convolve(images[1], jnp.asarray(w)))
    both = jax.jit(jax.vmap(convolve))(images, kernels)
    np.testing.assert_array_equal(both[1], convolve(images[1], kernels[1]))
    program = Program(convolve, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w)))
    arrays = [array for i in program.in_memory() for array in i.results if i.opcode not in ("parameter", "bitcast")]
    assert not any(dtype == "s8" and np.prod(shape) == w.size for dtype, shape in arrays)
