"""jaxquant against ONNX Runtime, plain JAX and qwix, timed in turns and compared: `python -m benchmarks`."""
