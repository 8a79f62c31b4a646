"""Bad input to the contractions: as in test_errors.py, each row must raise at trace time and name what is wrong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases import contraction_refusals, convolution_refusals
from ..cases.contraction_refusals import CG, DG, I8, NB, U8, F, P, ones
from ..support import bad_input
from ..support.bad_input import Row

PARTS = (
    contraction_refusals.not_arrays,
    contraction_refusals.zero_points,
    contraction_refusals.products,
    contraction_refusals.scales,
    contraction_refusals.quantized,
    contraction_refusals.nbits,
    contraction_refusals.nbits_operands,
    convolution_refusals.attributes,
    convolution_refusals.windows,
    convolution_refusals.general_windows,
    convolution_refusals.general_operands,
    convolution_refusals.dimension_numbers,
)
ROWS = [row for part in PARTS for row in part()]
TRACEABLE = bad_input.traceable(ROWS)


def test_good_arguments_are_accepted() -> None:
    """Else every row could be refused for what it does not name."""
    for op, good in contraction_refusals.GOOD.items():
        assert jax.eval_shape(op, *good.values()).shape


@pytest.mark.sample(150)
@pytest.mark.parametrize("row", ROWS, ids=bad_input.ids(ROWS))
def test_bad_input_is_named(row: Row) -> None:
    bad_input.refused_eagerly(row)


@pytest.mark.sample(150)
@pytest.mark.parametrize("row", ROWS, ids=bad_input.ids(ROWS))
def test_disabled_asserts_hide_nothing(row: Row) -> None:
    bad_input.refused_without_chex(row)


@pytest.mark.sample(150)
@pytest.mark.parametrize("row", TRACEABLE, ids=bad_input.ids(TRACEABLE))
def test_bad_input_is_named_while_tracing(row: Row) -> None:
    bad_input.refused_while_tracing(row)


STATICS: list[tuple[Any, str, Any]] = [
    *((op, name, value) for op in (jq.conv_integer, jq.qlinear_conv) for name, value in (
        ("pads", (1, 1, 1, 1)), ("strides", (1, 1)), ("dilations", (1, 1)), ("kernel_shape", (3, 3)), ("group", 1),
    )),
    *((NB, name, value) for name, value in (("K", 40), ("N", 5), ("bits", 4), ("block_size", 32))),
    (DG, "dimension_numbers", (((1,), (0,)), ((), ()))),
    *((CG, name, value) for name, value in (
        ("window_strides", (1, 1)), ("padding", ((1, 1), (1, 1))), ("lhs_dilation", (1, 1)), ("rhs_dilation", (1, 1)),
        ("dimension_numbers", ((0, 1, 2, 3),) * 3), ("feature_group_count", 1), ("batch_group_count", 1),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "value"), STATICS)
def test_a_static_argument_may_not_be_traced(op: Any, name: str, value: Any) -> None:
    good = contraction_refusals.GOOD[op].values()
    text = rf"jaxquant\.{bad_input.function_name(op)}: {name}: expected a static, hashable value, got .*trace"
    for traced in (value, jnp.asarray(jax.tree.leaves(value))):
        with pytest.raises(TypeError, match=text.replace("trace", "[Tt]race")):
            jax.jit(lambda v: op(*good, **{name: v}))(traced)


@pytest.mark.parametrize(
    ("call", "right", "wrong"),
    [
        (lambda v: jq.conv_integer(ones(U8, 1, 2, 5, 6), ones(I8, 3, 2, 3, 3), pads=v), (1, 1, 1, 1), (True, 1, 1, 1)),
        (lambda v: jq.conv_integer(ones(U8, 1, 2, 5, 6), ones(I8, 3, 2, 3, 3), strides=v), (1, 2), (1.0, 2)),
        (lambda v: jq.conv_integer(ones(U8, 1, 2, 5, 6), ones(I8, 3, 2, 3, 3), group=v), 1, True),
        (lambda v: CG(ones(U8, 1, 2, 5, 6), ones(I8, 3, 2, 3, 3), 0, 0, rhs_dilation=v), (1, 2), (True, 2.0)),
        (lambda v: NB(ones(F, 7, 40), ones(U8, 5, 2, 16), ones(F, 5, 2), None, None, bits=v), 4, 4.0),
    ],
    ids=["pads", "strides", "group", "rhs_dilation", "bits"],
)
def test_a_cached_program_does_not_admit_equal_values_of_other_types(call: Any, right: Any, wrong: Any) -> None:
    """True == 1 == 1.0, with one hash: a cache of compiled programs must not take one for the other."""
    call(right)
    with pytest.raises(TypeError, match=r"expected an int, got (True|1\.0|4\.0)"):
        call(wrong)


def test_the_first_cause_is_chex() -> None:
    with pytest.raises(ValueError, match="bias") as raised:
        jq.ops.dynamic_quantize_matmul(ones(F, 4, 6), ones(I8, 6, 5), 0.5, bias=ones(F, 6))
    assert "[Chex]" in str(raised.value.__cause__)


def test_a_number_stands_for_a_zero_point_of_any_operand() -> None:
    """Python's and numpy's own numbers alike; an int of float8 is 0."""
    small = jnp.ones((2, 3), jnp.float8_e4m3fn), jnp.ones((3, 2), jnp.float8_e4m3fn)
    y = jq.qlinear_matmul(small[0], 1.0, 0, small[1], 1, 0, np.float32(1), 0)
    assert y.dtype == jnp.float8_e4m3fn
    narrow = jnp.ones((2, 3), jnp.int4)
    product = jq.integer.dot_general(narrow, narrow, (((1,), (1,)), ((), ())), lhs_zero_point=-8, rhs_zero_point=7)
    np.testing.assert_array_equal(product, np.full((2, 2), -162))


class Wrapped:
    """An array of someone else's, which says nothing of its dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", list(contraction_refusals.GOOD), ids=bad_input.function_name)
