"""jaxquant against ONNX Runtime and plain JAX, timed in turns and compared bit for bit: `python -m benchmarks`."""
