"""ONNX Runtime's com.microsoft operators on 8-bit codes, besides its matrix products."""
