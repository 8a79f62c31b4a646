"""What a layer refuses, by a sentence that begins with the layer's path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.errors import ScopeParamShapeError

import jaxquant as jq
from jaxquant import Dynamic, Learned, Static
from jaxquant import flax as qflax
from jaxquant.flax import linen as qnn

AVERAGE = jq.Static(jq.calibration.moving_average)
W = jq.QuantSpec("int8", jq.PerAxis(-1))
A = jq.QuantSpec("uint8")
X = jnp.linspace(-1, 2, 24, dtype=jnp.float32).reshape(1, 4, 6)


class Head(nn.Module):
    """A layer inside another module, made where it is called."""

    make: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns the layer of x."""
        return self.make(name="head")(x)


class Net(nn.Module):
    """The module around it."""

    make: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns the head of x."""
        return Head(self.make, name="block")(x)


class Assigned(nn.Module):
    """A layer that is made before it has a name."""

    make: Callable[..., nn.Module]

    def setup(self) -> None:
        """Makes it."""
        self.head = self.make()

    def __call__(self, x: Any) -> Any:
        """Returns the layer of x."""
        return self.head(x)


def dense(**way: Any) -> Callable[..., nn.Module]:
    return functools.partial(qnn.Dense, 5, **way)


def conv(**way: Any) -> Callable[..., nn.Module]:
    return functools.partial(qnn.Conv, 4, (3,), **way)


def embed(**way: Any) -> Callable[..., nn.Module]:
    return functools.partial(qnn.Embed, 5, 4, **way)


LAX = jax.lax.dot_general
INT8 = jq.QuantSpec("int8")
NESTED = jq.QuantSpec("int8", scale_spec=jq.QuantSpec("uint8"))
ROUNDED = jq.QuantSpec("int4", power_of_two=True)
# what is made, the error, what it says after the path
SPECS: dict[str, tuple[Callable[..., nn.Module], type[Exception], str]] = {
    "no weight": (dense(), TypeError, r"flax\.linen: weight_spec: expected a QuantSpec .*, got None"),
    "no spec": (dense(weight_spec="int8"), TypeError, r"flax\.linen: weight_spec: expected a QuantSpec .*, got 'int8'"),
    "activation": (dense(weight_spec=W, activation_spec=8), TypeError, r"activation_spec: expected a QuantSpec, or None .*, got 8"),
    "nf4": (dense(weight_spec=jq.QuantSpec(jq.nf4), activation_spec=A), TypeError, r"weight_spec: expected codes of int8.*, got nf4"),
    "int16": (conv(weight_spec=jq.QuantSpec("int16"), activation_spec=A), TypeError, r"weight_spec: expected codes of .*, got int16"),
    "float8": (dense(weight_spec=W, activation_spec=jq.QuantSpec("float8_e5m2")), TypeError, r"activation_spec: .*, got float8_e5m2"),
    "observed weights": (dense(weight_spec=W, weight_range=Static(jq.calibration.moving_average)), TypeError, r"weight_range: expected Dynamic\(\) or L"),
    "no range": (conv(weight_spec=W, activation_range="minmax"), TypeError, r"activation_range: expected Dynamic\(\), S"),
    "unsigned weights": (dense(weight_spec=A, weight_range=Learned()), ValueError, r"weight_spec: expected a signed dtype, sym"),
    "powers": (dense(weight_spec=ROUNDED, weight_range=Learned()), ValueError, r"weight_spec: expected a spec without power_of"),
    "offset": (dense(weight_spec=jq.QuantSpec("uint4", offset=True), weight_range=Learned()), ValueError, r"weight_range: expected Dynamic\(\), because no"),
    "nested": (conv(weight_spec=W, activation_spec=NESTED), ValueError, r"activation_spec: expected a spec without an offset"),
    "promoted": (embed(weight_spec=W, promote_dtype=jnp.asarray), ValueError, r"promote_dtype: expected jq\.flax"),
    "embedding": (embed(weight_spec=None), TypeError, r"flax\.linen: weight_spec: expected a QuantSpec"),
    "einsum": (functools.partial(qnn.Einsum, (6, 5), "...i,ij->...j"), TypeError, r"weight_spec: expected a Quant"),
    "mask": (conv(weight_spec=W, mask=jnp.ones((3, 6, 4))), ValueError, r"flax\.linen: mask: expected None"),
    "contraction": (dense(weight_spec=W, dot_general=LAX), ValueError, r"dot_general: expected None, because this layer has"),
    "class": (dense(weight_spec=W, dot_general_cls=lambda: LAX), ValueError, r"dot_general_cls: expected None, because"),
}  # fmt: skip
CALLS: dict[str, tuple[Callable[..., nn.Module], type[Exception], str]] = {
    "inputs": (dense(weight_spec=jq.QuantSpec("int8", jq.PerAxis(0)), activation_spec=A), ValueError,
               r"quantized_dot_general: rhs: expected one scale along the contracted dimension 0"),
    "features": (dense(weight_spec=W, activation_spec=jq.QuantSpec("int8", jq.PerAxis(-1))), ValueError,
                 r"quantized_dot_general: lhs: expected one scale along the contracted dimension"),
    "no axis": (dense(weight_spec=jq.QuantSpec("int8", jq.PerAxis(2)), activation_spec=A), ValueError, r"axis"),
    "blocked": (conv(weight_spec=jq.QuantSpec("int8", jq.Blocked(1, 2)), activation_spec=A), ValueError,
                r"quantized_conv_general_dilated: rhs.scale: expected one scale, or one for each output feature"),
    "backward": (dense(weight_spec=W, backward=True), TypeError, r"backward: expected FloatBackward\(\), Int8Backward\(\) or Float8Backward\(\)"),
    "int8 back": (dense(weight_spec=W, backward=jq.Int8Backward()), ValueError, r"backward: expected FloatBackward\(\), because"),
    "offset back": (dense(weight_spec=jq.QuantSpec("uint4", offset=True), activation_spec=A, backward=jq.Int8Backward()), ValueError,
                    r"flax: backward: expected FloatBackward\(\), because weight_spec has an offset"),
    "equation": (functools.partial(qnn.Einsum, (6, 5), "...i,ij", weight_spec=W), ValueError, r"einsum_str: expected two"),
    "no integers": (embed(weight_spec=W), TypeError, r"flax\.linen: inputs: expected an integer dtype, got float32"),
    "bfloat16": (functools.partial(nn.Dense, 5, dtype=jnp.bfloat16, dot_general=qflax.dot_general(W)), TypeError,
                 r"kernel: expected promote_dtype=jq\.flax\.promote_dtype .*, got bfloat16 of float32"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*SPECS, *CALLS])
def test_a_spec_that_no_layer_serves(case: str) -> None:
    make, error, text = {**SPECS, **CALLS}[case]
    for run in (Net(make).init, jax.jit(Net(make).init)):
        with pytest.raises(error, match=rf"^block/head: jaxquant\..*{text}"):
            run(jax.random.key(0), X)
    if case in SPECS:
        name = getattr(make, "func", None).__name__  # type: ignore[union-attr]
        for module in (Assigned(make), nn.Sequential([Assigned(make)])):
            with pytest.raises(error, match=rf"(^|/){name}: jaxquant\..*{text}"):
                module.init(jax.random.key(0), X)
        with pytest.raises(error, match=rf"^{name}: jaxquant\..*{text}"):
            make()


def test_unknown_and_bad_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bits'"):
        qnn.Dense(5, weight_spec=W, bits=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"jaxquant\.flax\.dot_general: weight_spec: expected a QuantSpec"):
        qflax.dot_general(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jaxquant\.flax\.conv_general_dilated: activation_spec: expected codes of"):
        qflax.conv_general_dilated(W, jq.QuantSpec("int16"))
    with pytest.raises(
        TypeError, match=r"jaxquant\.Static: calibrator: expected a function from a spec to a calibrator.*, got None"
    ):
        Static(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"jaxquant\.Static: freeze_after: expected a positive int, got 0"):
        Static(jq.calibration.moving_average, freeze_after=0)
    with pytest.raises(TypeError, match=r"jaxquant\.Static: gradient: expected StraightThrough\(\), got LSQ"):
        Static(jq.calibration.moving_average, gradient=jq.LSQ())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jaxquant\.Learned: gradient: expected LSQ\(\) or LSQPlus\(\) or PACT\(\)"):
        Learned(jq.StraightThrough())  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"jaxquant\.Dynamic: calibrator: expected a function from a spec to a calibrator.* or None"
    ):
        Dynamic(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jaxquant\.flax\.convert: module: expected a flax\.linen\.Module"):
        qflax.convert(qnn.Dense, {})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"jaxquant\.flax\.convert: variables: expected variables of a quantized module"
    ):
        qflax.convert(nn.Dense(5), nn.Dense(5).init(jax.random.key(0), X))


@functools.cache
def trained(**way: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(module, its variables, these converted)."""
    module = Net(dense(**{"weight_spec": W, "activation_spec": A, "activation_range": AVERAGE, **way}))
    variables = module.init(jax.random.key(0), X)
    _, updates = module.apply(variables, X, mutable=["ranges"])
    variables = {**variables, **updates}
    return module, variables, qflax.convert(module, variables)


