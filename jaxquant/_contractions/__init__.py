"""JAX's functions for quantized arrays: dot_general, matmul, einsum, ragged_dot, conv_general_dilated and take."""
