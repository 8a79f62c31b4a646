"""Quantization with a gradient: fake quantization, estimators, and contractions of floats in integers."""
