"""A short example of each kind of operator, with its result: python examples/operators.py."""

import jax
import jax.numpy as jnp

import jaxquant as jq


def show_onnx() -> None:
    """Show QuantizeLinear and DequantizeLinear: per tensor, per axis, and with int4 codes in blocks."""
    x = jnp.array([[-1.0, -0.25, 0.25, 100.0], [-3.0, 0.5, 1.5, 2.5]])
    print("per tensor  ", jq.quantize_linear(x, 0.5, 128).tolist())

    scale, zero_point = jnp.array([1.0, 0.5]), jnp.array([0, -3], jnp.int8)
    codes = jq.quantize_linear(x, scale, zero_point, axis=0)
    print("per axis    ", codes.tolist(), codes.dtype)
    print("dequantized ", jq.dequantize_linear(codes, scale, zero_point, axis=0).tolist())

    scale = jnp.array([[0.25, 16.0], [0.5, 0.5]])  # one scale per row and two columns
    codes = jq.quantize_linear(x, scale, block_size=2, output_dtype=jnp.int4)
    print("int4 blocks ", codes.tolist(), codes.dtype)
    print("dequantized ", jq.dequantize_linear(codes, scale, block_size=2).tolist())


def show_dynamic() -> None:
    """Show DynamicQuantizeLinear, which computes the scale and the zero point from x."""
    y, y_scale, y_zero_point = jq.dynamic_quantize_linear(jnp.array([-10.0, 3.4, 10.0]))
    print("dynamic     ", y.tolist(), f"scale {y_scale:.6f}, zero point {y_zero_point}")


def show_gradients() -> None:
    """Show fake quantization, which has a straight-through gradient."""
    x = jnp.array([-1.75, 0.3, 6.25, 100.0])
    print("fake        ", jq.fake_quantize_linear(x, 0.5, 3, dtype=jnp.uint4).tolist())
    # -1.75 and 100.0 saturate, so their gradient is 0.
    gradient = jax.grad(lambda x: jq.fake_quantize_linear(x, 0.5, 3, dtype=jnp.uint4).sum())
    print("its gradient", gradient(x).tolist())
    gradient = jax.grad(lambda x: jq.fake_quantize_linear(x, 0.5, 3, dtype=jnp.uint4, lda_coeff=0.25).sum())
    print("* lda_coeff ", gradient(x).tolist())


def show_onednn() -> None:
    """Show ties with an odd zero point: oneDNN adds the zero point before it rounds, ONNX afterwards."""
    x = jnp.array([-0.5, 0.5, 1.5, 2.5])
    print("ONNX        ", jq.quantize_linear(x, 1.0, 1).tolist())
    print("oneDNN      ", jq.onednn.quantize(x, 1.0, 1).tolist())


if __name__ == "__main__":
    show_onnx()
    show_dynamic()
    show_gradients()
    show_onednn()
