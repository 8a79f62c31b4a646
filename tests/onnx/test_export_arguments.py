"""What users pass to `export`: arrays of numpy, names of arguments, functions that ONNX cannot express."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime


def test_params_of_64_bits_have_the_dtype_that_jax_has_for_them() -> None:
    def apply(params, x: jax.Array) -> jax.Array:
        return x * params["scale"] + params["shift"][None] + params["steps"].astype(jnp.float32)[None]

    x = jnp.ones((2, 3))
    params = {"scale": np.float64(2.5), "shift": np.array([0.1, 0.2, 0.3]), "steps": np.arange(3)}
    model = jqonnx.export(apply, params, [x])
    onnx.checker.check_model(model, full_check=True)
    report = jqonnx.verify(model, apply, params, [x], tolerance=0)
    assert report.is_exact, str(report)


def test_an_argument_may_be_called_output() -> None:
    for function in (lambda x, output: x + output, lambda output, output_1: [output, output_1 + output]):
        arguments = [jnp.ones(3), jnp.full(3, 2.0)]
        model = jqonnx.export(function, arguments)
        names = [info.name for info in (*model.graph.input, *model.graph.output)]
        assert len(set(names)) == len(names)
        feeds = {info.name: np.asarray(x) for info, x in zip(model.graph.input, arguments, strict=True)}
        for actual, expected in zip(run_runtime(model, feeds), jax.tree.leaves(function(*arguments)), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_an_error_tells_the_users_line() -> None:
    jax.make_jaxpr(jnp.cumprod)(jnp.ones(3))  # a body that JAX has traced before does not know its next caller
    with pytest.raises(ValueError, match=rf"cumprod \(no operator of ONNX\) at .*{Path(__file__).name}:\d+"):
        jqonnx.export(lambda x: jnp.cumprod(x), [jnp.ones(3)])


def test_a_convolution_of_integers_is_refused() -> None:
    kernel = jnp.ones((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="a convolution of integers other than jaxquant's"):
        jqonnx.export(lambda x: jax.lax.conv_general_dilated(x, kernel, (1,), "SAME"), [jnp.ones((1, 1, 5), jnp.int32)])
