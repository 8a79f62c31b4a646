"""Products and lookups with weights of 4 bits: MatMulNBits and GatherBlockQuantized on export and on import."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime

SPECS = {
    "blocks": (jq.QuantSpec(jnp.int4, jq.Blocked(0, 32)), 32),
    "long blocks": (jq.QuantSpec(jnp.int4, jq.Blocked(0, 48)), 16),
    "columns": (jq.QuantSpec(jnp.int4, jq.PerAxis(1)), 128),
    "zero points": (jq.QuantSpec(jnp.uint4, jq.Blocked(0, 16), symmetric=False), 16),
}


def list_products(model: onnx.ModelProto) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == "MatMulNBits"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPECS)
def test_weight_only_products(name: str, rng: np.random.Generator) -> None:
    spec, block = SPECS[name]
    w = jq.quantize(jnp.asarray(rng.normal(0, 0.2, (112, 24)), jnp.float32), spec)
    wide = jq.QuantizedArray(
        w.codes.reshape(112, 4, 6), w.scale.reshape(-1, *((4, 6) if w.scale.shape[1] > 1 else (1, 1))),
        None if w.zero_point is None else w.zero_point.reshape(-1, *((4, 6) if w.zero_point.shape[1] > 1 else (1, 1))),
        block_size=w.block_size,
    )  # fmt: skip

    def function(x: jax.Array) -> list[jax.Array]:
        return [jq.matmul(x, w), jq.einsum("btk,khd->bthd", x, wide)]

    x = jnp.asarray(rng.normal(0, 1, (2, 3, 112)), jnp.float32)
    model = jqonnx.export(function, [x], batch="N")
    onnx.checker.check_model(model)
    products = list_products(model)
    assert len(products) == 2
    attributes = {a.name: helper.get_attribute_value(a) for a in products[0].attribute}
    assert (attributes["block_size"], attributes["accuracy_level"]) == (block, 1)
    # The weights take 4 bits in the file.
    assert model.ByteSize() < 2 * (112 * 24 // 2 + 112 // 16 * 24 * 5 + 4 * 128 * 24) + 4000
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, function, [x], level=level, tolerance=1e-5)
        assert report.is_exact, str(report)
    loaded, params = jqonnx.load(model)
    for result, want in zip(jax.jit(loaded)(params, x), jax.jit(function)(x), strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=1e-5)
    assert len(list_products(jqonnx.export(loaded, params, [x], batch="N"))) == 2


@pytest.mark.parametrize("length", [64, 96, 80])
def test_codes_of_the_recipe(length: int, rng: np.random.Generator) -> None:
    """The model holds the codes and the zero points of the recipe, 8 more for unsigned ones, two in a byte."""
    params = {"w": jnp.asarray(rng.normal(0.1, 0.2, (length, 24)), jnp.float32)}
    x = jnp.asarray(rng.normal(0, 1, (2, length)), jnp.float32)
    prepared = jq.prepare(lambda p, x: x @ p["w"], params, x, rules=jq.recipes.weight_only_int4(), strict=True)
    q = prepared.convert(params)
    model = jqonnx.export(prepared, q, [x])
    assert jqonnx.verify(model, prepared, q, [x], tolerance=1e-5).is_exact
    arrays = {array.name: numpy_helper.to_array(array) for array in model.graph.initializer}
    (node,) = list_products(model)
    codes, scale, points = (arrays[name] for name in node.input[1:])

    def unpack(packed: np.ndarray, count: int) -> np.ndarray:
        pairs = np.stack([packed & 15, packed >> 4], -1)
        return pairs.reshape(len(packed), -1)[:, :count].T.astype(np.int8) - 8

    w = q.params["w"]
    np.testing.assert_array_equal(unpack(codes, length), w.codes.astype(jnp.int8))
    np.testing.assert_array_equal(unpack(points, len(w.scale)), w.zero_point.astype(jnp.int8))
    np.testing.assert_array_equal(scale.reshape(24, -1).T, w.scale)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_blocks_without_a_kernel_are_floats(dtype: str, rng: np.random.Generator) -> None:
    """With zero points, the model holds a byte for each code, too: the code minus its zero point."""
    w = jq.quantize(jnp.asarray(rng.normal(0, 0.2, (12, 5)), jnp.float32), jq.QuantSpec(dtype, jq.Blocked(0, 4)))
    x = jnp.asarray(rng.normal(0, 1, (2, 12)), jnp.float32)

    def function(w: jq.QuantizedArray, x: jax.Array) -> jax.Array:
        return jq.matmul(x, w)

    model = jqonnx.export(function, w, [x])
    assert not list_products(model)
    assert jqonnx.verify(model, function, w, [x], tolerance=1e-5).is_exact
    arrays = [numpy_helper.to_array(array) for array in model.graph.initializer]
    (codes,) = [array for array in arrays if array.dtype == np.int8]
    point = 0 if w.zero_point is None else jnp.repeat(w.zero_point.astype(jnp.int8), 4, 0)
    np.testing.assert_array_equal(codes, w.codes.astype(jnp.int8) - point)
    assert sum(array.nbytes for array in arrays) <= 12 * 5 * (1 + 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 128])
def test_rounding_of_the_other_operand(bits: int, block: int, rng: np.random.Generator) -> None:
    """With accuracy_level=4 the floats become int8, and a result is far from the result in floats."""
    k, n = 100, 12
    blocks = -(-k // block)
    b = rng.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.02, (n, blocks)).astype(np.float32)
    x = rng.normal(0, 1, (3, k)).astype(np.float32)
    x[1, :block] = 0  # a block without a range
    results = {}
    for level in (1, 4):
        attributes: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
        node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", **attributes)
        arrays = [numpy_helper.from_array(array, name) for array, name in ((b, "b"), (scales, "s"))]
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
        graph = helper.make_graph([node], "g", infos[:1], infos[1:], arrays)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        fn, params = jqonnx.load(model)
        results[level] = np.asarray(jax.jit(fn)(params, x))
        (expected,) = run_runtime(model, {"x": x})
        np.testing.assert_allclose(results[level], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(results[1] - results[4]).max() > 1e-3


LOOKUPS: dict[str, tuple[Any, tuple[int, int, int], dict[str, int]]] = {
    "bytes of 4 bits": (jnp.uint8, (9, 20, 3), {}),
    "bytes of 8 bits": (jnp.uint8, (9, 40, 3), {"bits": 8}),
    "bytes of 2 bits": (jnp.uint8, (9, 20, 5), {"bits": 2}),
    "columns of int4": (jnp.int4, (80, 9, 5), {"quantize_axis": 0, "gather_axis": 1}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lookups(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Exported, in ONNX Runtime, loaded, and exported again; mapped indices are one node."""
    kind, (rows, columns, blocks), given = LOOKUPS[name]
    attributes = {"block_size": 16, **given}
    cut = attributes.get("quantize_axis", 1)
    data = jnp.asarray(rng.integers(-8, 8, (rows, columns)) % 256, jnp.uint8).astype(kind)
    shape = (blocks, columns) if cut == 0 else (rows, blocks)
    scales = jnp.asarray(rng.uniform(0.1, 1, shape), dtype)
    points = jnp.zeros((rows, -(-blocks * attributes.get("bits", 4) // 8)), kind).at[0, 0].set(3) if cut else None
    indices = jnp.asarray([[0, -1, 7], [3, -9, 2]], jnp.int32)

    def function(indices: jax.Array) -> list[jax.Array]:
        look_up = functools.partial(jq.ops.gather_block_quantized, data, **attributes)
        return [look_up(indices, scales), jax.vmap(lambda row: look_up(row, scales, points))(indices)]

    model = jqonnx.export(function, [indices], batch="N")
    onnx.checker.check_model(model)
    nodes = [node for node in model.graph.node if node.op_type == "GatherBlockQuantized"]
    assert len(nodes) == (2 if attributes.get("bits", 4) in (4, 8) and cut else 0)
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, function, [indices], level=level)
        assert report.is_exact, str(report)
    loaded, params = jqonnx.load(model)
    again = jqonnx.export(loaded, params, [indices], batch="N")
    for result, want in zip(run_runtime(again, {"indices": np.asarray(indices)}), function(indices), strict=True):
        np.testing.assert_array_equal(result, want)
    if nodes:
        assert "GatherBlockQuantized" in loaded.describe(params)
