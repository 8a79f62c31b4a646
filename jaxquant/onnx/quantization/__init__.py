"""Float models of ONNX with integers in place of floats."""
