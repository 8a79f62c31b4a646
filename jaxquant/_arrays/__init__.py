"""Quantized arrays: specs, scales from ranges, the array type, and its stored forms."""