def test_arrays_of_others_are_taken(rng: np.random.Generator, op: Any) -> None:
    good = contraction_refusals.GOOD[op]
    values = [rng.integers(0, 100, np.shape(v)).astype(np.asarray(v).dtype) for v in good.values()]
    for absent in ((), ("a_zero_point", "b_zero_point", "x_zero_point", "w_zero_point", "zero_points")):
        operands = [
            None if n in absent and op not in (jq.qlinear_matmul, jq.qlinear_conv) else v
            for n, v in zip(good, values, strict=True)
        ]
        wrapped = [v if v is None else Wrapped(v) for v in operands]
        np.testing.assert_array_equal(op(*wrapped), op(*operands))
        np.testing.assert_array_equal(jax.jit(P(op, *wrapped))(), op(*operands))


EMPTY: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (lambda: jq.matmul_integer(ones(U8, 0, 6), ones(I8, 6, 5), 3, 4), (0, 5)),
    "columns": (lambda: jq.matmul_integer(ones(U8, 4, 6), ones(I8, 6, 0), 3, 4), (4, 0)),
    "depth": (lambda: jq.matmul_integer(ones(U8, 4, 0), ones(I8, 0, 5), 3, 4), (4, 5)),
    "depth of a row": (lambda: jq.matmul_integer(ones(U8, 0), ones(I8, 0, 5), 3, 4), (5,)),
    "batch": (lambda: jq.matmul_integer(ones(U8, 0, 4, 6), ones(I8, 0, 6, 5), 3, 4), (0, 4, 5)),
    "no dimensions": (lambda: DG(ones(U8), ones(I8), ones(U8), ones(I8), dimension_numbers=(((), ()), ((), ()))), ()),
    "dynamic rows": (lambda: jq.ops.dynamic_quantize_matmul(ones(F, 0, 6), ones(I8, 6, 5), 0.5), (0, 5)),
    "dynamic depth": (lambda: jq.ops.dynamic_quantize_matmul(ones(F, 4, 0), ones(I8, 0, 5), 0.5), (4, 5)),
    "blocks of rows": (
        lambda: jq.ops.matmul_integer_to_float(ones(U8, 0, 6), ones(I8, 6, 5), 0.5, ones(F, 2, 5)), (0, 5),
    ),
    "blocks of nothing": (lambda: jq.ops.matmul_integer_to_float(ones(U8, 4, 0), ones(I8, 0, 5), 0.5, ones(F, 2, 5)),
        (4, 5)),
    "nbits rows": (lambda: NB(ones(F, 0, 40), ones(U8, 5, 2, 16), ones(F, 5, 2)), (0, 5)),
    "images": (lambda: jq.conv_integer(ones(U8, 0, 4, 7, 9), ones(I8, 6, 4, 3, 3), 3, 4), (0, 6, 5, 7)),
    "images of many channels": (lambda: jq.conv_integer(ones(U8, 0, 16, 7, 9), ones(I8, 6, 16, 3, 3), 3, 4),
        (0, 6, 5, 7)),
    "depthwise images": (lambda: jq.conv_integer(ones(U8, 0, 6, 7, 9), ones(I8, 6, 1, 3, 3), 3, 4, group=6),
        (0, 6, 5, 7)),
    "features": (lambda: jq.conv_integer(ones(U8, 2, 4, 7, 9), ones(I8, 0, 4, 3, 3), 3, 4), (2, 0, 5, 7)),
    "channels": (lambda: jq.conv_integer(ones(U8, 2, 0, 7, 9), ones(I8, 6, 0, 3, 3), 3, 4), (2, 6, 5, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(EMPTY))
def test_empty_operands_are_accepted(name: str) -> None:
    """A sum of nothing is 0."""
    op, shape = EMPTY[name]
    for call in (op, jax.jit(op)):
        y = call()
        assert y.shape == shape
        if y.size > 1:
            np.testing.assert_array_equal(y, np.zeros(shape))
