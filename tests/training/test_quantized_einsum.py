"""quantized_einsum: its results against `einsum` of `quantize`, its cotangents against numpy and `fake_quantize`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import Blocked, Int8Backward, PerAxis, Quantizer, QuantSpec

from ..cases.quantized_contractions import F32, both_ways, check_equal, faked, quarters, rules, whole
from ..support.equality import same_bits

I8, U8, I4, U4 = (QuantSpec(d) for d in (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4))
Shape = tuple[int, ...]
# What may vary: the rows and columns of attention's operands, blocks that do not divide, three operands, one operand.
FORWARD: dict[str, tuple[str, tuple[Shape, ...], tuple[Any, ...]]] = {
    "attention": (
        *("bqhd,bkhd->bhqk", ((2, 3, 2, 5), (2, 4, 2, 5))),
        (QuantSpec(jnp.int8, PerAxis((0, 1, 2))), QuantSpec(jnp.uint8, PerAxis((0, 2)), symmetric=False)),
    ),
    "blocks": ("td,fd->tf", ((5, 21), (6, 21)), (QuantSpec(jnp.int8, PerAxis(0)), QuantSpec(jnp.int4, Blocked(1, 8)))),
    "dots": ("...ij,jk", ((2, 3, 4, 9), (9, 5)), (U8, QuantSpec(jnp.int8, PerAxis(1)))),
    "weights alone": ("ij,jk->ki", ((4, 17), (17, 3)), (None, QuantSpec(jq.nf4, Blocked(0, 8)))),
    "three": ("ij,jk,kl->il", ((3, 9), (9, 4), (4, 5)), (U8, I8, QuantSpec(jnp.float8_e4m3fn))),
    "two of three": ("ij,jk,k->ik", ((3, 9), (9, 4), (4,)), (U8, QuantSpec(jnp.int8, PerAxis(1)), None)),
    "one": ("ij->j", ((4, 5),), (U4,)),
    "summed alone": ("ij,jk->k", ((4, 5), (5, 3)), (QuantSpec(jnp.uint8, PerAxis(0)), I8)),
    "outer": ("i,j", ((9,), (3,)), (U8, I4)),
    "rank 0": (",", ((), ()), (I8, U8)),
    "empty": ("ij,jk", ((0, 5), (5, 3)), (U8, I8)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FORWARD)
def test_results_and_gradients(name: str, rng: np.random.Generator) -> None:
    """Results to the last bit; gradients as the float einsum of the fake-quantized operands has them."""
    subscripts, shapes, specs = FORWARD[name]
    xs = [rng.normal(0.3, 1, shape).astype(F32) for shape in shapes]

    @jax.jit
    def ways(xs: Any) -> Any:
        call = functools.partial(jq.quantized_einsum, subscripts, specs=specs)
        y, pull = jax.vjp(call, *xs)
        q = [x if s is None else jq.quantize(x, s) for x, s in zip(xs, specs, strict=True)]
        sides = [None if s is None else Quantizer(s) for s in specs]
        fakes = functools.partial(map, faked, sides)
        _, floats = jax.vjp(lambda *xs: jnp.einsum(subscripts, *fakes(xs)), *xs)
        return y, call(*xs), jq.einsum(subscripts, *q), pull(y), floats(y)

    y, once, expected, actual, exact = ways(xs)
    same_bits(y, np.asarray(expected))
    same_bits(once, np.asarray(expected))
    for mine, theirs in zip(actual, exact, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max(initial=0))


@pytest.mark.slow
def test_dtypes(rng: np.random.Generator) -> None:
    """Of halves, of unlike dtypes, of a dtype that is asked for: results to the bit, cotangents of their operands'."""
    x, w = rng.normal(size=(4, 9)).astype(F32), rng.normal(size=(9, 3)).astype(F32)
    for left, right, preferred in (
        *((jnp.bfloat16, jnp.bfloat16, None), (jnp.float16, jnp.bfloat16, None)),
        *((jnp.float32, jnp.float32, jnp.float16), (jnp.bfloat16, jnp.bfloat16, jnp.float32)),
    ):
        a, b = jnp.asarray(x, left), jnp.asarray(w, right)
        call = functools.partial(jq.quantized_einsum, "ij,jk->ki", specs=(U8, I8), preferred_element_type=preferred)
        y, pull = jax.vjp(call, a, b)
        q = jq.quantize(a, U8), jq.quantize(b, I8)
        same_bits(y, np.asarray(jq.einsum("ij,jk->ki", *q, preferred_element_type=preferred)))
        assert [d.dtype for d in pull(y)] == [left, right]


