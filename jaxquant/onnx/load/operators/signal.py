"""Fourier transforms, window functions, images from columns, and determinants."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...model_file import read_onnx_dtype
from ..graph import register
from ..interpret import Call
from ..values import canonicalize_dtype, list_ints, normalize_axis
from .windows import check_kernel

# The coefficients of the cosines of each window function.
_WINDOWS = {
    "HannWindow": (0.5, -0.5),
    "HammingWindow": (25 / 46, -21 / 46),
    "BlackmanWindow": (0.42, -0.5, 0.08),
}


@register(*_WINDOWS, static=(0,))
def make_window(call: Call, size: np.ndarray) -> Any:
    """ONNX HannWindow, HammingWindow and BlackmanWindow."""
    count = int(size.reshape(()))
    call.reserve([count], np.float32)
    period = max(count if call.get("periodic", 1) else count - 1, 1)
    angle = 2 * np.pi * np.arange(count) / period
    window = sum(c * np.cos(i * angle) for i, c in enumerate(_WINDOWS[call.node.op]))
    return jnp.asarray(window, canonicalize_dtype(read_onnx_dtype(call.get("output_datatype", 1), call.node.op)))


@register("DFT", static=(1, 2))
def transform_fourier(
    call: Call, x: jax.Array, length: np.ndarray | None = None, axis: np.ndarray | None = None
) -> Any:
    """ONNX DFT."""
    default = call.get("axis", 1) if call.opset < 20 else -2
    along = normalize_axis(default if axis is None else axis.reshape(()), x.ndim)
    is_onesided, is_inverse = bool(call.get("onesided", 0)), bool(call.get("inverse", 0))
    size = None if length is None else int(length.reshape(()))
    if size is not None:
        call.reserve([*x.shape[:along], size, *x.shape[along + 1 :]], np.float32)
    # The last dimension holds the real part, and the imaginary one of complex numbers.
    signal = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
    if is_inverse and is_onesided:
        return jnp.fft.irfft(signal, size, along)[..., None].astype(x.dtype)
    y = (jnp.fft.ifft if is_inverse else jnp.fft.fft)(signal, size, along)
    if is_onesided:
        y = jnp.take(y, np.arange(y.shape[along] // 2 + 1), axis=along)
    return jnp.stack([y.real, y.imag], axis=-1).astype(x.dtype)


@register("STFT", static=(1, 3))
def transform_short_time(
    call: Call, x: jax.Array, step: np.ndarray, window: Any = None, length: np.ndarray | None = None
) -> Any:
    """ONNX STFT."""
    hop = int(step.reshape(()))
    size = window.shape[0] if length is None else int(length.reshape(()))
    frames = 1 + (x.shape[1] - size) // hop
    call.reserve([x.shape[0], frames, size], np.float32)
    index = np.arange(frames)[:, None] * hop + np.arange(size)
    cut = x[:, index]
    values = cut[..., 0] if x.shape[-1] == 1 else cut[..., 0] + 1j * cut[..., 1]
    y = jnp.fft.fft(values if window is None else values * window, axis=-1)
    y = y[..., : size // 2 + 1] if call.get("onesided", 1) else y
    return jnp.stack([y.real, y.imag], axis=-1).astype(x.dtype)


@register("MelWeightMatrix", static=(0, 1, 2, 3, 4))
def make_mel_weights(
    call: Call, bins: np.ndarray, length: np.ndarray, rate: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> Any:
    """ONNX MelWeightMatrix."""
    count, size, frequency = (int(v.reshape(())) for v in (bins, length, rate))
    call.reserve([size // 2 + 1, count], np.float32)
    low, high = (2595 * np.log10(1 + float(v.reshape(())) / 700) for v in (lower, upper))
    mel = np.arange(count + 2) * (high - low) / (count + 2) + low
    edges = ((size + 1) * 700 * (10 ** (mel / 2595) - 1) // frequency).astype(int)
    # Each column is a triangle between three neighboring edges.
    weights = np.zeros((size // 2 + 1, count))
    for i in range(count):
        start, center, end = edges[i : i + 3]
        if center == start:
            weights[center, i] = 1
        else:
            weights[start : center + 1, i] = np.arange(center + 1 - start) / (center - start)
        weights[center:end, i] = (end - np.arange(center, end)) / max(end - center, 1)
    return jnp.asarray(weights, canonicalize_dtype(read_onnx_dtype(call.get("output_datatype", 1), "MelWeightMatrix")))


@register("Det")
def compute_determinant(call: Call, x: jax.Array) -> Any:
    """ONNX Det."""
    return jnp.linalg.det(x)


@register("Col2Im", static=(1, 2))
def add_columns(call: Call, x: jax.Array, image: np.ndarray, block: np.ndarray) -> Any:
    """ONNX Col2Im: the sum of overlapping blocks."""
    lengths, kernel = list_ints(image), list_ints(block)
    check_kernel(kernel)
    rank = len(lengths)
    strides, dilations = (tuple(call.get(name) or (1,) * rank) for name in ("strides", "dilations"))
    pads = tuple(call.get("pads") or (0,) * (2 * rank))
    counts = [
        (n + pads[i] + pads[rank + i] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i, n in enumerate(lengths)
    ]
    channels = x.shape[1] // int(np.prod(kernel))
    padded = [n + pads[i] + pads[rank + i] for i, n in enumerate(lengths)]
    y = jnp.zeros(call.reserve((x.shape[0], channels, *padded), x.dtype), x.dtype)
    columns = x.reshape(x.shape[0], channels, -1, *counts)
    for i, offset in enumerate(itertools.product(*(range(k) for k in kernel))):
        cuts = [
            slice(o * d, o * d + (count - 1) * stride + 1, stride)
            for o, d, count, stride in zip(offset, dilations, counts, strides, strict=True)
        ]
        y = y.at[(slice(None), slice(None), *cuts)].add(columns[:, :, i])
    inner = [slice(pads[i], pads[i] + n) for i, n in enumerate(lengths)]
    return y[(slice(None), slice(None), *inner)]
