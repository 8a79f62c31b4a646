"""The operators of ONNX and ONNX Runtime on plain arrays, in files by subject."""
