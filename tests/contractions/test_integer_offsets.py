"""Products of codes with offsets, nested and signed scales, and blocks on both sides, as llama.cpp multiplies them.

The oracle sums the codes of each block in int64, and scales the sums twice: in float64, and in float32 in the order
and with the roundings that dot_general documents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import QuantizedArray

from ..support.hlo import Program

F32 = np.float32
MATRIX = (((1,), (0,)), ((), ()))
LAST = (((1,), (1,)), ((), ()))
U8, I8, U4, I4, U2, I2 = "uint8", "int8", "uint4", "int4", "uint2", "int2"


@dataclasses.dataclass(frozen=True)
class Form:
    """An operand: its shape, the dtype of its codes, and the shapes of its parts, None for those that it lacks."""

    shape: tuple[int, ...]
    dtype: str
    scale: tuple[int, ...]
    point: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    inner: tuple[int, ...] | None = None
    block: Any = None
    signed: bool = False
    packed: bool = False
    order: tuple[int, ...] | None = None

    def draw(self, rng: np.random.Generator) -> QuantizedArray:
        """Draw codes of all values, often extreme ones, odd zero points, and parts of several magnitudes."""
        is_narrow = self.dtype in ("int5", "int6")
        carrier = np.int8 if self.dtype.startswith("i") else np.uint8
        bits = int(self.dtype.removeprefix("u").removeprefix("int"))
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if carrier == np.int8 else (0, 2**bits - 1)
        codes = rng.integers(low, high + 1, self.shape)
        codes = np.where(rng.random(self.shape) < 0.4, rng.choice([low, high], self.shape), codes)
        # Some rows hold extreme codes only.
        codes = np.where(rng.random((*self.shape[:-1], 1)) < 0.2, rng.choice([low, high]), codes)
        narrow: Any = jnp.asarray(codes.astype(carrier))
        narrow = narrow if is_narrow else narrow.astype(self.dtype)
        point = None
        if self.point is not None:
            point = jnp.asarray((rng.integers(low, high + 1, self.point) | 1).astype(carrier)).astype(narrow.dtype)
        scale, offset = self._draw_part(rng, self.scale, self.signed), None
        if self.offset is not None:
            offset = self._draw_part(rng, self.offset, True)
        q = QuantizedArray(
            narrow, scale, point, offset, dtype=F32, block_size=self.block, signed_scale=self.signed,
            stored_order=self.order,
        )  # fmt: skip
        if not self.packed:
            return q
        return q.pack(self.dtype if is_narrow else None)

    def _draw_part(self, rng: np.random.Generator, shape: tuple[int, ...], signed: bool) -> Any:
        if self.inner is None:
            return jnp.asarray(draw_floats(rng, shape, signed))
        codes = rng.integers(0 if signed else 1, 64, shape).astype(np.uint8)
        step = draw_floats(rng, self.inner, signed).astype(np.float16)
        return QuantizedArray(jnp.asarray(codes), jnp.asarray(step), signed_scale=signed)


def draw_floats(rng: np.random.Generator, shape: tuple[int, ...], signed: bool) -> np.ndarray:
    values = rng.uniform(0.5, 1, shape) * 2.0 ** rng.integers(-6, 6, shape)
    return (values * (rng.choice([-1, 0, 1, 1], shape) if signed else 1)).astype(F32)


Case = tuple[Form, Form, Any, int | None]
X32, X100 = Form((5, 96), I8, (5, 3)), Form((5, 100), I8, (5, 4), block=32)
Q4_1 = Form((96, 7), U4, (3, 7), offset=(3, 7))
Q4_K = Form((7, 256), U4, (7, 8), offset=(7, 8), inner=(7, 2))
CASES: dict[str, Case] = {
    "Q8_0 by Q4_1": (X32, Q4_1, MATRIX, 32),
    "stored last": (X32, Form((7, 96), U4, (7, 3), offset=(7, 3)), LAST, 32),
    "short last block": (X100, Form((100, 7), U4, (4, 7), offset=(4, 7), block=32), MATRIX, 32),
    "zero points by offsets": (Form((5, 96), U8, (5, 3), point=(5, 3)), Q4_1, MATRIX, 32),
    "rows by offsets": (Form((5, 96), U8, (5, 1), point=(5, 1)), Q4_1, MATRIX, 32),
    "tensor by columns": (
        Form((5, 96), U8, (1, 1), point=(1, 1)), Form((96, 7), I4, (1, 7), offset=(1, 7)), MATRIX, None,
    ),
    "tensor by tensor": (Form((5, 96), I8, (1, 1)), Form((96, 7), U8, (1, 1), offset=(1, 1)), MATRIX, None),
    "offset of lhs": (Form((5, 96), U8, (5, 3), offset=(5, 3)), Form((96, 7), I8, (3, 7)), MATRIX, 32),
    "offset of lhs, zero points": (
        Form((5, 96), U8, (5, 1), offset=(5, 1)), Form((96, 7), U8, (1, 7), point=(1, 7)), MATRIX, None,
    ),
    "both offsets": (Form((5, 96), U8, (5, 1), offset=(5, 1)), Form((96, 7), I8, (1, 7), offset=(1, 7)), MATRIX, None),
    "both offsets, blocks": (Form((5, 100), U8, (5, 4), offset=(5, 4), block=32),
                             Form((100, 7), U4, (4, 7), offset=(4, 7), block=32), MATRIX, 32),
    "blocks of offsets alone": (Form((5, 96), I8, (1, 1)), Form((96, 7), U8, (1, 7), offset=(3, 7)), MATRIX, 32),
    "shorter blocks of lhs": (Form((5, 96), I8, (5, 6)), Q4_1, MATRIX, 16),
    "Q8_0 by Q4_K": (Form((5, 256), I8, (5, 8)), Q4_K, LAST, 32),
    "Q8_0 by Q6_K": (
        Form((5, 256), I8, (5, 8)), Form((256, 7), "int6", (16, 7), inner=(2, 7), signed=True), MATRIX, 16,
    ),
    "one row": (Form((1, 256), I8, (1, 8)), Q4_K, LAST, 32),
    "one row, stored first": (Form((1, 96), I8, (1, 3)), Q4_1, MATRIX, 32),
    "one column": (X32, Form((96, 1), U4, (3, 1), offset=(3, 1)), MATRIX, 32),
    "stored order": (X32, Form((96, 7), U4, (3, 7), offset=(3, 7), order=(-1, -2)), MATRIX, 32),
    "stored order, sizes by axis": (
        X32, Form((96, 10), U8, (3, 3), offset=(3, 1), block=(32, 4), order=(-1, -2)), MATRIX, 32,
    ),
    "signed": (X32, Form((96, 7), I4, (3, 7), signed=True), MATRIX, 32),
    "packed 5 bits": (X100, Form((100, 7), "int5", (4, 7), offset=(4, 7), block=32, packed=True), MATRIX, 32),
    "packed 4 bits, last": (X100, Form((7, 100), U4, (7, 4), offset=(7, 4), block=32, packed=True), LAST, 32),
    "2 bits": (Form((5, 96), I2, (5, 3)), Form((96, 7), U2, (3, 7), offset=(3, 7)), MATRIX, 32),
    "batch, two contracted": (
        Form((2, 64, 3, 5), U8, (2, 4, 1, 5), offset=(1, 4, 1, 1)),
        Form((3, 2, 64, 6), I8, (1, 2, 2, 6), offset=(1, 2, 4, 1)), (((1, 2), (2, 0)), ((0,), (1,))), 16,
    ),
    "nothing free": (Form((96,), I8, (3,)), Form((96,), U4, (3,), offset=(3,)), (((0,), (0,)), ((), ())), 32),
    "nothing contracted": (Form((5, 0), I8, (5, 0)), Form((0, 7), U4, (0, 7), offset=(0, 7)), MATRIX, None),
}  # fmt: skip


def expand(part: Any, form: Form) -> np.ndarray:
    """Return a part in float32 with an entry for each code."""
    if isinstance(part, QuantizedArray):
        codes = np.asarray(part.codes).astype(F32)
        step = np.asarray(part.scale).astype(F32)
        part = codes * np.repeat(
            np.repeat(step, codes.shape[0] // step.shape[0], 0), codes.shape[1] // step.shape[1], 1
        )
    part = np.asarray(part).astype(F32)
    blocks = form.block if isinstance(form.block, tuple) else (form.block,) * len(form.shape)
    for axis, (n, size) in enumerate(zip(form.shape, blocks, strict=True)):
        entries = part.shape[axis]
        run = n if entries == 1 else 1 if entries == n else size or n // entries
        part = np.take(part, np.arange(n) // max(run, 1), axis)
    return part


def multiply(lhs: QuantizedArray, rhs: QuantizedArray, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the product with the documented roundings, the product in float64, and the sum of its magnitudes."""
    *forms, ((left, right), (batch_l, batch_r)), length = case
    sides = []
    for q, form, contracted, batch in ((lhs, forms[0], left, batch_l), (rhs, forms[1], right, batch_r)):
        codes = np.asarray(q.codes).astype(np.int64)
        if q.zero_point is not None:
            codes = codes - expand(np.asarray(q.zero_point).astype(np.int64), form).astype(np.int64)
        free = [axis for axis in range(q.ndim) if axis not in (*contracted, *batch)]
        offset = np.zeros(q.shape, F32) if q.offset is None else expand(q.offset, form)
        order = (*batch, *free, *contracted)
        moved = (part.transpose(order) for part in (codes, expand(q.scale, form), offset))
        rows = int(np.prod([form.shape[axis] for axis in free]))
        first, *others = (form.shape[axis] for axis in contracted)
        batches = int(np.prod([form.shape[axis] for axis in batch]))
        sides.append([part.reshape(batches, rows, first, int(np.prod(others))) for part in moved])
    shape = [forms[0].shape[axis] for axis in batch_l]
    for form, axes in ((forms[0], (*left, *batch_l)), (forms[1], (*right, *batch_r))):
        shape += [n for axis, n in enumerate(form.shape) if axis not in axes]
    depth, rest = sides[0][0].shape[2:]
    total = wide = magnitude = np.zeros((sides[0][0].shape[0], sides[0][0].shape[1], sides[1][0].shape[1]))
    total = total.astype(F32)
    for start in range(0, depth, length or depth or 1):
        run = slice(start, start + (length or depth))
        (a, s, p), (b, t, q) = ([part[:, :, run] for part in side] for side in sides)
        terms = a.shape[2] * rest
        acc = np.einsum("bikl,bjkl->bij", a, b)
        s, p = (part[:, :, 0, :1] for part in (s, p))
        t, q = (part[:, :, 0, :1].transpose(0, 2, 1) for part in (t, q))
        a_sum, b_sum = a.sum((2, 3))[:, :, None], b.sum((2, 3))[:, None]
        y = acc.astype(F32) * (s * t)
        if rhs.offset is not None:
            u = a_sum.astype(F32) * s
            y = y + (u + p * F32(terms) if lhs.offset is not None else u) * q
        if lhs.offset is not None:
            y = y + p * (b_sum.astype(F32) * t)
        total = total + y
        s, p, t, q = (part.astype(np.float64) for part in (s, p, t, q))
        parts = (acc * s * t, a_sum * s * q, b_sum * t * p, terms * p * q)
        wide = wide + sum(parts)
        magnitude = magnitude + sum(np.abs(part) for part in parts)
    return total.reshape(shape), wide.reshape(shape), magnitude.reshape(shape)


