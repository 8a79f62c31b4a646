"""JAX's functions for quantized arrays: dot_general, matmul, einsum, conv_general_dilated and take."""