def with_kernel(variables: Any, kernel: Any) -> Any:
    layer = variables["params"]["block"]["head"]
    return {**variables, "params": {"block": {"head": {**layer, "kernel": kernel}}}}


@pytest.mark.slow
def test_a_layer_that_saw_no_data() -> None:
    module, variables, _ = trained()
    unseen = {**variables, "ranges": module.init(jax.random.key(0), X)["ranges"]}
    with pytest.raises(
        ValueError, match=r"^block/head: jaxquant\.flax\.convert: activation: expected a range: .*no data"
    ):
        qflax.convert(module, unseen)
    with pytest.raises(
        ValueError,
        match=r'^block/head: jaxquant\.flax: activation: expected a range: call apply\(.*mutable=\["ranges"\]\).*no data',
    ):
        module.apply(unseen, X)
    assert np.isnan(jax.jit(module.apply)(unseen, X)).all(), "where it cannot raise"
    for x, problem in ((X[:0], "no data"), (X * np.nan, "a NaN"), (X * np.inf, "a NaN|an infinity")):
        _, updates = jax.jit(functools.partial(module.apply, mutable=["ranges"]))(unseen, x)
        function = r"(calibration\.moving_average\.finalize: state|flax\.convert: activation)"
        with pytest.raises(ValueError, match=rf"^block/head: jaxquant\.{function}: .*got ({problem})"):
            qflax.convert(module, {**unseen, **updates})


