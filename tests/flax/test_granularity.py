"""Granularities that fit any rank and any kernel, blocks as long as their axis, and folding along the right axis."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import jaxquant as jq
from jaxquant import Dynamic, Learned, Static, checkpoint
from jaxquant import flax as qflax
from jaxquant.checkpoint.arrays import StaticText
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

AVERAGE, MINMAX = jq.Static(jq.calibration.moving_average), jq.Static(jq.calibration.minmax)
F32 = np.float32
W, A = jq.QuantSpec("int8", jq.PerFeature()), jq.QuantSpec("uint8")
PROMOTE: Any = qflax.promote_dtype
TOKENS = jq.QuantSpec("int8", jq.PerToken())


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).normal(0.2, 1, shape).astype(F32))


@pytest.mark.slow
def test_per_token_and_per_feature_fit_every_rank() -> None:
    for shape in ((5,), (2, 5), (2, 3, 5)):
        x = draw(*shape)
        tokens, features = (jq.quantize(x, jq.QuantSpec("int8", g)) for g in (jq.PerToken(), jq.PerFeature()))
        axes = tuple(range(len(shape) - 1))
        by_axes = jq.QuantSpec("int8", jq.PerAxis(axes) if axes else jq.PerTensor())
        for q, spec in ((tokens, by_axes), (features, jq.QuantSpec("int8", jq.PerAxis(-1)))):
            jax.tree.map(np.testing.assert_array_equal, q, jq.quantize(x, spec))
        assert tokens.scale.shape == (*shape[:-1], 1)
        assert features.scale.shape == (*(1,) * (len(shape) - 1), 5)
    state = jq.calibration.minmax(TOKENS).init(draw(4, 3))
    assert jq.calibration.minmax(TOKENS).update(state, draw(4, 3)).low.shape == (4, 1)
    with pytest.raises(ValueError, match=r"quantize: axis: .*rank 0"):
        jq.quantize(1.0, TOKENS)


SPECS: Any = {"weight_spec": W, "activation_spec": A, "activation_range": AVERAGE}
# what is made, its inputs, and the shape of the scale of its kernel
KERNELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...]]] = {
    "dense": (lambda: qnn.Dense(3, **SPECS), (2, 4), (1, 3)),
    "general": (lambda: qnn.DenseGeneral((2, 3), **SPECS), (2, 4), (1, 2, 3)),
    "general, axes": (lambda: qnn.DenseGeneral(3, axis=(-2, -1), **SPECS), (2, 4, 5), (1, 1, 3)),
    "general, batches": (lambda: qnn.DenseGeneral(3, batch_dims=(0,), **SPECS), (2, 4, 5), (2, 1, 3)),
    "einsum": (lambda: qnn.Einsum((3, 4), "bd,hd->bh", use_bias=False, **SPECS), (2, 4), (3, 1)),
    "einsum, dots": (lambda: qnn.Einsum((4, 3), "...d,dh->...h", use_bias=False, **SPECS), (2, 5, 4),
                     (1, 3)),
    "conv": (lambda: qnn.Conv(6, (3,), feature_group_count=2, **SPECS), (2, 5, 4), (1, 1, 6)),
    "flax's": (lambda: nn.Dense(3, dot_general=qflax.dot_general(W, A, activation_range=AVERAGE),
                               promote_dtype=PROMOTE), (2, 4), (1, 3)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", list(KERNELS))
def test_linen_weights_have_a_scale_for_each_output_feature(case: str) -> None:
    make, shape, scale = KERNELS[case]
    module, x = make(), draw(*shape)
    variables = qflax.calibrate(module, module.init(jax.random.key(0), x), [x])
    serving = qflax.convert(module, variables)
    assert serving["params"]["kernel"].scale.shape == scale
    np.testing.assert_array_equal(jax.jit(module.apply)(serving, x), jax.jit(module.apply)(variables, x))


R = nnx.Rngs(0)
NNX_KERNELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda: qnnx.Linear(4, 3, **SPECS, rngs=R), (2, 4), (1, 3)),
    "learned": (lambda: qnnx.Linear(4, 3, **SPECS, weight_range=Learned(), rngs=R), (2, 4), (1, 3)),
    "general": (lambda: qnnx.LinearGeneral(4, (2, 3), **SPECS, rngs=R), (2, 4), (1, 2, 3)),
    "general, batches": (lambda: qnnx.LinearGeneral(5, 3, axis=(2,), batch_axis={0: 2}, **SPECS, rngs=R),
                         (2, 4, 5), (2, 1, 3)),
    "einsum": (lambda: qnnx.Einsum("bd,hd->bh", (3, 4), **SPECS, rngs=R), (2, 4), (3, 1)),
    "conv": (lambda: qnnx.Conv(4, 6, (3,), **SPECS, rngs=R), (2, 5, 4), (1, 1, 6)),
    "flax's": (lambda: nnx.Linear(4, 3, dot_general=qnnx.dot_general(W, A, activation_range=AVERAGE),
                                    promote_dtype=qnnx.promote_dtype, rngs=R), (2, 4), (1, 3)),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(NNX_KERNELS))
def test_nnx_weights_have_a_scale_for_each_output_feature(case: str) -> None:
    make, shape, scale = NNX_KERNELS[case]
    model, x = make(), draw(*shape)
    if case == "learned":
        qnnx.start(model, x)
    qnnx.calibrate(model, [x])
    model.eval()
    serving = qnnx.convert(model)
    assert serving.kernel.get_value().scale.shape == scale
    np.testing.assert_array_equal(serving(x), model(x))


@pytest.mark.slow
def test_tables_have_a_scale_for_each_row() -> None:
    tokens, query = jnp.arange(6), draw(2, 4)
    layer = qnn.Embed(6, 4, weight_spec=W, activation_spec=A, activation_range=AVERAGE)
    variables = layer.init(jax.random.key(0), tokens)
    variables = qflax.calibrate(layer, variables, [query], method="attend")
    serving = qflax.convert(layer, variables)
    assert serving["params"]["embedding"].scale.shape == (6, 1)
    for method, inputs in (("attend", query), (None, tokens)):
        np.testing.assert_array_equal(layer.apply(serving, inputs, method=method),
                                      layer.apply(variables, inputs, method=method))  # fmt: skip
    model = qnnx.Embed(6, 4, weight_spec=W, activation_spec=A, activation_range=AVERAGE, rngs=nnx.Rngs(0))
    qnnx.calibrate(model, [query], method="attend")
    table: Any = qnnx.convert(model).embedding.get_value()
    assert table.scale.shape == (6, 1)


@pytest.mark.slow
def test_a_scale_per_token_at_any_rank() -> None:
    layer = qnn.Dense(3, weight_spec=W, activation_spec=TOKENS, activation_range=Dynamic())
    variables = layer.init(jax.random.key(0), draw(2, 4))
    serving = qflax.convert(layer, variables)
    x = draw(2, 5, 4)
    rows: list[Any] = [layer.apply(serving, x[i, j]) for i in range(2) for j in range(5)]
    np.testing.assert_array_equal(layer.apply(serving, x), np.stack(rows).reshape(2, 5, 3))


@pytest.mark.slow
def test_static_ranges_fit_every_batch() -> None:
    text = r"activation_spec: expected PerTensor\(\), PerFeature\(\), or activation_range=Dynamic\(\)"
    for granularity in (jq.PerAxis(0), jq.PerAxis((0, 1)), jq.PerToken(), jq.Blocked(-1, 2)):
        spec = jq.QuantSpec("uint8", granularity)
        for source in (Static(jq.calibration.moving_average), Learned(jq.LSQPlus())):
            with pytest.raises(ValueError, match=rf"^Dense: jaxquant\.flax\.linen: {text}"):
                qnn.Dense(3, weight_spec=W, activation_spec=spec, activation_range=source)
            with pytest.raises(ValueError, match=rf"^Linear.*: jaxquant\.flax\.nnx: {text}"):
                qnnx.Linear(4, 3, weight_spec=W, activation_spec=spec, activation_range=source, rngs=nnx.Rngs(0))
        qnn.Dense(3, weight_spec=W, activation_spec=spec, activation_range=Dynamic())
    # A range per feature, of an axis that is not contracted, at another batch size and another rank.
    spec = jq.QuantSpec("int8", jq.PerFeature())
    specs: Any = {"weight_spec": jq.QuantSpec("int8"), "activation_spec": spec}
    layer = qnn.Einsum((3, 2), "...td,ts->...sd", use_bias=False, **specs, activation_range=MINMAX)
    x = draw(2, 3, 4)
    variables = qflax.calibrate(layer, layer.init(jax.random.key(0), x), [x, x[0], draw(5, 3, 4)])
    serving = qflax.convert(layer, variables)
    for batch in (x, x[0], draw(7, 3, 4)):
        np.testing.assert_array_equal(layer.apply(serving, batch), layer.apply(variables, batch))
    constants = serving["ranges"]["EinsumProduct_0"]["activation"]
    largest = np.abs(np.concatenate([np.asarray(v).reshape(-1, 4) for v in (x, draw(5, 3, 4))])).max(0)
    np.testing.assert_allclose(np.asarray(constants["scale"]).reshape(-1), largest / 127, rtol=1e-6)


# kernels of which a block is as long as the axis, or longer
SHORT: dict[str, tuple[Callable[[jq.QuantSpec], Any], tuple[int, ...], int]] = {
    "dense": (lambda spec: qnn.Dense(3, weight_spec=spec, activation_spec=A, activation_range=AVERAGE), (2, 4), 0),
    "attention's out": (lambda spec: qnn.DenseGeneral(3, axis=(-2, -1), weight_spec=spec), (2, 4, 8), 1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(SHORT))
@pytest.mark.parametrize("size", [3, 4, 8, 32])
def test_a_block_as_long_as_its_axis(case: str, size: int) -> None:
    make, shape, axis = SHORT[case]
    module, x = make(jq.QuantSpec("int4", jq.Blocked(axis, size))), draw(*shape)
    variables = module.init(jax.random.key(0), x)
    _, updates = module.apply(variables, x, mutable=["ranges"])
    variables = {**variables, **updates}
    serving = qflax.convert(module, variables)
    np.testing.assert_array_equal(module.apply(serving, x), module.apply(variables, x))
    model = (
        qnnx.Linear(4, 3, weight_spec=jq.QuantSpec("int4", jq.Blocked(0, size)), rngs=R) if case == "dense" else
        qnnx.LinearGeneral((4, 8), 3, axis=(-2, -1), weight_spec=jq.QuantSpec("int4", jq.Blocked(1, size)), rngs=R)
    )  # fmt: skip
    np.testing.assert_array_equal(qnnx.convert(model)(x), model(x))


@pytest.mark.slow
def test_converted_variables_belong_to_their_specs(tmp_path: Any) -> None:
    """Another activation spec or range source: a different number, which no array would tell."""
    x = draw(2, 4)
    layer = qnn.Dense(3, weight_spec=W, activation_spec=jq.QuantSpec("int8"), activation_range=MINMAX)
    serving = qflax.convert(layer, qflax.calibrate(layer, layer.init(jax.random.key(0), x), [x]))
    others: list[tuple[str, dict[str, Any]]] = [
        ("activation_spec", {"activation_spec": jq.QuantSpec("int4")}),
        ("activation_spec", {"activation_spec": jq.QuantSpec("int8", narrow_range=False)}),
        ("activation_spec", {"activation_range": Dynamic()}),
        ("activation_spec", {"activation_spec": None, "activation_range": Dynamic()}),
        ("weight_spec", {"weight_spec": jq.QuantSpec("int8", jq.PerFeature(), narrow_range=False)}),
    ]  # fmt: skip
    checkpoint.save_safetensors(tmp_path / "a", serving)
    state = serialization.to_state_dict(serving)
    for name, way in others:
        other = layer.clone(**way)
        fresh = other.init(jax.random.key(0), x)
        if isinstance(other.activation_range, Static) and other.activation_spec is not None:
            fresh = qflax.calibrate(other, fresh, [x])
        target = qflax.convert(other, fresh)
        loaded = [serving, checkpoint.load_safetensors(tmp_path / "a"), pickle.loads(pickle.dumps(serving))]
        if "activation_range" not in way and way.get("activation_spec", x) is not None:
            loaded.append(serialization.from_state_dict(target, state))
        for variables in loaded:
            for run in (other.apply, jax.jit(other.apply)):
                with pytest.raises(
                    ValueError, match=rf"Dense: .*{name}: expected what the variables were converted with"
                ):
                    run(variables, x)
    # Static and learned ranges are the same constants once converted.
    equivalent = layer.clone(activation_range=Learned(), weight_spec=jq.QuantSpec("int8", jq.PerAxis(-1)))
    np.testing.assert_array_equal(equivalent.apply(serving, x), layer.apply(serving, x))
    # Variables without the texts: the arrays still tell a static range.
    bare = jax.tree.map(lambda v: None if isinstance(v, StaticText) else v, serving,
                        is_leaf=lambda v: isinstance(v, StaticText))  # fmt: skip
    np.testing.assert_array_equal(layer.apply(bare, x), layer.apply(serving, x))
    with pytest.raises(
        ValueError, match=r"activation_spec: expected a spec with activation_range=Static\(\.\.\.\).*, got Dynamic"
    ):
        layer.clone(activation_range=Dynamic()).apply(bare, x)


class Around(nnx.Module):
    """A model of one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        """Returns what the layer does."""
        return self.layer(x)