def draw(name: str, rng: np.random.Generator) -> tuple[QuantizedArray, QuantizedArray, Callable[..., Any]]:
    case = CASES[name]
    dot = functools.partial(jq.dot_general, dimension_numbers=case[2])
    return case[0].draw(rng), case[1].draw(rng), dot


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_exact_sums_of_blocks(name: str, rng: np.random.Generator) -> None:
    lhs, rhs, dot = draw(name, rng)
    rounded, wide, magnitude = multiply(lhs, rhs, CASES[name])
    for y in (dot(lhs, rhs), jax.jit(dot)(lhs, rhs), jax.jit(lambda: dot(lhs, rhs))()):
        np.testing.assert_array_equal(y, rounded)
        assert (np.abs(np.asarray(y, np.float64) - wide) <= magnitude * 2.0**-20).all()
    # The sums are those of the dequantized arrays.
    floats = dot(lhs, rhs.dequantize())
    assert (np.abs(np.asarray(floats, np.float64) - wide) <= 1e-4 * max(magnitude.max(initial=0), 1)).all()


MAPPED = ["Q8_0 by Q4_1", "both offsets, blocks", "Q8_0 by Q4_K", "packed 5 bits", "batch, two contracted"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_scan(name: str, rng: np.random.Generator) -> None:
    pairs = [draw(name, rng)[:2] for _ in range(3)]
    dot = draw(name, rng)[2]
    left, right = (jax.tree.map(lambda *parts: jnp.stack(parts), *(pair[side] for pair in pairs)) for side in (0, 1))
    want = np.stack([multiply(*pair, CASES[name])[0] for pair in pairs])
    np.testing.assert_array_equal(jax.vmap(dot)(left, right), want)
    np.testing.assert_array_equal(lax.scan(lambda c, xs: (c, dot(*xs)), None, (left, right))[1], want)
    want = np.stack([multiply(pair[0], pairs[0][1], CASES[name])[0] for pair in pairs])
    np.testing.assert_array_equal(jax.jit(jax.vmap(dot, (0, None)))(left, pairs[0][1]), want)
    want = np.stack([multiply(pairs[0][0], pair[1], CASES[name])[0] for pair in pairs])
    np.testing.assert_array_equal(jax.vmap(dot, (None, 0))(pairs[0][0], right), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["Q8_0 by Q4_1", "short last block", "both offsets", "both offsets, blocks", "Q8_0 by Q4_K", "signed"]
)
def test_gradients(name: str, rng: np.random.Generator) -> None:
    """The cotangents of scales and offsets are those of the product of the dequantized arrays."""
    lhs, rhs, dot = draw(name, rng)
    # Small, so that the gradients of float16 scales do not overflow.
    g = (rng.normal(size=dot(lhs, rhs).shape) * 2.0**-14).astype(F32)

    def split(q: QuantizedArray) -> tuple[list[Any], Callable[[Any], QuantizedArray]]:
        leaves, structure = jax.tree.flatten(q)
        floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

        def join(values: Any) -> QuantizedArray:
            new = list(leaves)
            for i, value in zip(floats, values, strict=True):
                new[i] = value
            return jax.tree.unflatten(structure, new)

        return [leaves[i] for i in floats], join

    (a, join_a), (b, join_b) = split(lhs), split(rhs)
    ours = jax.grad(lambda a, b: jnp.sum(dot(join_a(a), join_b(b)) * g), (0, 1))(a, b)

    def reference(a: Any, b: Any) -> jax.Array:
        y = lax.dot_general(join_a(a).dequantize(), join_b(b).dequantize(), CASES[name][2])
        return jnp.sum(y * g)

    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.grad(reference, (0, 1))(a, b)), strict=True):
        assert mine.dtype == theirs.dtype
        assert np.abs(theirs).max() > 0
        tolerance = (1e-2 if mine.dtype == np.float16 else 1e-4) * np.abs(theirs).max()
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=tolerance)


