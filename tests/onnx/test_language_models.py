"""The decode step of `examples/decoder.py` in ONNX Runtime: the arrays of its caches are inputs and outputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.decoders import VOCABULARY, decoder, model
from ..oracles import onnx_runtime
from ..support.matrix import mark_others_full

__all__ = ["decoder", "model"]  # fixtures

LENGTH, STEPS, PROMPT = 40, 32, 5
ONE, FIRST = np.ones(1, np.int32), np.zeros((1, 1), np.int32)  # tokens of a row that count, and which logits to return
RECIPES = {
    "w8a8_static": jq.recipes.w8a8_static(reduce_range=True),
    "w8a8_dynamic": jq.recipes.w8a8_dynamic(reduce_range=True),
    "weight_only_int8": jq.recipes.weight_only_int8(),
    "weight_only_int4": jq.recipes.weight_only_int4(block=16),
    "codes of a file": None,
}
CACHES = ("int8", "int8-int4", "int4", "float32")
CASES = [(model, name, cache) for model in ("llama", "gemma3") for name in RECIPES for cache in CACHES]
FLOATS = [case for case in CASES if "w8a8" not in case[1]]  # of activations
STEPS_BY_DEFAULT = [("llama", "w8a8_static", "int8"), ("llama", "weight_only_int4", "int8-int4")]
# The sums of matrix products of floats have another order in each library.
RUNTIME = [case for case in CASES if "w8a8" in case[1] and case[2] != "float32"]
RUNTIME_BY_DEFAULT = [("llama", "w8a8_dynamic", "int8"), ("gemma3", "w8a8_dynamic", "int8-int4")]
TOKENS_BY_DEFAULT = [("llama", "codes of a file", "int8")]


def quantize(model: Any, name: str, caches: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return a function and its quantized parameters."""
    params, rules = dict(model.params), RECIPES[name]
    if rules is None:
        spec = jq.QuantSpec("int8", jq.Blocked(-1, 16), scale_dtype="float16")
        return model.run, {name: jq.quantize(x, spec) if x.ndim == 2 else x for name, x in params.items()}
    prepared = jq.prepare(model.run, params, FIRST, ONE, FIRST, caches, rules=rules)
    tokens = rng.integers(0, VOCABULARY, (20, 1, 1)).astype(np.int32)
    # Each token follows the tokens before it.
    batches, run = [], jax.jit(model.run)
    for token in tokens:
        batches.append((token, ONE, FIRST, caches))
        _, caches = run(params, *batches[-1])
    return prepared, prepared.convert(params, prepared.calibrate(params, batches, progress=False))


def list_states(function: Any, params: Any, tokens: np.ndarray, caches: Any) -> list[Any]:
    """Return the inputs of the steps that read some tokens one after the other."""
    run, states = jax.jit(getattr(function, "apply", function)), []
    for token in tokens:
        states.append((np.full((1, 1), token, np.int32), ONE, FIRST, caches))
        _, caches = run(params, *states[-1])
    return states


def hold(array: Any) -> Any:
    """Return an array as the runtime has it: numpy has no bfloat16."""
    array, make = np.asarray(array), onnxruntime.OrtValue
    if array.dtype == jnp.bfloat16:
        return make.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), 16)
    return make.ortvalue_from_numpy(array)