@pytest.mark.slow
def test_a_converted_state_belongs_to_its_specs(tmp_path: Any) -> None:
    """A state of NNX in another model: as long as the arrays fit, only the text tells."""
    x = draw(2, 4)

    def make(**keywords: Any) -> Any:
        arguments = {"weight_spec": W, "activation_spec": A, "activation_range": MINMAX, **keywords}
        model = Around(qnnx.Linear(4, 3, rngs=nnx.Rngs(0), **arguments))
        if isinstance(arguments["activation_range"], Learned):
            qnnx.start(model, x)
        else:
            qnnx.calibrate(model, [x])
        return qnnx.convert(model)

    serving = make()
    state = nnx.state(serving)
    pure = nnx.to_pure_dict(state)
    checkpoint.save_safetensors(tmp_path / "a", checkpoint.to_arrays(pure))
    loaded = checkpoint.from_arrays(checkpoint.load_safetensors(tmp_path / "a"))
    others: list[dict[str, Any]] = [
        {"activation_spec": jq.QuantSpec("uint8", narrow_range=True)},
        {"weight_spec": jq.QuantSpec("int8", jq.PerFeature(), narrow_range=False)},
    ]
    for keywords in others:
        for way in ("update", "pure", "file"):
            other = make(**keywords)
            if way == "update":
                nnx.update(other, state)
            else:
                target = nnx.state(other)
                nnx.replace_by_pure_dict(target, pure if way == "pure" else loaded)
                nnx.update(other, target)
            for run in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
                with pytest.raises(
                    ValueError, match=r"^layer: .*nnx: specs: expected the weight_spec and activation_sp"
                ):
                    run(other, x)
    equivalent = make(activation_range=Learned(jq.LSQPlus()), weight_spec=jq.QuantSpec("int8", jq.PerAxis(-1)))
    nnx.update(equivalent, state)
    np.testing.assert_array_equal(equivalent(x), serving(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(serving))(x), serving(x))