def test_other_functions_agree(rng: np.random.Generator) -> None:
    case = CASES["Q8_0 by Q4_1"]
    lhs, rhs, dot = draw("Q8_0 by Q4_1", rng)
    want = np.asarray(dot(lhs, rhs))
    np.testing.assert_array_equal(lhs @ rhs, want)
    np.testing.assert_array_equal(jq.einsum("bk,kn->nb", lhs, rhs), want.T)
    np.testing.assert_array_equal(jq.matmul(rhs.T, lhs.T), want.T)  # the offset is then that of lhs
    np.testing.assert_array_equal(jq.matmul(lhs, rhs.T.store_last(-1).T), want)
    np.testing.assert_array_equal(jq.matmul(lhs.reshape(1, 5, 96), rhs.reshape(1, 96, 7)), want[None])
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), rhs, case[1].draw(rng))
    both = jq.matmul(lhs, stack)
    np.testing.assert_array_equal(both[0], want)
    np.testing.assert_array_equal(both[1], dot(lhs, jax.tree.map(lambda part: part[1], stack)))
    np.testing.assert_array_equal(jq.einsum("...bk,...kn->...bn", lhs[None], stack), both)
    half = jq.matmul(lhs, rhs, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(half, want.astype(jnp.bfloat16))


def test_broadcast_dimensions_of_blocks_of_two_sizes(rng: np.random.Generator) -> None:
    rhs = Form((1, 96, 10), U8, (1, 3, 3), offset=(1, 3, 1), block=(1, 32, 4)).draw(rng)
    nested = Form((96, 4), U4, (3, 4), offset=(3, 4), inner=(1, 2), packed=True).draw(rng)
    lhs = jax.tree.map(lambda *parts: jnp.stack(parts), X32.draw(rng), X32.draw(rng))
    want = np.stack([jq.matmul(lhs[i], rhs[0]) for i in range(2)])
    np.testing.assert_array_equal(jq.einsum("...bk,...kn->...bn", lhs, rhs), want)
    want = np.stack([jq.matmul(lhs[i], nested) for i in range(2)])
    np.testing.assert_array_equal(jq.einsum("...bk,...kn->...bn", lhs, nested[None]), want)


def test_three_operands(rng: np.random.Generator) -> None:
    """The third operand is contracted with floats, so that its offset is dequantized."""
    lhs, rhs, _ = draw("Q8_0 by Q4_1", rng)
    last = Form((7, 32), U4, (7, 1), offset=(7, 1)).draw(rng)
    y = jq.einsum("bk,kn,nm->bm", lhs, rhs, last)
    parts = [np.asarray(q.dequantize(), np.float64) for q in (lhs, rhs, last)]
    magnitude = np.abs(parts[0]) @ np.abs(parts[1]) @ np.abs(parts[2])
    assert (np.abs(np.asarray(y, np.float64) - parts[0] @ parts[1] @ parts[2]) <= magnitude * 1e-5).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Q8_0 by Q4_1", "Q8_0 by Q4_K", "both offsets, blocks", "packed 5 bits", "signed"])
def test_groups_of_rows(name: str, rng: np.random.Generator) -> None:
    """Each row of ragged_dot has the bits of dot_general, and weight-only the values."""
    left, right, numbers, _ = CASES[name]
    experts = jax.tree.map(lambda *parts: jnp.stack(parts), *(right.draw(rng) for _ in range(3)))
    if numbers == LAST:
        experts = experts.swapaxes(1, 2)
    lhs, sizes = left.draw(rng), jnp.array([2, 0, 2])
    want = np.zeros((5, experts.shape[2]), F32)
    for row, group in enumerate([0, 0, 2, 2]):
        want[row] = jq.matmul(lhs[row : row + 1], experts[group])[0]
    for y in (jq.ragged_dot(lhs, experts, sizes), jax.jit(jq.ragged_dot)(lhs, experts, sizes)):
        np.testing.assert_array_equal(y, want)
    floats = jq.ragged_dot(lhs.dequantize(), experts, sizes)
    theirs = lax.ragged_dot(lhs.dequantize(), experts.dequantize(), sizes)
    np.testing.assert_allclose(floats, theirs, rtol=1e-4, atol=1e-5 * max(np.abs(theirs).max(), 1))
    if experts.offset is None or isinstance(experts.offset, QuantizedArray):
        return

    def pull(contract: Any) -> Any:
        return jax.grad(lambda offset: contract(lhs, experts.replace(offset=offset)).sum())(experts.offset)

    ours = pull(lambda a, b: jq.ragged_dot(a, b, sizes))
    theirs = pull(lambda a, b: lax.ragged_dot(a.dequantize(), b.dequantize(), sizes))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * np.abs(theirs).max())