@pytest.mark.slow
def test_collections_that_are_missing() -> None:
    module, variables, serving = trained()
    with pytest.raises(
        ValueError, match=r'^block/head: .*activation: expected it in the collection "ranges", or apply'
    ):
        module.apply({"params": variables["params"]}, X)
    with pytest.raises(ValueError, match=r'^block/head: .*activation: expected its range in the collection "ranges"'):
        module.apply({"params": serving["params"]}, X)
    with pytest.raises(ValueError, match=r'^block/head: .*activation: expected its range in the collection "ranges"'):
        module.apply({**variables, "params": serving["params"]}, X)
    with pytest.raises(ValueError, match=r"^block/head: .*expected the state of a calibrator.*, got the constants"):
        module.apply({**serving, "params": variables["params"]}, X)
    learned, variables, _ = trained(weight_range=Learned(), activation_range=Learned(jq.LSQPlus()))
    rest = {name: tree for name, tree in variables.items() if name != "scales"}
    with pytest.raises(
        ValueError, match=r'^block/head: .*activation: expected it in the collection "scales", or apply'
    ):
        learned.apply(rest, X)
    with pytest.raises(
        ValueError, match=r'^block/head: .*convert: weight_scale: expected it in the collection "scales"'
    ):
        qflax.convert(learned, rest)
    with pytest.raises(
        ValueError, match=r"^block/head: .*convert: params\['kernel'\]: expected a float kernel, got none"
    ):
        qflax.convert(learned, {**variables, "params": {}})
    with pytest.raises(
        ValueError,
        match=r"^block/head: .*convert: params\['kernel'\]: expected a float kernel, got a kernel that is already conv",
    ):
        qflax.convert(module, {**trained()[1], "params": serving["params"]})


