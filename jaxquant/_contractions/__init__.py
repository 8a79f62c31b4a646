"""JAX's functions of quantized arrays: dot_general, matmul, einsum, convolution and take."""
