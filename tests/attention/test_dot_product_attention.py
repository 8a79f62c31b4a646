"""quantized_dot_product_attention: its signature and masks against jax.nn, its gradients against fake quantization."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles.attention_text import Codes, attend, quantize_tokens, share_heads

INT8 = jq.QuantSpec("int8", jq.PerToken())
INT4 = jq.QuantSpec("int4", jq.PerToken())


def sample(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 1, shape).astype(np.float32)


def test_signature() -> None:
    """The parameters are jax.nn's, in its order, without the residual; further ones are keywords."""
    theirs = list(inspect.signature(jax.nn.dot_product_attention).parameters.values())
    mine = list(inspect.signature(jq.quantized_dot_product_attention).parameters.values())
    expected = [(p.name, p.kind, p.default) for p in theirs if p.name != "return_residual"]
    assert [(p.name, p.kind, p.default) for p in mine[: len(expected)]] == expected
    added = ["query_spec", "key_spec", "value_spec", "weight_digits", "rotate"]
    assert [p.name for p in mine[len(expected) :]] == added


def attend_in_floats(q: Any, k: Any, v: Any, specs: Any, digits: int, **options: Any) -> Any:
    """Return the attention of fake-quantized operands, whose weights are rounded straight through."""
    fakes = [
        s(x) if isinstance(s, jq.Quantizer) else jq.fake_quantize(x, s) for x, s in zip((q, k, v), specs, strict=True)
    ]
    value_scale = jax.lax.stop_gradient(jq.quantize(v, specs[2]).scale)
    heads = q.shape[2] // k.shape[2]
    queries, keys, values, scales = fakes[0], *(jnp.repeat(x, heads, axis=2) for x in (*fakes[1:], value_scale))
    scores = jnp.einsum("bthd,bshd->bhts", queries, keys) * np.float32(options.get("scale", q.shape[-1] ** -0.5))
    if "bias" in options:
        scores = scores + options["bias"]
    p = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    if options.get("is_causal"):
        p = jnp.where(jnp.tril(jnp.ones(p.shape[2:], bool))[None, None], p, 0)
    scales = jnp.transpose(scales[..., 0], (0, 2, 1))[:, :, None]
    step = jnp.max(p * scales, -1, keepdims=True) / np.float32(128**digits - 1)
    rounded = jnp.round(p * scales / step) * step / scales
    weights = (p + jax.lax.stop_gradient(rounded - p)) / p.sum(-1, keepdims=True)
    return jnp.einsum("bhts,bshd->bthd", weights, values)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ((INT8, INT8, INT8), {"is_causal": True}),
        ((INT8, INT4, INT4), {"bias": (1, 4, 1, 5), "scale": 0.5}),
        ((jq.QuantSpec("uint8", jq.PerToken()), jq.QuantSpec("int8", jq.Blocked(-1, 3)), INT8), {"bias": (2, 1, 5, 5)}),
    ],
    ids=["causal", "int4 and bias", "blocks"],
)
def test_results_and_gradients(specs: Any, options: dict[str, Any], rng: np.random.Generator) -> None:
    q, k, v = sample(rng, 2, 5, 4, 8), *(sample(rng, 2, 5, 2, 8) for _ in "kv")
    g = sample(rng, *q.shape)
    options = dict(options)
    bias = sample(rng, *options.pop("bias")) if "bias" in options else None
    names = dict(zip(("query_spec", "key_spec", "value_spec"), specs, strict=True))

    @jax.jit
    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        def mine(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return jq.quantized_dot_product_attention(q, k, v, bias, **names, **options)

        def floats(q: Any, k: Any, v: Any, bias: Any) -> Any:
            more = {} if bias is None else {"bias": bias}
            return attend_in_floats(q, k, v, specs, 2, **options, **more)

        y, pull = jax.vjp(mine, q, k, v, bias)
        z, float_pull = jax.vjp(floats, q, k, v, bias)
        return y, mine(q, k, v, bias), z, pull(g), float_pull(g)

    y, served, z, mine, theirs = run(q, k, v, bias)
    np.testing.assert_array_equal(y, served)  # what trains is what serves
    # Some weights are rounded to another code than with float scores.
    np.testing.assert_allclose(y, z, atol=1e-3)
    for a, b in zip(mine, theirs, strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())


@pytest.mark.slow
def test_gradients_are_finite_differences(rng: np.random.Generator) -> None:
    """Against differences, in float64, of the attention of the dequantized operands."""
    q, k, v, bias = sample(rng, 1, 3, 2, 4), sample(rng, 1, 4, 1, 4), sample(rng, 1, 4, 1, 4), sample(rng, 1, 2, 3, 4)
    g = sample(rng, *q.shape)

    def find_loss(*xs: Any) -> Any:
        return (jq.quantized_dot_product_attention(*xs, is_causal=True, weight_digits=3) * g).sum()

    gradients = jax.jit(jax.grad(find_loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)
    codes = [quantize_tokens(x, 127).values for x in (q, k, v)]
    unit = np.ones((1, 1, 1, 1))

    def find_float_loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        keys, values = (Codes(share_heads(x, 2), unit) for x in (k, v))
        return (attend(Codes(q, unit), keys, values, 0.5, np.tril(np.ones((1, 1, 3, 4), bool)), bias).output * g).sum()

    points: tuple[Any, ...] = (*codes, bias.astype(np.float64))
    for i, gradient in enumerate(gradients):
        expected = np.zeros(points[i].shape)
        for index in np.ndindex(*expected.shape):
            step = np.zeros(expected.shape)
            step[index] = 1e-5
            sides = [
                find_float_loss(*(x + sign * step if j == i else x for j, x in enumerate(points))) for sign in (1, -1)
            ]
            expected[index] = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_masks_are_those_of_jax(rng: np.random.Generator) -> None:
    """Against jax.nn on the fake-quantized operands, with three digits in the weights."""
    q, k, v = sample(rng, 2, 6, 4, 8), *(sample(rng, 2, 6, 2, 8) for _ in "kv")
    mask = (rng.random((2, 1, 6, 6)) < 0.7) | np.eye(6, dtype=bool)
    lengths = {"query_seq_lengths": np.array([6, 3], np.int32), "key_value_seq_lengths": np.array([5, 6], np.int32)}
    cases: list[dict[str, Any]] = [
        {"mask": mask, "is_causal": True},
        {**lengths, "bias": sample(rng, 1, 4, 1, 6)},
        {"local_window_size": 2, "scale": 0.1},
        {"local_window_size": (3, 1)},
    ]

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        fakes = [jq.fake_quantize(x, INT8) for x in (q, k, v)]
        mine = [jq.quantized_dot_product_attention(q, k, v, weight_digits=3, **case) for case in cases]
        return mine, [jax.nn.dot_product_attention(*fakes, **case) for case in cases]

    for a, b in zip(*run(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_ranks_of_masks_and_biases(rng: np.random.Generator) -> None:
    """Leading dimensions may be missing or 1, a bias may be of integers or of 16 bits, and tokens are not queries."""
    q, k, v = sample(rng, 2, 3, 4, 8), *(sample(rng, 2, 5, 2, 8) for _ in "kv")
    full = (2, 4, 3, 5)
    shapes = [(), (5,), (3, 1), (4, 1, 5), (1, 1, 3, 5), (2, 1, 1, 1), (2, 4, 1, 5), full]
    masks = [rng.random(shape) < 0.7 for shape in shapes]
    biases = [rng.integers(-3, 4, shape).astype(np.int32) for shape in shapes]

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        attend = functools.partial(jq.quantized_dot_product_attention, q, k, v, is_causal=True)
        mine = [attend(jnp.asarray(b), jnp.asarray(m)) for m, b in zip(masks, biases, strict=True)]
        wide = [
            attend(jnp.broadcast_to(b, full).astype(jnp.float32), jnp.broadcast_to(m, full))
            for m, b in zip(masks, biases, strict=True)
        ]
        return mine, wide, attend(jnp.asarray(biases[-1], jnp.bfloat16), masks[-1])

    mine, wide, half = run(q, k, v)
    for a, b in zip(mine, wide, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(half, wide[-1])


@pytest.mark.slow
def test_hidden_queries_and_empty_shapes(rng: np.random.Generator) -> None:
    q, k = sample(rng, 1, 3, 2, 4), sample(rng, 1, 3, 1, 4)
    mask = np.ones((1, 2, 3, 3), bool)
    mask[0, 1, 2] = False

    def run(q: Any, k: Any) -> Any:
        return jq.quantized_dot_product_attention(q, k, k, mask=mask)

    y, pull = jax.vjp(run, q, k)
    assert not np.asarray(y)[0, 2, 1].any()
    dq, dk = pull(jnp.ones_like(y))
    assert not np.asarray(dq)[0, 2, 1].any()
    assert np.isfinite(dk).all()
    for shape, tokens in (
        ((1, 0, 2, 4), 3),
        ((0, 3, 2, 4), 3),
        ((1, 3, 2, 4), 0),
        ((1, 3, 2, 0), 3),
        ((1, 3, 0, 4), 3),
    ):
        x = np.ones(shape, np.float32)
        keys = np.ones((shape[0], tokens, min(1, shape[2]), shape[3]), np.float32)
        np.testing.assert_array_equal(jq.quantized_dot_product_attention(x, keys, keys), np.zeros(shape, np.float32))
    np.testing.assert_array_equal(
        jq.quantized_dot_product_attention(q[0], k[0], k[0]), jq.quantized_dot_product_attention(q, k, k)[0]
    )
    one = jq.quantized_dot_product_attention(q[:, :1], k[:, :1], k[:, :1])
    expected = np.repeat(np.asarray(jq.quantize(k[:, :1], INT8).dequantize()), 2, axis=2)
    np.testing.assert_allclose(one, expected, rtol=1e-6)


@pytest.mark.slow
def test_faults_of_hidden_tokens_do_not_reach_gradients(rng: np.random.Generator) -> None:
    """NaN and infinity in padding, and in tokens that a query does not see, change no other gradient."""
    q, k, v = sample(rng, 2, 4, 4, 6), *(sample(rng, 2, 4, 2, 6) for _ in "kv")
    lengths = np.array([3, 3], np.int32)

    @jax.jit
    def differentiate(q: Any, k: Any, v: Any) -> Any:
        def padded(q: Any, k: Any, v: Any) -> Any:
            sizes: dict[str, Any] = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
            return (jq.quantized_dot_product_attention(q, k, v, **sizes) ** 2).sum()

        def causal(q: Any, k: Any, v: Any) -> Any:
            return jq.quantized_dot_product_attention(q, k, v, is_causal=True)

        y, pull = jax.vjp(causal, q, k, v)
        return jax.grad(padded, argnums=(0, 1, 2))(q, k, v), pull(jnp.ones_like(y))

    clean, clean_causal = jax.tree.map(np.asarray, differentiate(q, k, v))
    for fault in (np.nan, np.inf):
        broken = [x.copy() for x in (q, k, v)]
        for x in broken:
            x[:, 3] = fault
        padded, causal = jax.tree.map(np.asarray, differentiate(*broken))
        for mine, expected in zip(padded, clean, strict=True):
            np.testing.assert_array_equal(mine[:, :3], expected[:, :3])
        # The earlier queries see neither the key nor the value of the last token.
        np.testing.assert_array_equal(causal[0][:, :3], clean_causal[0][:, :3])
        if np.isnan(fault):
            # The last query sees all tokens, and its faults are not lost. An element that saturates has no gradient.
            for mine, expected in zip(causal[1:], clean_causal[1:], strict=True):
                assert (np.isnan(mine) | (expected == 0))[:, :3].all()


@pytest.mark.slow
def test_estimators(rng: np.random.Generator) -> None:
    """Learned scales, and saturation, have the gradients of `fake_quantize`."""
    q, k, v = (sample(rng, 1, 4, 2, 8) for _ in "qkv")
    spec = jq.QuantSpec("int8")
    scales = (np.float32(0.01), np.float32(0.02), np.float32(0.015))
    rules = (jq.LSQ(), jq.StraightThrough(), jq.LSQ())

    def make(scales: Any) -> list[Any]:
        return [jq.Quantizer(spec, scale, gradient=rule) for scale, rule in zip(scales, rules, strict=True)]

    def mine(scales: Any, q: Any, k: Any, v: Any) -> Any:
        names = dict(zip(("query_spec", "key_spec", "value_spec"), make(scales), strict=True))
        return (jq.quantized_dot_product_attention(q, k, v, weight_digits=3, **names) ** 2).sum()

    def floats(scales: Any, q: Any, k: Any, v: Any) -> Any:
        fakes = [quantizer(x) for quantizer, x in zip(make(scales), (q, k, v), strict=True)]
        return (jax.nn.dot_product_attention(*fakes) ** 2).sum()

    gradients = jax.jit(lambda *xs: [jax.grad(f, argnums=(0, 1, 2, 3))(*xs) for f in (mine, floats)])(scales, q, k, v)
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert (np.asarray(gradients[0][1]) == 0).any()  # queries saturate at 1.27


def test_residuals_have_no_scores() -> None:
    """The backward pass keeps nothing of the size of the scores."""
    x = jnp.ones((1, 64, 2, 4))
    _, pull = jax.vjp(functools.partial(jq.quantized_dot_product_attention, is_causal=True), x, x, x)
    assert max(np.size(leaf) for leaf in jax.tree.leaves(pull)) < 64 * 64


@pytest.mark.slow
def test_bfloat16_and_transforms(rng: np.random.Generator) -> None:
    q, k, v = (sample(rng, 2, 3, 4, 2, 8) for _ in "qkv")
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    attend = functools.partial(jq.quantized_dot_product_attention, is_causal=True)
    mapped, gradients = jax.jit(
        jax.vmap(lambda *xs: (attend(*xs), jax.grad(lambda q: attend(q, *xs[1:]).sum())(xs[0])))
    )(*half)
    assert mapped.dtype == gradients.dtype == jnp.bfloat16
    expected = attend(*(x[1].astype(jnp.float32) for x in half))
    np.testing.assert_allclose(mapped[1].astype(jnp.float32), expected, atol=0.02)
    assert np.isfinite(np.asarray(gradients, np.float32)).all()


Q = np.ones((2, 3, 4, 8), np.float32)
K = np.ones((2, 5, 2, 8), np.float32)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"implementation": "cudnn"}, ValueError, "implementation: expected None, got 'cudnn'"),
    ({"query": Q[0, 0]}, ValueError, "query: expected rank 4"),
    ({"query": Q.astype(np.int8)}, TypeError, "query: expected dtype float32"),
    ({"key": K[:1]}, ValueError, r"key: expected shape \(2, tokens, a divisor of 4, 8\)"),
    ({"value": K[:, :4]}, ValueError, r"value: expected shape \(2, 5, 2, 8\)"),
    ({"mask": np.ones((2, 1, 3, 5))}, TypeError, "mask: expected dtype bool"),
    ({"mask": np.ones((2, 2, 3, 5), bool)}, ValueError, "mask: expected a shape that broadcasts"),
    ({"bias": np.ones((4, 5), np.float32)}, ValueError, "bias: expected a shape that broadcasts"),
    ({"query_seq_lengths": np.ones(3, np.int32)}, ValueError, r"query_seq_lengths: expected shape \(2,\)"),
    ({"local_window_size": -1}, ValueError, "local_window_size: expected 0 or more tokens"),
    ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size: expected an int or a pair"),
    ({"is_causal": "yes"}, TypeError, "is_causal: expected True or False"),
    ({"query_spec": "int8"}, TypeError, "query_spec: expected a QuantSpec, a Quantizer or None"),
    ({"key_spec": jq.QuantSpec("int16")}, TypeError, "key_spec: expected an integer dtype of 8 bits or fewer"),
    ({"value_spec": jq.QuantSpec("uint8", jq.PerToken())}, ValueError, "value_spec: expected a signed symmetric spec"),
    ({"value_spec": jq.QuantSpec("int8", jq.PerAxis(-1))}, ValueError, "value_spec: expected a scale for all"),
    ({"key_spec": jq.QuantSpec("int8", jq.PerAxis(-1))}, ValueError, "rhs: expected one scale along the contracted"),
    ({"weight_digits": True}, TypeError, "weight_digits: expected an int"),
]


@pytest.mark.parametrize(("changes", "error", "text"), ERRORS)
def test_errors(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"jaxquant\.quantized_dot_product_attention: " + text):
        jq.quantized_dot_product_attention(**{"query": Q, "key": K, "value": K, **changes})