@pytest.mark.slow
def test_checkpoints_of_other_shapes() -> None:
    module, variables, serving = trained()
    wide = jnp.ones((7, 5))
    with pytest.raises(ScopeParamShapeError, match=r'"kernel" in "/block/head".* \(6, 5\).* \(7, 5\)'):
        module.apply(with_kernel(variables, wide), X)
    with pytest.raises(
        ValueError, match=r"^block/head: .*convert: params\['kernel'\]: expected shape \(6, 5\).*\(7, 5\)"
    ):
        qflax.convert(module, with_kernel(variables, wide))
    with pytest.raises(ScopeParamShapeError, match=r'"kernel" in "/block/head".* \(6, 5\).* \(7, 5\)'):
        module.apply(with_kernel(serving, jq.quantize(wide, W)), X)
    kernel = serving["params"]["block"]["head"]["kernel"]
    for run in (module.apply, jax.jit(module.apply)):
        with pytest.raises(
            ValueError, match=r"^block/head: .*weight_spec: expected scales of shape \(1, 5\).*, got shape \(1, 4\)"
        ):
            run(with_kernel(serving, kernel.replace(scale=jnp.ones((1, 4)))), X)
        with pytest.raises(TypeError, match=r"^block/head: .*weight_spec: expected codes of int8, .*, got int4"):
            run(with_kernel(serving, jq.quantize(jnp.ones((6, 5)), jq.QuantSpec("int4"))), X)
    constants = {"scale": jnp.ones((1, 1, 6)), "zero_point": jnp.zeros((1, 1, 6), jnp.uint8)}
    other = {"block": {"head": {"DotGeneral_0": {"activation": constants}}}}
    with pytest.raises(
        ValueError, match=r"^block/head: .*activation\.scale: expected one element.*, got shape \(1, 1, 6\)"
    ):
        module.apply({**serving, "ranges": other}, X)
    learned, variables, _ = trained(weight_range=Learned(), activation_range=Learned(jq.LSQPlus()))
    scales = variables["scales"]["block"]["head"]["DotGeneral_0"]
    for name, text in (("weight_scale", "weight|rhs_spec"), ("activation_scale", "activation|lhs_spec")):
        bad = {"block": {"head": {"DotGeneral_0": {**scales, name: jnp.ones((1, 4))}}}}
        with pytest.raises(ValueError, match=rf"^block/head: .*({text})\.scale: expected one element.*shape \(1, 4\)"):
            learned.apply({**variables, "scales": bad}, X)
        if name == "weight_scale":
            with pytest.raises(ValueError, match=r"^block/head: .*weight\.scale: expected one element.*shape \(1, 4\)"):
                qflax.convert(learned, {**variables, "scales": bad})


