"""The rows on Flax layers: a training step and serving, for a network of dense layers and a convolutional network.

"float32 JAX" is the same network with Flax's own layers. "raw integers" is the network's integer arithmetic without
layers, written by hand in one jit: int8 contractions by `lax.dot_general` alone, a multiplication by a scale, relu, and
codes by rounding, clipping and conversion. qwix and aqt quantize the activations in each call, as they do by default. A
step is plain SGD, one jitted function of the parameters and the batch. A shape is the batch size and the width, or the
shape of the images. qwix cannot train if the batch size equals the width.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxquant as jq
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn

from .contest import FLOAT32, QWIX, Call, Contest, Missing, Row, Table

RAW, AQT = "raw integers", "aqt"
_WIDTH, _BATCH, _SMALL = 1024, 1024, 64
_NOT_INSTALLED = Missing("not installed")
_OPTIMIZER = optax.sgd(1e-3)
_WEIGHTS = jq.QuantSpec(jnp.int8, jq.PerAxis(-1))
_SIGNED, _UNSIGNED = jq.QuantSpec(jnp.int8), jq.QuantSpec(jnp.uint8)
_LEARNED = jq.Learned(jq.LSQ())
_Layers = dict[str, Any]


class MLP(nn.Module):
    """Three dense layers of one width."""

    width: int
    dense: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(self.dense(self.width, name="a")(x))
        x = nn.relu(self.dense(self.width, name="b")(x))
        return self.dense(self.width, name="c")(x)


class CNN(nn.Module):
    """Two convolutions that keep the number of features, and a dense layer."""

    conv: Callable[..., Any]
    dense: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.shape[-1]
        x = nn.relu(self.conv(features, (3, 3), name="a")(x))
        x = nn.relu(self.conv(features, (3, 3), name="b")(x))
        return self.dense(10, name="c")(x.mean((1, 2)))


def quantized(network: str, width: int, **specs: Any) -> nn.Module:
    """Return a network of jaxquant's layers."""
    dense = functools.partial(qnn.Dense, **specs)
    return MLP(width, dense) if network == "mlp" else CNN(functools.partial(qnn.Conv, **specs), dense)


def plain(network: str, width: int, dense: Any = nn.Dense) -> nn.Module:
    """Return a network of Flax's layers."""
    return MLP(width, dense) if network == "mlp" else CNN(nn.Conv, dense)


def batch(network: str, shape: tuple[int, ...]) -> jax.Array:
    """Return inputs for a network."""
    sizes = (shape[0], shape[1]) if network == "mlp" else shape
    return jnp.asarray(np.random.default_rng(7).normal(size=sizes), jnp.float32)


def _width(shape: tuple[int, ...]) -> int:
    return shape[1]  # for convolutions, the images determine the width