def test_bias_and_output() -> None:
    """With signed and nested scales they have the codes of plain scales; with an offset they are refused."""
    rng = np.random.default_rng(0)
    lhs, plain = Form((5, 32), I8, (5, 1)).draw(rng), Form((32, 8), I8, (1, 8), signed=True).draw(rng)
    bias = jnp.arange(8, dtype=jnp.int32)
    output = jq.Quantizer(jq.QuantSpec("uint8"), 4.0, 100)
    scale = np.asarray(lhs.scale) * np.asarray(plain.scale)
    acc = np.asarray(lhs.codes).astype(np.int64) @ np.asarray(plain.codes).astype(np.int64) + np.arange(8)
    np.testing.assert_array_equal(jq.matmul(lhs, plain, bias=bias), acc.astype(F32) * scale)
    want = np.clip(np.rint(acc.astype(F32) * (scale / F32(4))) + 100, 0, 255)
    np.testing.assert_array_equal(jq.matmul(lhs, plain, bias=bias, output=output).codes, want)
    inner = QuantizedArray(jnp.arange(1, 9, dtype=jnp.uint8).reshape(1, 8), jnp.full((1, 2), 0.5, jnp.float16))
    nested, flat = plain.replace(scale=inner), plain.replace(scale=inner.dequantize().astype(jnp.float32))
    epilogues: dict[str, Any] = {"bias": bias, "output": output}
    for options in ({name: value} for name, value in epilogues.items()):
        ours, theirs = (jq.einsum("bk,kn->bn", lhs, q, **options) for q in (nested, flat))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    shifted = plain.replace(offset=jnp.ones((1, 8)))
    for name, value in epilogues.items():
        with pytest.raises(ValueError, match=rf"jaxquant.matmul: rhs.offset: expected None, because of the {name}"):
            jax.jit(functools.partial(jq.matmul, **{name: value}))(lhs, shifted)
    with pytest.raises(ValueError, match=r"jaxquant.einsum: lhs.offset: expected None"):
        jq.einsum("nk,kb->nb", shifted.T, lhs.T, output=output)