@pytest.mark.slow
def test_a_draw_without_a_key() -> None:
    _, variables, serving = trained()
    module = Net(
        dense(
            weight_spec=W,
            activation_spec=A,
            activation_range=AVERAGE,
            backward=jq.Int8Backward(stochastic_rounding=True),
        )
    )
    assert "params" in module.init(jax.random.key(0), X)
    y = module.apply(variables, X)  # nothing is drawn on the way forward
    np.testing.assert_array_equal(module.apply(serving, X), y)

    def loss(params: Any, **rngs: Any) -> Any:
        return module.apply({**variables, "params": params}, X, **rngs).sum()  # type: ignore[union-attr]

    with pytest.raises(ValueError, match=r'key: expected a key, .*a Linen layer takes it from the rng "rounding"'):
        jax.grad(loss)(variables["params"])
    gradients = jax.grad(loss)(variables["params"], rngs={"rounding": jax.random.key(0)})
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_normalisation_that_does_not_fit() -> None:
    stats = {"mean": jnp.zeros(5), "var": jnp.ones(5)}
    fold = functools.partial(qflax.fold_batch_norm, {"kernel": jnp.ones((3, 5))})
    with pytest.raises(ValueError, match=r'jaxquant\.flax\.fold_batch_norm: stats: expected a mapping with "var"'):
        fold({}, {"mean": stats["mean"]})
    with pytest.raises(ValueError, match=r'norm\["scale"\]: expected shape \(5,\).*, got shape \(4,\)'):
        fold({"scale": jnp.ones(4)}, stats)
    with pytest.raises(TypeError, match=r"epsilon: expected a static Python number"):
        fold({}, stats, epsilon="1e-5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'layer: expected a mapping with "kernel", got \[\]'):
        qflax.fold_batch_norm({}, {}, stats)
    with pytest.raises(ValueError, match=r"stats: expected a mapping with \"mean\", got \['norm'\]"):
        fold({}, {"norm": stats})
    with pytest.raises(ValueError, match=r"norm: expected a mapping with \"scale\" and \"bias\".*, got \['norm'\]"):
        fold({"norm": {"scale": jnp.ones(5)}}, stats)
    with pytest.raises(TypeError, match=r'layer\["kernel"\]: expected an array of floats, got QuantizedArray'):
        qflax.fold_batch_norm({"kernel": jq.quantize(jnp.ones((3, 5)), W)}, {}, stats)


@pytest.mark.slow
def test_variables_that_cannot_be_converted() -> None:
    """A kernel that training lost, a learned scale that it brought to 0, and constants that a module does not take."""
    layer = qnn.Dense(4, weight_spec=W, activation_spec=A, weight_range=jq.Learned())
    x = jnp.ones((3, 6))
    variables = layer.init(jax.random.key(0), x)
    variables = {**variables, **layer.apply(variables, x, mutable=["ranges"])[1]}
    zero = {**variables, "scales": jax.tree.map(jnp.zeros_like, variables["scales"])}
    with pytest.raises(
        ValueError, match=r"Dense: .*scale of the weight: expected a positive scale \(training drove it to 0\), got"
    ):
        qflax.convert(layer, zero)
    broken = {**variables, "scales": jax.tree.map(lambda s: s * jnp.nan, variables["scales"])}
    with pytest.raises(ValueError, match=r"Dense: .*scale of the weight: expected finite numbers"):
        qflax.convert(layer, broken)
    serving = qflax.convert(layer, variables)
    with pytest.raises(
        ValueError, match=r"Dense.*activation_spec: expected what the variables were converted with: .*None"
    ):
        qnn.Dense(4, weight_spec=W).apply(serving, x)


@pytest.mark.slow
def test_variables_of_another_spec() -> None:
    """What changes a number is an error until a mutable call has seen it; what changes none is not."""
    _, variables, serving = trained()
    whole, narrow = jq.QuantSpec("int8"), jq.QuantSpec("int8", jq.PerAxis(-1), narrow_range=False)
    others: list[tuple[str, Any]] = [
        ("weight_spec", {"weight_spec": whole}), ("weight_spec", {"weight_spec": narrow}), ("weight_spec", {"weight_range": Dynamic(jq.calibration.mse)}),
        ("activation_spec", {"activation_spec": jq.QuantSpec("int8")}), ("activation_spec", {"activation_range": Static(jq.calibration.minmax)}),
        ("activation_spec", {"activation_spec": None, "activation_range": Dynamic()}), ("activation_spec", {"activation_range": Dynamic()}),
    ]  # fmt: skip
    for name, way in others:
        other = Net(dense(**{"weight_spec": W, "activation_spec": A, "activation_range": AVERAGE, **way}))
        for run in (other.apply, jax.jit(other.apply)):
            with pytest.raises(ValueError, match=rf"^block/head: .*{name}: expected what the variables were made with"):
                run(variables, X)
        fresh = {**variables, "ranges": other.init(jax.random.key(0), X)["ranges"]}
        _, updates = other.apply(fresh, X, mutable=["ranges"])
        fresh = {**fresh, **updates}
        expected = other.apply(fresh, X)
        np.testing.assert_array_equal(other.apply(qflax.convert(other, fresh), X), expected)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^block/head: .*weight_spec: expected scales of shape \(1, 1\).*, got shape \(1, 5\)"
    ):  # without what convert wrote of the specs, the arrays tell
        Net(dense(weight_spec=whole)).apply({"params": serving["params"]}, X)
    blocks = jq.QuantSpec("int4", jq.Blocked(0, 3))
    layer = qnn.Dense(5, weight_spec=blocks)
    served = qflax.convert(layer, layer.init(jax.random.key(0), X))
    assert layer.apply(served, X) is not None
    with pytest.raises(ValueError, match=r"weight_spec: expected what the variables were converted with: .*size=3"):
        qnn.Dense(5, weight_spec=jq.QuantSpec("int4", jq.Blocked(0, 4))).apply(served, X)
    with pytest.raises(ValueError, match=r"weight_spec: expected block_size=4, got 3"):
        qnn.Dense(5, weight_spec=jq.QuantSpec("int4", jq.Blocked(0, 4))).apply({"params": served["params"]}, X)
    equivalent = Net(
        dense(
            weight_spec=W,
            activation_spec=A,
            activation_range=Static(jq.calibration.moving_average, freeze_after=9),
            backward=jq.Int8Backward(),
        )
    )
    np.testing.assert_array_equal(equivalent.apply(variables, X), trained()[0].apply(variables, X))


