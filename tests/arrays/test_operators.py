"""What is asked of a quantized array that has no floats: every error names the call to make. `==` stays identity."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

Q: Any = jq.QuantizedArray(np.ones((4, 4), np.int8), np.ones((4, 1), np.float32))
X = jnp.ones((4, 4))
P: Any = functools.partial
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
UNARY: dict[str, Callable[[Any], Any]] = {
    "-{}": operator.neg, "+{}": operator.pos, "~{}": operator.invert, "abs({})": abs, "round({})": round,
    "float({})": float, "int({})": int, "complex({})": complex,
}  # fmt: skip


def check_refusal(call: Callable[[], Any], expected: str, actual: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    text = str(raised.value)
    assert text.startswith("jaxquant.QuantizedArray"), text
    assert f"expected {expected}, got {actual}" in text, text
    assert isinstance(raised.value, AssertionError), "chex's readers look for AssertionError"


@pytest.mark.parametrize("symbol", [*BINARY, *COMPARISONS])
def test_binary_operators(symbol: str) -> None:
    ask = {**BINARY, **COMPARISONS}[symbol]
    lookup = " (jq.take(q, indices) looks up floats, in place of q[indices])" if symbol in ("+", "-", "*", "/") else ""
    for other, actual in ((1, "1"), (2.5, "2.5"), (X, "ArrayImpl"), ([1], "list"), (Q, repr(Q))):
        right = "p.dequantize()" if other is Q else "x"
        check_refusal(P(ask, Q, other), f"q.dequantize() {symbol} {right}{lookup}", f"{Q!r} {symbol} {actual}")
    with pytest.raises(TypeError, match=r"QuantizedArray.*expected q\.dequantize\(\)"):
        ask(np.ones((4, 4), np.float32), Q)
    with pytest.raises(TypeError, match=r"QuantizedArray.*expected q\.dequantize\(\)"):
        jax.eval_shape(lambda q, x: ask(q, x), Q, X)
    if symbol in BINARY:
        for other, actual in ((1, "1"), (X, "ArrayImpl")):
            check_refusal(P(ask, other, Q), f"x {symbol} q.dequantize(){lookup}", f"{actual} {symbol} {Q!r}")
        with pytest.raises(TypeError, match=r"QuantizedArray.*expected x .* q\.dequantize\(\)"):
            jax.eval_shape(lambda q, x: ask(x, q), Q, X)


def test_unary_operators() -> None:
    for form, ask in UNARY.items():
        check_refusal(P(ask, Q), form.format("q.dequantize()"), form.format(repr(Q)))
    check_refusal(P(divmod, Q, 2), "divmod(q.dequantize(), x)", f"divmod({Q!r}, 2)")
    check_refusal(P(divmod, 2, Q), "divmod(x, q.dequantize())", f"divmod(2, {Q!r})")
    check_refusal(lambda: 1 in Q, "x in q.dequantize()", f"1 in {Q!r}")
    total = copy.copy(Q)
    with pytest.raises(TypeError, match=r"expected q\.dequantize\(\) \+ x"):
        total += 1


DOT = (((1,), (0,)), ((), ()))
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "dot": lambda q: jnp.dot(X, q),
    "dot, first": lambda q: jnp.dot(q, X),
    "matmul": lambda q: jnp.matmul(X, q),
    "einsum": lambda q: jnp.einsum("ij,jk", X, q),
    "sum": jnp.sum,
    "concatenate": lambda q: jnp.concatenate([q, q]),
    "stack": lambda q: jnp.stack([q, q]),
    "sin": jnp.sin,
    "where": lambda q: jnp.where(X > 0, X, q),
    "take": lambda q: jnp.take(q, 0),
    "reshape": lambda q: jnp.reshape(q, -1),
    "relu": jax.nn.relu,
    "lax.dot_general": lambda q: jax.lax.dot_general(X, q, DOT),
    "lax.add": lambda q: jax.lax.add(X, q),
    "lax.concatenate": lambda q: jax.lax.concatenate([q, q], 0),
    "lax.conv": lambda q: jax.lax.conv_general_dilated(X[None, None], q[None, None], (1, 1), "SAME"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_jax(name: str) -> None:
    for call in (FUNCTIONS[name], lambda q: jax.eval_shape(FUNCTIONS[name], q)):
        with pytest.raises(
            TypeError, match=r"jaxquant\.QuantizedArray.*jq\.matmul.*jq\.concatenate.*q\.dequantize\(\)"
        ):
            call(Q)


def test_functions_that_make_arrays() -> None:
    for ask in (jnp.asarray, jnp.array, np.asarray, P(np.dot, X), np.sum, lambda q: np.concatenate([q, q])):
        with pytest.raises(TypeError, match=r"jaxquant\.QuantizedArray.*expected q\.dequantize\(\)"):
            ask(Q)


class Reflecting:
    """An operand that knows what to do with a QuantizedArray."""

    def __radd__(self, other: Any) -> str:
        return f"my own {type(other).__name__}"

    def __lt__(self, other: Any) -> str:
        return f"my own {type(other).__name__}"


def test_other_types_may_have_operators() -> None:
    other = Reflecting()
    assert Q + other == "my own QuantizedArray"
    assert operator.gt(Q, other) == "my own QuantizedArray"
    with pytest.raises(TypeError, match="not supported between"):
        operator.lt(Q, other)


def test_equality_is_identity() -> None:
    """It is what sets, dicts and static comparisons take; nothing of the contents is compared."""
    other = copy.copy(Q)
    for is_equal in (operator.eq, lambda left, right: not left != right):  # noqa: SIM202
        assert is_equal(Q, Q)
        for right in (other, 1, X, None):
            assert not is_equal(Q, right)
        assert not is_equal(X, Q)
    assert len({Q, other, Q}) == 2
    assert {Q: 1}[Q] == 1
    assert jax.tree.structure(Q) == jax.tree.structure(other)


def test_the_class_pickles_copies_and_subclasses() -> None:
    assert not isinstance(Q, jax.Array)
    assert not hasattr(Q, "__jax_array__")
    assert not hasattr(Q, "__dict__")
    assert pickle.loads(pickle.dumps(jq.QuantizedArray)) is jq.QuantizedArray
    assert copy.deepcopy(jq.QuantizedArray) is jq.QuantizedArray
    assert type("Other", (jq.QuantizedArray,), {}).__name__ == "Other"
    assert repr(type("Other", (jq.QuantizedArray,), {})).endswith(".Other'>")
    np.testing.assert_array_equal(X @ Q, Q @ X)
