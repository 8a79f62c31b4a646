"""Attention over quantized keys and values: the cache of a decoder, and the functions that attend to it or train."""