def normalization(features: int) -> nnx.BatchNorm:
    rng = np.random.default_rng(5)
    norm = nnx.BatchNorm(features, use_running_average=True, rngs=nnx.Rngs(0))
    for variable in (norm.mean, norm.var, norm.scale, norm.bias):
        assert variable is not None
        variable[...] = jnp.asarray(rng.uniform(0.5, 2, features), F32)
    return norm


FOLDED: dict[str, tuple[Callable[[bool], Any], tuple[int, ...]]] = {
    "linear": (lambda b: nnx.Linear(4, 4, use_bias=b, rngs=R), (2, 4)),
    "general": (lambda b: nnx.LinearGeneral(4, (2, 4), use_bias=b, rngs=R), (2, 4)),
    "einsum": (lambda b: nnx.Einsum("bd,hd->bh", (4, 4), (4,) if b else None, rngs=R), (2, 4)),
    "einsum, two": (lambda b: nnx.Einsum("bd,kdh->bkh", (4, 4, 4), (4, 4) if b else None, rngs=R), (2, 4)),
    "conv": (lambda b: nnx.Conv(4, 4, (3,), use_bias=b, rngs=R), (2, 5, 4)),
    "transposed": (lambda b: nnx.ConvTranspose(4, 4, (3,), use_bias=b, rngs=R), (2, 5, 4)),
    "transposed kernel": (lambda b: nnx.ConvTranspose(4, 4, (3,), use_bias=b, transpose_kernel=True, rngs=R),
                          (2, 5, 4)),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(FOLDED))
