"""The operators of ONNX and ONNX Runtime on plain arrays, one file for each."""