def test_refusals() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs, _ = draw("Q8_0 by Q4_1", rng)
    per_input = rhs.replace(offset=jnp.ones((96, 1)))
    with pytest.raises(ValueError, match=r"matmul: rhs: expected one offset along the contracted dimension 0, or one"):
        jq.matmul(lhs, per_input)
    crossed = Form((96, 7), U4, (1, 7), offset=(2, 7)).draw(rng)
    with pytest.raises(ValueError, match=r"matmul: lhs, rhs: expected blocks of both sides that end at the same"):
        jq.matmul(lhs, crossed)
    permuted = rhs.replace(permutation=jnp.arange(96, dtype=jnp.int32), permuted_axis=-2)
    for call in (lambda: jq.matmul(lhs, permuted), lambda: jq.einsum("bk,kn", lhs, permuted)):
        with pytest.raises(ValueError, match=r"(rhs|operands\[1\]).permutation: expected None"):
            call()
    experts = jax.tree.map(lambda part: part[None], permuted)
    with pytest.raises(ValueError, match=r"jaxquant.ragged_dot: rhs.permutation: expected None"):
        jq.ragged_dot(lhs, experts, jnp.array([5]))


def test_no_float_weights_are_made() -> None:
    """The product of 8 rows makes signed codes of the weights, but no float32 copy."""
    x = jq.quantize(jnp.ones((8, 1024)), jq.QuantSpec("int8", jq.Blocked(1, 32)))
    w = jq.quantize(jnp.ones((1024, 512)), jq.QuantSpec("uint8", jq.Blocked(0, 32), offset=True))
    program = Program(jq.matmul, x, w)
    assert program.memory.temp_size_in_bytes < 1024 * 512 * 4
