"""`quantize_to`: the weights of a model with the codes that a format's own quantizer gives them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from .._core import checks
from .formats.rounding import TARGETS, round_to_nearest
from .info import CheckpointError, Info, Tensor
from .place import place_tensor

_NAME = "checkpoint.quantize_to"


def quantize_to(
    params: Mapping[str, jax.Array | np.ndarray], target: str, *, keep: str | Sequence[str] = ()
) -> tuple[dict[str, Tensor], Info]:
    """Return the weights of a model quantized for a format, by round to nearest, to be written by `save`.

    The codes and the scales are those of the format's own package, bit for bit. Matrices whose names end in ".weight"
    are quantized, unless a pattern keeps them: tables and the last layer are usually kept.

    | target | codes | scales |
    |---|---|---|
    | "compressed-tensors-int4" | int4, packed | one for each 128 inputs |
    | "compressed-tensors-int8" | int8; activations are quantized for each token | one for each output |
    | "compressed-tensors-fp8" | float8_e4m3fn; activations are quantized for each token | one for each output |

    Args:
        params: float32, float16 or bfloat16 arrays by name; weights have the shape (outputs, inputs).
        target: the format, from the table.
        keep: Static. Patterns of the names that stay as they are, such as "lm_head*".

    Returns:
        The tensors by name, and the `Info` with the configuration of the model.

    Raises:
        CheckpointError: the format does not hold a weight, such as one with inputs that are no multiple of 128.
        TypeError: an argument has a wrong type.
        ValueError: there is no such target.

    Example:
        >>> import os, tempfile, jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> params = {"q_proj.weight": jnp.linspace(-1, 1, 512).reshape(4, 128), "norm.weight": jnp.ones(4)}
        >>> tensors, info = checkpoint.quantize_to(params, "compressed-tensors-int4")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(os.path.join(folder, "model"), tensors, info)
        ...     print(checkpoint.load(os.path.join(folder, "model"))[1])
        tensor         stored as                 bits per weight  shape
        q_proj.weight  compressed-tensors, int4  4.5              4 x 128
        norm.weight    F32                       32               4
        compressed-tensors: 2 tensors, 304 bytes, 4.713 bits per weight

    Source: compressed_tensors.quantization, calculate_qparams and quantize.
    """
    is_dict = isinstance(params, Mapping)
    checks.require_type(is_dict, _NAME, "params", "a dict of arrays by name", type(params).__name__)
    checks.check_option(_NAME, "target", target, tuple(TARGETS))
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    are_texts = all(isinstance(pattern, str) for pattern in patterns)
    checks.require_type(are_texts, _NAME, "keep", "patterns of names", repr(keep))
    chosen, kept, tensors = TARGETS[target], [], {}
    for name, array in params.items():
        is_array = isinstance(array, jax.Array | np.ndarray) and not checks.is_traced(array)
        expected = "an array that is not traced"
        checks.require_type(is_array, _NAME, f"params[{name!r}]", expected, checks.describe_value(array))
        is_weight = name.endswith(".weight") and array.ndim >= 2
        if is_weight and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            try:
                q = round_to_nearest(name, np.asarray(array), chosen.weights)
            except CheckpointError as error:
                raise CheckpointError(f"jaxquant.{_NAME}: {error}") from error
            tensors[name] = place_tensor(_NAME, name, q, None)
            continue
        if is_weight:
            kept.append(name.removesuffix(".weight"))
        tensors[name] = array
    return tensors, Info("compressed-tensors", {"config.json": {"quantization_config": chosen.make_config(kept)}})