@pytest.mark.parametrize("use_bias", [True, False])
def test_nnx_folds_along_the_features(case: str, use_bias: bool) -> None:
    make, shape = FOLDED[case]
    layer, norm, x = make(use_bias), normalization(4), draw(*shape)
    np.testing.assert_allclose(qnnx.fold_batch_norm(layer, norm)(x), norm(layer(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_linen_folds_along_the_axis_it_is_told() -> None:
    x, rng = draw(2, 5, 4), np.random.default_rng(5)
    for transposed in (False, True):
        layer = nn.ConvTranspose(4, (3,), transpose_kernel=transposed)
        norm = nn.BatchNorm(use_running_average=True)
        params = layer.init(jax.random.key(0), x)["params"]
        variables = jax.tree.map(lambda v: jnp.asarray(rng.uniform(0.5, 2, v.shape), F32),
                                 norm.init(jax.random.key(0), x))  # fmt: skip
        folded = qflax.fold_batch_norm(params, variables["params"], variables["batch_stats"],
                                       axis=-2 if transposed else -1)  # fmt: skip
        want = norm.apply(variables, layer.apply({"params": params}, x))
        np.testing.assert_allclose(layer.apply({"params": folded}, x), want, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


class Unknown(nnx.Module):
    """A layer of someone else's."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((4, 4)))


def test_a_normalisation_that_cannot_be_folded() -> None:
    stats = {"mean": jnp.zeros(5), "var": jnp.ones(5)}

    def fold(kernel: Any = None, norm: Any = stats, **rest: Any) -> Any:
        return qflax.fold_batch_norm({"kernel": jnp.ones((3, 5)) if kernel is None else kernel}, {}, norm, **rest)

    for dtype in ("int8", "bool", "complex64"):
        with pytest.raises(TypeError, match=rf'layer\["kernel"\]: expected dtype .*, got {dtype}'):
            fold(jnp.ones((3, 5), dtype))
        with pytest.raises(TypeError, match=rf'stats\["var"\]: expected dtype .*, got {dtype}'):
            fold(norm={**stats, "var": jnp.ones(5, dtype)})
    with pytest.raises(ValueError, match=r"epsilon: expected a number that is not negative, got -1e-05"):
        fold(epsilon=-1e-5)
    for value, text in (
        (-1.0, "not negative, got -1"),
        (np.nan, "not negative, got NaN"),
        (0.0, "normal float32 .*, got 0"),
    ):
        with pytest.raises(ValueError, match=rf'stats\["var"\]: expected numbers? ?.*{text}|stats\["var"\]: .*{text}'):
            fold(norm={**stats, "var": stats["var"].at[2].set(value)}, epsilon=0.0)
    with pytest.raises(
        ValueError, match=r'stats\["var"\]: expected numbers that are normal float32 once epsilon is added.*, got 0'
    ):
        fold(norm={**stats, "var": jnp.zeros(5)}, epsilon=1e-50)
    with pytest.raises(ValueError, match=r'stats\["var"\]: expected finite numbers, got inf'):
        fold(norm={**stats, "var": jnp.full(5, np.inf)})
    with pytest.raises(ValueError, match=r"axis: expected an integer in \[-2, 1\]"):
        fold(axis=2)
    with pytest.raises(ValueError, match=r"an einsum_str with an axis of the kernel alone as the last output axis"):
        qnnx.fold_batch_norm(nnx.Einsum("btd,ts->bsd", (4, 4), rngs=R), normalization(4))
    with pytest.raises(TypeError, match=r"layer: expected a Linear, LinearGeneral, Einsum, Conv or ConvTranspose"):
        qnnx.fold_batch_norm(Unknown(), normalization(4))


@pytest.mark.slow
def test_a_calibrator_is_a_function_of_a_spec() -> None:
    for source in (Static, Dynamic):
        with pytest.raises(
            TypeError, match=r"calibrator: expected a function .*, got the string 'mse': pass the function "
        ):
            source("mse")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r", got a Calibrator, which has a spec already: pass the function that m"):
            source(jq.calibration.minmax(A))  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"or functools\.partial\(percentile, q=\.\.\.\), got percentile, which needs"
        ):
            source(jq.calibration.percentile)  # type: ignore[arg-type]
