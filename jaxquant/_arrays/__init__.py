"""Quantized arrays: specs, scales from ranges, the array type, and what it is stored as."""
