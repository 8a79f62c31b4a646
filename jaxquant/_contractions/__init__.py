"""Functions of JAX over quantized arrays: dot_general, matmul, einsum, convolution and take."""