@pytest.mark.slow
@pytest.mark.parametrize("subscripts", ["qd,kd->kq", "qd,kd,kd->q"])
def test_every_rule_on_every_operand(rng: np.random.Generator, subscripts: str) -> None:
    """Operands, scales and a learned zero point, saturated in places, on numbers that float32 does not round."""
    third = subscripts.count(",") == 2
    columns, scales = QuantSpec(jnp.int4, PerAxis(0)), np.exp2(rng.integers(-2, 1, (6, 1))).astype(F32)
    estimators = rules(rng)
    estimators = {name: estimators[name] for name in ("straight", "identity", "lsq", "lsq+", "pact", "stochastic")}
    xs = {
        name: (
            quarters(rng, U4, 0.5, 0 if name == "pact" else 6, (5, 9)),
            quarters(rng, columns, scales, 0, (6, 9)),
            *([whole(rng, (6, 9), 1)] if third else []),
        )
        for name in estimators
    }
    g = whole(rng, (5,) if third else (6, 5))
    call = lambda *ops: jq.quantized_einsum(subscripts, *ops[: len(ops) // 2], specs=ops[len(ops) // 2 :])  # noqa: E731

    @jax.jit
    def ways(xs: Any) -> Any:
        results = {}
        for name, rule in estimators.items():
            point = np.zeros((1, 1), jnp.uint4) if name == "pact" else np.full((1, 1), 6, F32)
            sides = [Quantizer(U4, F32(0.5), point, rule), Quantizer(columns, scales, None, rule), None]
            floats = functools.partial(jnp.einsum, subscripts)
            results[name] = both_ways(call, floats, xs[name], sides[: 3 if third else 2], g)
        return results

    for name, (actual, expected) in ways(xs).items():
        print(name)
        check_equal(actual, expected)


# Their cotangents as integer contractions: a batch with scales of its own, indices that are summed alone, "...".
INTEGERS = ["bqd,bkd->bqk", "...ij,...jk->...ik", "ij,jk->k", "ij,jk->", "ij,ij->", "ij,ij->ji", "i,j", "ijk,k->ji"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("subscripts", INTEGERS)
def test_int8_is_exact_where_g_is_on_the_grid(subscripts: str, rng: np.random.Generator) -> None:
    """A 127 at each index of each dimension of g: integers and floats agree to the last bit."""
    size = dict(zip("bqkdijk", (2, 3, 4, 9, 3, 5, 4), strict=True))
    terms = subscripts.replace("...", "b").split("->")[0].split(",")
    shapes = [tuple(size[c] for c in term) for term in terms]
    out = np.einsum(subscripts, *(np.zeros(shape) for shape in shapes)).shape
    batched = [tuple(a for a, c in enumerate(term) if c in "bqk" and "b" in term) for term in terms]
    specs = [QuantSpec(jnp.int4, PerAxis(axes)) if axes else I4 for axes in batched]
    entries = [tuple(n if a in axes else 1 for a, n in enumerate(s)) for s, axes in zip(shapes, batched, strict=True)]
    sides = [Quantizer(s, np.full(e, 0.5, F32)) for s, e in zip(specs, entries, strict=True)]
    xs = [quarters(rng, I4, 0.5, 0, shape) for shape in shapes]
    left = subscripts.replace("...", "b").partition("->")[2]
    # An operand with every index of g has a scale for each of its elements.
    alone = bool(left) and any(set(left) <= set(term) for term in terms)
    g = np.asarray((127 * whole(rng, out, 1) if alone else whole(rng, out, 126)) if out else 127, F32)
    for axis in range(g.ndim):
        g[(*(slice(None),) * axis, 0)] = 127

    def pull_back(backward: Any) -> Any:
        call = functools.partial(jq.quantized_einsum, subscripts, specs=sides, backward=backward)
        y, pull = jax.vjp(call, *xs)
        return y, pull(jnp.asarray(g))

    check_equal(*jax.jit(lambda: (pull_back(Int8Backward()), pull_back(jq.FloatBackward())))())


@pytest.mark.slow
def test_one_weight_in_three_places(rng: np.random.Generator) -> None:
    """The cotangents of one array that is several operands add up."""
    w, g = jnp.asarray(quarters(rng, I4, 0.5, 0, (5, 5))), whole(rng, (5, 5), 1)
    q = Quantizer(I4, F32(0.5))
    ours = lambda w: jq.quantized_einsum("ij,jk,kl->il", w, w, w, specs=(q, q, None))  # noqa: E731
    floats = lambda w: jnp.einsum("ij,jk,kl->il", q(w), q(w), w)  # noqa: E731
    for mine, theirs in zip(jax.vjp(ours, w)[1](g), jax.vjp(floats, w)[1](g), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-4)


X: Any = np.ones((2, 3), F32)
W: Any = np.ones((3, 4), F32)
REFUSALS: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("ij,jk", (X, W), {"specs": (None, None)}, TypeError, r"specs\[0\], specs\[1\]: expected a QuantSpec or a Quantizer"),
    ("ij,jk", (X, W), {"specs": (I8,)}, ValueError, "specs: expected a spec or None for each operand, got 1 for 2"),
    ("ij,jk", (X, W), {"specs": I8}, ValueError, "specs: expected a spec or None for each operand, got QuantSpec"),
    ("ij,jk", (X, W), {"specs": (I8, 8)}, TypeError, r"specs\[1\]: expected a QuantSpec, a Quantizer or None, got 8"),
    ("ij,jk", (X, W), {"specs": (I8, X)}, TypeError, r"specs\[1\]: expected a QuantSpec.*, got an array of float32"),
    ("ij,jk", (X, W), {"specs": (Quantizer(U8, 0.5), I8)}, ValueError, r"specs\[0\]\.zero_point: expected a zero point"),
    ("ij,jk", (X, W), {"specs": (Quantizer(U8, None, 3), I8)}, ValueError, r"specs\[0\]\.zero_point: expected None"),
    ("ij,jk", (X, W), {"specs": (Quantizer(I8, X[0]), I8)}, ValueError, r"specs\[0\]\.scale: expected one element"),
    ("ij,jk", (X, W), {"specs": (Quantizer(I8, gradient=X), I8)}, TypeError, r"specs\[0\]\.gradient: expected"),
    ("ij,jk", ([1.0], W), {}, TypeError, r"operands\[0\]: expected an array, got list"),
    ("ij,jk", (X, W.astype(np.int8)), {}, TypeError, r"operands\[1\]: expected dtype float32.*, got int8"),
    (7, (X, W), {}, TypeError, "subscripts: expected a string, got 7"),
    ("ij,jk,k", (X, W), {}, ValueError, "subscripts: expected as many terms as operands, 2, got 3"),
    ("ij,kl->im", (X, W), {}, ValueError, "subscripts: expected an output of distinct indices"),
    ("ijk,kl", (X, W), {}, ValueError, r"operands\[0\]: expected a rank that fits 'ijk', got rank 2"),
    ("ij,ik", (X, W), {}, ValueError, r"operands\[1\]: expected size 2 of index 'i'.*, got shape \(3, 4\)"),
    ("ii,ij", (X[:, :2], X), {}, ValueError, r"operands\[0\]: expected each index once in a quantized operand"),
    ("ij,jk", (X, W), {"specs": (QuantSpec(jnp.int8, PerAxis(1)), I8)}, ValueError, "lhs: expected one scale along"),
    ("ij,jk", (X, W), {"specs": (QuantSpec(jnp.int16), I8)}, TypeError, "lhs: expected values of int8.*, got int16"),
    ("ij,jk", (X, W), {"specs": (I8, QuantSpec(jnp.int8, PerAxis(2)))}, ValueError, r"axis: expected an integer in \[-2"),
    ("ij,jk", (X, W), {"backward": "int8"}, TypeError, "backward: expected .* or Float8Backward.*, got 'int8'"),
    ("ij,jk", (X, W), {"backward": Int8Backward(), "specs": (I8, None)}, ValueError, "backward: .* two quantized operands"),
    ("ij,jk,k", (X, W, W[0]), {"backward": Int8Backward(), "specs": (I8,) * 3}, ValueError, "backward: .* two"),
    ("ij,jk", (X, W), {"backward": Int8Backward(True)}, ValueError, "key: expected a key, because Int8Backward"),
    ("ij,jk", (X, W), {"key": "a"}, TypeError, r"key: expected None or one key of jax\.random, got 'a'"),
    ("ij,jk", (X, W), {"preferred_element_type": jnp.int32}, TypeError, "preferred_element_type: expected dtype float32"),
    ("ij,jk", (X, W), {"precision": []}, TypeError, r"precision: expected a static, hashable value, got \[\]"),
    ("...ij,...jk", (X[None], np.ones((2, 3, 4), F32)), {"backward": Int8Backward()}, ValueError, "backward: .* size"),
    ("ij,jk->k", (X, W), {"backward": Int8Backward(), "specs": (QuantSpec(jnp.int8, PerAxis(0)), I8)}, ValueError,
     "backward: expected FloatBackward.*along a dimension that the result does not have"),
]  # fmt: skip


@pytest.mark.parametrize(("subscripts", "operands", "rest", "error", "text"), REFUSALS)
def test_refusals(subscripts: Any, operands: Any, rest: Any, error: type[Exception], text: str) -> None:
    call = functools.partial(jq.quantized_einsum, subscripts, **{"specs": (I8,) * len(operands), **rest})

    def differentiate() -> Any:
        y, pull = jax.vjp(call, *operands)
        return pull(y)

    with pytest.raises(error, match=rf"jaxquant\.quantized_einsum: {text}") as raised:
        differentiate()
    assert isinstance(raised.value, AssertionError)
