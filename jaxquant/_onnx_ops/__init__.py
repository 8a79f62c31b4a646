"""Operators of ONNX and of ONNX Runtime on plain arrays, one file each."""