def step(model: nn.Module, mutable: bool, rngs: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return a jitted training step, from variables and a batch to the logits and new variables."""

    @jax.jit
    def run(trained: Any, state: Any, x: jax.Array) -> Any:
        def loss(trained: Any) -> Any:
            keywords: dict[str, Any] = {"mutable": list(state)} if mutable else {}
            output: Any = model.apply({**trained, **state}, x, rngs=rngs, **keywords)
            logits, new_state = output if mutable else (output, state)
            return jnp.square(logits).mean(), (logits, new_state)

        gradient, (logits, new_state) = jax.grad(loss, has_aux=True)(trained)
        updates, _ = _OPTIMIZER.update(gradient, _OPTIMIZER.init(trained))
        return logits, optax.apply_updates(trained, updates), new_state

    return run


def _split_variables(variables: Any) -> tuple[Any, Any]:
    trained = {name: part for name, part in variables.items() if name in ("params", "scales")}
    return trained, {name: part for name, part in variables.items() if name not in trained}


def _start_ranges(model: nn.Module, params: Any, x: jax.Array) -> Any:
    """Return the variables of a quantized network with these parameters and ranges and scales from x."""
    _, state = model.apply({"params": params}, x, mutable=["ranges", "scales"])
    return {"params": params, **state}


def _params(network: str, shape: tuple[int, ...], x: jax.Array) -> Any:
    return jax.jit(plain(network, _width(shape)).init)(jax.random.key(0), x)["params"]


def _training(network: str, specs: _Layers, shape: tuple[int, ...]) -> Contest:
    x = batch(network, shape)
    params = _params(network, shape, x)
    model = quantized(network, _width(shape), **specs)
    trained, state = _split_variables(_start_ranges(model, params, x))
    ours = step(model, bool(state))
    floats = step(plain(network, _width(shape)), False)
    opponents: dict[str, Call | Missing] = {
        FLOAT32: functools.partial(floats, {"params": params}, {}, x),
        QWIX: _qwix_step(network, shape, params, x),
        AQT: _aqt_step(network, shape, params, x),
    }

    def expected() -> Any:  # the network converted after this batch: the integers of the step's forward pass
        _, _, new_state = ours(trained, state, x)
        return jax.jit(model.apply)(jqf.convert(model, {**trained, **state, **new_state}), x)

    return Contest(
        functools.partial(ours, trained, state, x), opponents, expected, x.nbytes,
        unlike=frozenset(opponents), compared=lambda result: result[0],
    )  # fmt: skip


def _serving(network: str, specs: _Layers, shape: tuple[int, ...]) -> Contest:
    x = batch(network, shape)
    params = _params(network, shape, x)
    model = quantized(network, _width(shape), **specs)
    variables = _start_ranges(model, params, x)
    serving = jqf.convert(model, variables)
    float_model = plain(network, _width(shape))
    opponents: dict[str, Call | Missing] = {
        RAW: _raw(network, serving, x),
        FLOAT32: functools.partial(jax.jit(float_model.apply), {"params": params}, x),
        QWIX: _qwix_serving(network, shape, params, x),
        AQT: _aqt_serving(network, shape, params, x),
    }
    return Contest(
        functools.partial(jax.jit(model.apply), serving, x), opponents,
        functools.partial(jax.jit(model.apply), variables, x), x.nbytes, unlike=frozenset(opponents),
    )  # fmt: skip


def _raw(network: str, serving: Any, x: jax.Array) -> Call | Missing:
    """Return a hand-written integer network of dense layers. Symmetric int8 has no zero points to correct for."""
    if network != "mlp":
        return Missing("none")
    layers = [serving["params"][name] for name in "abc"]
    weights = [(layer["kernel"].codes, layer["kernel"].scale, layer["bias"]) for layer in layers]

    @jax.jit
    def run(x: jax.Array, weights: Any) -> jax.Array:
        for i, (values, scale, bias) in enumerate(weights):
            codes = jnp.clip(jnp.round(x * 40), -127, 127).astype(jnp.int8)
            acc = jax.lax.dot_general(codes, values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
            x = acc.astype(jnp.float32) * (scale / 40) + bias
            x = nn.relu(x) if i < 2 else x
        return x

    return functools.partial(run, x, weights)


# qwix and aqt.


def _try_call(make: Callable[[], Call]) -> Call | Missing:
    """Return a call that runs, or why there is none."""
    try:
        call = make()
        jax.block_until_ready(call())
    except Exception as error:  # any error of another library is reported as its result
        return Missing(f"raises {type(error).__name__}")
    return call


def _qwix_step(network: str, shape: tuple[int, ...], params: Any, x: jax.Array) -> Call | Missing:
    if importlib.util.find_spec("qwix") is None:
        return _NOT_INSTALLED
    import qwix

    def make() -> Call:
        rule = qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
        model = qwix.quantize_model(plain(network, _width(shape)), qwix.QtProvider([rule]))
        return functools.partial(step(model, False), {"params": params}, {}, x)

    return _try_call(make)


def _qwix_serving(network: str, shape: tuple[int, ...], params: Any, x: jax.Array) -> Call | Missing:
    if importlib.util.find_spec("qwix") is None:
        return _NOT_INSTALLED
    import qwix

    def make() -> Call:
        rule = qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
        model = qwix.quantize_model(plain(network, _width(shape)), qwix.PtqProvider([rule]))
        like = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        codes = qwix.quantize_params(params, like)
        return functools.partial(jax.jit(model.apply), {"params": codes}, x)

    return _try_call(make)


def _aqt(**modes: Any) -> Callable[..., Any]:
    """Return Flax's dense layer with aqt's int8 contractions and a float backward pass."""
    from aqt.jax.v2 import config
    from aqt.jax.v2.flax import aqt_flax

    int8 = config.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)
    return functools.partial(nn.Dense, dot_general_cls=functools.partial(aqt_flax.AqtDotGeneral, int8, **modes))


def _aqt_step(network: str, shape: tuple[int, ...], params: Any, x: jax.Array) -> Call | Missing:
    if importlib.util.find_spec("aqt") is None:
        return _NOT_INSTALLED

    def make() -> Call:
        model = plain(network, _width(shape), _aqt())
        return functools.partial(step(model, False, {"params": jax.random.key(1)}), {"params": params}, {}, x)

    return _try_call(make) if network == "mlp" else Missing("dense layers only")


def _aqt_serving(network: str, shape: tuple[int, ...], params: Any, x: jax.Array) -> Call | Missing:
    if importlib.util.find_spec("aqt") is None:
        return _NOT_INSTALLED

    def make() -> Call:
        from aqt.jax.v2 import utils
        from aqt.jax.v2.flax import aqt_flax

        mode = {"rhs_freeze_mode": aqt_flax.FreezerMode.CALIBRATION_AND_VALUE}
        key = {"params": jax.random.key(1)}
        convert, serve = (
            plain(network, _width(shape), _aqt(rhs_quant_mode=quant, **mode))
            for quant in (utils.QuantMode.CONVERT, utils.QuantMode.SERVE)
        )
        output: Any = convert.apply({"params": params}, x, rngs=key, mutable=True)
        run = jax.jit(lambda variables, x: serve.apply(variables, x, rngs=key))
        return functools.partial(run, output[1], x)

    return _try_call(make) if network == "mlp" else Missing("dense layers only")


_AVERAGE = jq.Static(jq.calibration.moving_average)
_INT8 = {"weight_spec": _WEIGHTS, "activation_spec": _SIGNED, "activation_range": _AVERAGE}
_UINT8 = {"weight_spec": _WEIGHTS, "activation_spec": _UNSIGNED, "activation_range": _AVERAGE}
_DYNAMIC = {**_INT8, "activation_range": jq.Dynamic()}
_SHAPES = {
    "mlp": ((_BATCH, _WIDTH, 3), (_BATCH - 24, _WIDTH, 3), (_SMALL, _SMALL, 3)),
    "cnn": ((16, 32, 32, 64), (2, 8, 8, 32)),
}


def _rows(
    kind: str, build: Callable[..., Contest], variants: dict[str, _Layers], networks: tuple[str, ...]
) -> list[Row]:
    return [
        Row(f"{kind} {network}, {name}", shape, functools.partial(build, network, specs, shape))
        for network in networks for name, specs in variants.items() for shape in _SHAPES[network]
    ]  # fmt: skip


TRAINING = Table(
    "A step of training",
    (FLOAT32, QWIX, AQT),
    [
        *_rows("train", _training, {
            "int8 activations, static": _INT8,
            "uint8 activations, static": _UINT8,
            "int8 activations, dynamic": _DYNAMIC,
            "int8, learned scales": {**_INT8, "weight_range": _LEARNED, "activation_range": _LEARNED},
            "int8 activations, static, Int8Backward": {**_INT8, "backward": jq.Int8Backward()},
        }, ("mlp",)),
        *_rows("train", _training, {"int8 activations, static": _INT8}, ("cnn",)),
    ],
)  # fmt: skip
SERVING = Table(
    "Serving converted networks",
    (RAW, FLOAT32, QWIX, AQT),
    _rows("serve", _serving, {
        "int8 activations": _INT8, "uint8 activations": _UINT8, "int8 activations, dynamic": _DYNAMIC,
    }, ("mlp", "cnn")),
)  # fmt: skip
TABLES = (TRAINING, SERVING)
