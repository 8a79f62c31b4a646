"""Operators of object detection, beside ONNX Runtime, or a sum over the elements of windows in numpy."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import make_single, run_runtime


def make_model(op: str, feeds: dict[str, Any], constants: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """Return a model of one operator of ONNX."""
    model = make_single(op, feeds, constants, **attributes)
    model.graph.node[0].domain = ""
    model.opset_import[0].version = 19
    return model


def draw_boxes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return corners, in either order; the first two boxes are the same."""
    boxes = rng.integers(0, 10, (*shape, 4)).astype(np.float32)
    boxes[..., 1, :] = boxes[..., 0, :]
    return boxes


@pytest.mark.sample(3)
@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("known", [(), (3,), (4, 0.3), (30, 0.5, 0.2), (30, 0.0, 0.5)], ids=str)
def test_non_max_suppression(center: int, known: tuple[float, ...], rng: np.random.Generator) -> None:
    boxes, scores = draw_boxes(rng, 2, 25), rng.integers(0, 9, (2, 3, 25)).astype(np.float32) / 8
    constants = {n: np.array([x], d) for n, x, d in zip("mis", known, ("int64", "float32", "float32"), strict=False)}
    feeds = {"boxes": boxes, "scores": scores}
    model = make_model("NonMaxSuppression", feeds, constants, center_point_box=center)
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(fn(params, **feeds), run_runtime(model, feeds)[0])
    with pytest.raises(jqonnx.ModelError, match=r"boxes: expected a value that is known"):
        jax.jit(fn)(params, boxes, scores)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
@pytest.mark.parametrize("alignment", ["half_pixel", "output_half_pixel"])
def test_roi_align(mode: str, ratio: int, alignment: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 3, 11, 9)).astype(np.float32)
    low = rng.uniform(-4, 14, (6, 2))
    # Some regions are empty, and some leave the image.
    regions = np.concatenate([low, low + rng.uniform(0, 12, (6, 2)) * (rng.random((6, 2)) > 0.2)], axis=1)
    feeds = {"x": x, "regions": regions.astype(np.float32), "batches": rng.integers(0, 2, 6)}
    model = make_model(
        "RoiAlign", feeds, mode=mode, sampling_ratio=ratio, coordinate_transformation_mode=alignment, output_height=3,
        output_width=2, spatial_scale=0.75,
    )  # fmt: skip
    fn, params = jqonnx.load(model)
    expected = run_runtime(model, feeds)[0]
    np.testing.assert_allclose(fn(params, **feeds), expected, atol=1e-5)
    compiled = jax.jit(lambda x, n: fn(params, x, feeds["regions"], n))(feeds["x"], feeds["batches"])
    np.testing.assert_allclose(compiled, expected, atol=1e-5)
    if ratio:
        mapped = jax.jit(jax.vmap(lambda x, r: fn(params, x, r, feeds["batches"])))(
            np.stack([x, x]), np.stack([feeds["regions"]] * 2)
        )
        np.testing.assert_allclose(mapped[1], expected, atol=1e-5)
    else:
        with pytest.raises(jqonnx.ModelError, match="regions: expected a value that is known"):
            jax.jit(fn)(params, **feeds)


def convolve(x: Any, w: Any, offset: Any, bias: Any, mask: Any, groups: int, parts: int) -> np.ndarray:
    """Return DeformConv with strides of 2 and a padding of 1, in float64."""
    (batch, channels, height, width), (features, _, rows, columns) = x.shape, w.shape
    y = np.zeros((batch, features, *offset.shape[2:])) + bias[:, None, None]
    offset = offset.reshape(batch, parts, rows, columns, 2, *offset.shape[2:])
    mask = mask.reshape(batch, parts, rows, columns, *offset.shape[5:])
    for n, f, c, a, b, i, j in np.ndindex(batch, features, w.shape[1], rows, columns, *offset.shape[5:]):
        channel = f // (features // groups) * w.shape[1] + c
        part = channel // (channels // parts)
        place = np.array([2 * i - 1 + a, 2 * j - 1 + b]) + offset[n, part, a, b, :, i, j]
        base = np.floor(place).astype(int)
        for corner in itertools.product((0, 1), repeat=2):
            r, s = base + corner
            if 0 <= r < height and 0 <= s < width:
                share = np.prod(1 - np.abs(place - (r, s)))
                y[n, f, i, j] += x[n, channel, r, s] * share * w[f, c, a, b] * mask[n, part, a, b, i, j]
    return y


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_deformable_convolution(groups: int, parts: int, rng: np.random.Generator) -> None:
    shapes = (2, 4, 6, 7), (2, 4 // groups, 3, 2), (2, parts * 12, 3, 4), (2,), (2, parts * 6, 3, 4)
    arrays = [rng.normal(size=shape) for shape in shapes]
    feeds = {name: x.astype(np.float32) for name, x in zip(("x", "w", "offset", "bias", "mask"), arrays, strict=True)}
    model = make_model("DeformConv", feeds, strides=[2, 2], pads=[1, 1, 1, 1], group=groups, offset_group=parts)
    fn, params = jqonnx.load(model)
    expected = convolve(*(x.astype(np.float64) for x in feeds.values()), groups=groups, parts=parts)
    for run in (fn, jax.jit(fn)):
        np.testing.assert_allclose(run(params, **feeds), expected, atol=1e-4)


def test_optional_values(rng: np.random.Generator) -> None:
    """A function may get an input that its caller leaves out."""
    x = rng.normal(size=4).astype(np.float32)
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [4]))
    nodes = [
        helper.make_node("Optional", ["x"], ["some"]),
        helper.make_node("Optional", [], ["none"], type=kind.optional_type.elem_type),
        helper.make_node("OptionalHasElement", ["some"], ["first"]),
        helper.make_node("OptionalHasElement", ["none"], ["second"]),
        helper.make_node("OptionalGetElement", ["some"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    outputs = [info(n, onnx.TensorProto.BOOL, []) for n in ("first", "second")] + [
        info("y", onnx.TensorProto.FLOAT, [4])
    ]
    graph = helper.make_graph(nodes, "g", [info("x", onnx.TensorProto.FLOAT, [4])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    fn, params = jqonnx.load(model)
    first, second, y = jax.jit(fn)(params, x)
    assert (bool(first), bool(second)) == (True, False)
    np.testing.assert_array_equal(y, run_runtime(model, {"x": x})[2])
