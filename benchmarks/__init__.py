"""Benchmarks of jaxquant, ONNX Runtime, plain JAX and qwix, timed in alternation: `python -m benchmarks`."""
