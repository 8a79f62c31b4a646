"""Errors name the function that was called, also where another public function checks its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq
from jaxquant.calibration import Range

F32 = np.float32


def network(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"]


def check_name(function: str, call: Any) -> None:
    """The name follows the path of a contraction or a weight, if there is one."""
    with pytest.raises((ValueError, TypeError), match=rf"^([^:]*:[^ ].*: |\w+: )?jaxquant\.{function}: ") as caught:
        call()
    assert str(caught.value).count("jaxquant.") == 1


def test_wrong_ranges_and_scales(rng: np.random.Generator) -> None:
    p = {"w": rng.standard_normal((16, 4)), "b": np.zeros((1, 4)), "v": np.eye(4)}
    p = {name: x.astype(F32) for name, x in p.items()}
    x = np.abs(rng.standard_normal((8, 16))).astype(F32)
    prepared = jq.prepare(network, p, x, rules=jq.recipes.onnx_runtime())
    ranges = prepared.calibrate(p, [x])
    q, t = prepared.convert(p, ranges), prepared.trainable(p, ranges, estimator=jq.LSQ())
    learned: Any = t.scales
    wrong: list[Any] = []
    for low in (jnp.zeros(3), jnp.zeros((1, 1), jnp.int32)):
        tree = {name: dict(record) for name, record in ranges.items()}
        tree["w"]["0"] = Range(low, low + 1)
        wrong.append(tree)
        learn = lambda tree=tree: prepared.trainable(p, tree, estimator=jq.LSQ())  # noqa: E731
        check_name(r"Prepared\.trainable", learn)
        check_name(r"Prepared\.merge", lambda tree=tree: prepared.merge(tree, ranges))
    tree = {name: dict(record) for name, record in learned.activations.items()}
    tree["w"]["0"] = tree["w"]["0"]._replace(scale=jnp.ones(3))
    wrong.append(tree)
    weights = {**learned.weights, "w": learned.weights["w"]._replace(scale=jnp.ones(3))}
    for bad in wrong:
        check_name(r"Prepared\.apply", lambda bad=bad: prepared.apply(q.replace(ranges=bad), x))
        check_name(r"Prepared\.convert", lambda bad=bad: prepared.convert(p, bad))
    trees = [prepared.trainable(p, wrong[0])]  # the other one is refused there
    trees += [
        t.replace(scales=dataclasses.replace(learned, **{k: v}))
        for k, v in (("activations", tree), ("weights", weights))
    ]
    for bad in trees:
        check_name(r"Prepared\.fake_apply", lambda bad=bad: prepared.fake_apply(bad, x))
        check_name(r"Prepared\.convert", lambda bad=bad: prepared.convert(bad))


def test_ranges_of_quantizers_and_initial_values() -> None:
    spec = jq.QuantSpec("uint8")
    pairs: list[Any] = [(jnp.zeros(3), jnp.ones(3)), (5.0, 1.0), (np.nan, 1.0), ("a", 1.0), (None, 1.0)]
    for ends in pairs:
        check_name(r"Quantizer\.from_range", lambda ends=ends: jq.Quantizer.from_range(spec, ends))
    check_name(
        r"Quantizer\.from_range", lambda: jq.Quantizer.from_range(jq.QuantSpec("uint8", jq.PerAxis(0)), (0.0, 1.0))
    )
    check_name(r"LSQPlus\.initial", lambda: jq.LSQPlus().initial(jnp.full((2, 2), np.nan), spec))
    for rule in (jq.LSQ(), jq.LSQPlus(), jq.PACT()):
        name = rf"{type(rule).__name__}\.initial"
        check_name(name, lambda rule=rule: rule.initial(jnp.ones((2, 2)), jq.QuantSpec("int8", jq.PerAxis(7))))


def test_passes(rng: np.random.Generator) -> None:
    p = {"w": rng.standard_normal((16, 4)).astype(F32)}
    x = rng.standard_normal((8, 16)).astype(F32)
    prepared = jq.prepare(lambda p, x: x @ p["w"], p, x, rules=jq.recipes.weight_only_int4(block=4))
    spoiled = [np.where(np.arange(8)[:, None] == 3, np.nan, x).astype(F32)]
    check_name(r"ptq\.apply", lambda: ptq.apply(prepared, p, spoiled, ptq.GPTQ()))
    check_name(r"ptq\.apply", lambda: ptq.apply(prepared, p, spoiled, ptq.Nearest(), match_floats=True))
    check_name(r"ptq\.collect", lambda: ptq.collect(prepared, p, spoiled))