@pytest.mark.parametrize(
    ("model", "name", "cache"), mark_others_full(CASES, STEPS_BY_DEFAULT), indirect=["model"]
)  # fmt: skip
def test_a_step(name: str, cache: str, decoder: Any, model: Any, rng: np.random.Generator) -> None:
    """From equal caches codes and logits equal JAX's, but for numbers next to a tie and what follows from them."""
    caches = decoder.create_caches(model.config, 1, LENGTH, cache)
    function, params = quantize(model, name, caches, rng)
    states = list_states(function, params, rng.integers(0, VOCABULARY, 8), caches)
    exported: Any = jqonnx.export(function, params, list(states[0]))
    # The table, which is looked up and makes the logits, is there once: its codes, or its floats.
    names = Counter(array.name.removeprefix("0.") for array in exported.graph.initializer)
    tables = [text for text in names if text.startswith("token_embd.weight") and "scale" not in text]
    assert [names[text] for text in tables] == [1]
    assert sum(np.prod(array.dims) >= VOCABULARY * 32 for array in exported.graph.initializer) == 1
    report = jqonnx.verify(exported, function, params, states, tolerance=1e-4)
    codes = [row for row in report.rows if row.kind == "codes"]
    # Floats between contractions are computed by two libraries, so a number next to a tie may get another code. Codes
    # that follow from it differ by any number; those that differ first are neighbors.
    first = next((row for row in codes if row.differing), None)
    assert first is None or (first.largest == 1 and first.differing <= 0.02 * first.elements), str(report)
    assert bool(codes) == (cache != "float32" or name.startswith("w8a8"))
    assert first is not None or report.is_exact, str(report)


@pytest.mark.parametrize(
    ("model", "name", "cache"), mark_others_full(RUNTIME, RUNTIME_BY_DEFAULT), indirect=["model"]
)  # fmt: skip
def test_a_loaded_step_has_the_bits_of_the_runtime(
    name: str, cache: str, decoder: Any, model: Any, rng: np.random.Generator
) -> None:
    """With ONNX Runtime's roundings of floats, too, all codes, scales and logits are equal."""
    caches = decoder.create_caches(model.config, 1, LENGTH, cache)
    function, params = quantize(model, name, caches, rng)
    states = list_states(function, params, rng.integers(0, VOCABULARY, 8), caches)
    exported: Any = jqonnx.export(function, params, list(states[0]), weights="int8")
    loaded, constants = jqonnx.load(exported, floats="runtime")
    session = jqonnx.make_session(exported)
    inputs, run = [info.name for info in session.get_inputs()], jax.jit(loaded)
    for state in states:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        results: Any = session.run(None, dict(zip(inputs, leaves, strict=True)))
        for actual, expected in zip(run(constants, *leaves), results, strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("model", "name", "cache"), mark_others_full(FLOATS, TOKENS_BY_DEFAULT), indirect=["model"]
)  # fmt: skip
def test_tokens(name: str, cache: str, decoder: Any, model: Any, rng: np.random.Generator) -> None:
    """With float activations both write the same tokens, each with the caches that it has written itself."""
    caches = decoder.create_caches(model.config, 1, LENGTH, cache)
    function, params = quantize(model, name, caches, rng)
    exported: Any = jqonnx.export(function, params, [FIRST, ONE, FIRST, caches])
    session = onnx_runtime.open_session(exported, "all", threads=2)
    run, prompt = jax.jit(getattr(function, "apply", function)), rng.integers(0, VOCABULARY, PROMPT)
    inputs = [info.name for info in session.get_inputs()]
    ours, theirs, token = caches, [hold(leaf) for leaf in jax.tree.leaves(caches)], prompt[0]
    found = []
    for step in range(PROMPT + STEPS - 1):
        token = prompt[step] if step < PROMPT else found[-1]
        arrays = np.full((1, 1), token, np.int32), ONE, FIRST
        logits, ours = run(params, *arrays, ours)
        fed = dict(zip(inputs, [*map(hold, arrays), *theirs], strict=True))
        results: Any = session.run_with_ort_values(None, fed)
        theirs, logits = results[1:], np.asarray(logits)[0, 0]
        found.append(int(logits.argmax()))
        other = int(results[0].numpy()[0, 0].argmax())
        # Only tokens that are equally likely, up to the rounding, may be another choice.
        assert other == found[-1] or logits[found[-1]] - logits[other] < 1e-3
        if other != found[-1]:
            return
    assert len(found) == PROMPT + STEPS - 1
