"""Weights of the branches of an If, which may have one name for different constants."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from jaxquant import onnx as jqonnx


def _make_branch(weights):
    node = helper.make_node("MatMulInteger", ["a", "w"], ["sums"])
    result = helper.make_tensor_value_info("sums", TensorProto.INT32, [1, 2])
    return helper.make_graph([node], "branch", [], [result], [numpy_helper.from_array(weights, "w")])


@pytest.mark.parametrize("condition", [True, False])
def test_branches_with_one_name_for_different_weights_keep_their_own(condition):
    first, second = np.full((2, 2), 100, np.int8), np.full((2, 2), -90, np.int8)
    node = helper.make_node("If", ["c"], ["y"], then_branch=_make_branch(first), else_branch=_make_branch(second))
    inputs = [
        helper.make_tensor_value_info("a", TensorProto.UINT8, [1, 2]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    result = helper.make_tensor_value_info("y", TensorProto.INT32, [1, 2])
    graph = helper.make_graph([node], "graph", inputs, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    codes = np.array([[255, 7]], np.uint8)
    feeds = {"a": codes, "c": np.array(condition)}
    (y,) = ReferenceEvaluator(jqonnx.convert_weights_to_uint8(model)).run(None, feeds)
    np.testing.assert_array_equal(y, codes.astype(np.int32) @ (first if condition else second).astype(np.int32))