@pytest.mark.slow
def test_what_a_learned_scale_cannot_hold() -> None:
    """LSQ's zero point of unsigned codes is 0; PACT clips there by intent, LSQ+ learns it."""
    layer = functools.partial(qnn.Dense, 5, weight_spec=W, activation_spec=A)
    with pytest.raises(ValueError, match=r"Dense: .*activation: expected values that are not negative.*, got -1 among"):
        layer(activation_range=Learned()).init(jax.random.key(0), X)
    for source, x in ((Learned(), X + 1), (Learned(jq.PACT()), X), (Learned(jq.LSQPlus()), X)):
        assert "scales" in layer(activation_range=source).init(jax.random.key(0), x)
    signed = functools.partial(
        qnn.Dense, 5, weight_spec=W, activation_spec=jq.QuantSpec("int8"), activation_range=Learned()
    )
    assert "scales" in signed().init(jax.random.key(0), X)
    traced = jax.jit(layer(activation_range=Learned()).init)(jax.random.key(0), X)  # where nobody can look
    assert "scales" in traced
    variables = qnn.Dense(5, weight_spec=A, weight_range=Learned(jq.LSQPlus())).init(jax.random.key(0), X)
    assert "weight_zero_point" in variables["scales"]["DotGeneral_0"]


@pytest.mark.slow
def test_what_a_user_mixes_up() -> None:
    with pytest.raises(
        ValueError, match=r"DotGeneral: expected a call by a Linen layer .*jaxquant\.flax\.nnx\.dot_general"
    ):
        qflax.dot_general(W)(X[0], jnp.ones((6, 5)), (((1,), (0,)), ((), ())))
    table = qnn.Embed(5, 6, weight_spec=W, activation_spec=A, activation_range=AVERAGE)
    variables = table.init(jax.random.key(0), jnp.arange(3))
    _, updates = table.apply(variables, jnp.arange(3), mutable=["ranges"])
    with pytest.raises(
        ValueError, match=r"Embed: .*a method that calls attend; or set activation_spec=None.*, got no data"
    ):
        qflax.convert(table, {**variables, **updates})
    scanned = nn.scan(Stacked, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    with pytest.raises(ValueError, match=r'"ranges".*\(nn\.scan and nn\.vmap need the collection in variable_axes\)'):
        scanned().init(jax.random.key(0), X)


class Stacked(nn.Module):
    """One layer of a scan."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        """Returns the layer of x, as a carry."""
        return qnn.Dense(6, weight_spec=W, activation_spec=A, activation_range=AVERAGE)(x), None


@pytest.mark.slow
def test_an_empty_batch_is_not_counted() -> None:
    layer = qnn.Dense(
        4, weight_spec=W, activation_spec=A, activation_range=jq.Static(jq.calibration.moving_average, freeze_after=1)
    )
    x = jnp.ones((3, 6))
    variables = layer.init(jax.random.key(0), x[:0])
    for batch in (x[:0], x):
        _, updates = jax.jit(lambda v, b: layer.apply(v, b, mutable=["ranges"]))(variables, batch)
        variables = {**variables, **updates}
    assert int(variables["ranges"]["DotGeneral_0"]["activation"]["batches"]) == 1
    assert jnp.isfinite(jnp.asarray(layer.apply(variables, x))).all()


@pytest.mark.parametrize("source", [AVERAGE, Learned()])
def test_a_range_without_a_spec_is_refused(source: Any) -> None:
    """The activations stay floats, so their range would be ignored."""
    text = r"Dense: .*activation_range: expected Dynamic\(\), the default, because activation_spec is None"
    with pytest.raises(ValueError, match=text):
        qnn.Dense(3, weight_spec=W, activation_range=source)
