"""Trees of this library in programs that `jax.export` saves: the static part of a tree as JSON, by name."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import export

from .._core import checks
from .._core.granularity import Blocked, Choice, PerAxis, PerFeature, PerTensor, PerToken
from .spec import Codebook, QuantSpec

_FUNCTION = "checkpoint.deserialize_program"
# The modules that register trees, and the names of these trees in a program. `import jaxquant` imports none of them; it
# does import the module of QuantizedArray.
_REGISTERING = {
    "_arrays.diagnostics": "QuantizationError",
    "_attention.kv_cache": "KVCache",
    "_codes.fake_codes": "FakeQuantizedArray",
    "_onnx_ops.quantization": "DynamicQuantizeLinearOutput",
    "_training.estimators": "StochasticRounding",
    "_training.fake_quantize": "AmaxHistory Quantizer",
    "calibration.calibrator": "Range",
    "calibration.histogram": "HistogramState Words",
    "calibration.running": "AverageState ExtremesState",
    "checkpoint.arrays": "StaticText",
    "optim.quantize_state": "QuantizedState",
    "ptq.collect": "Statistics",
    "ptq.gptq": "ptq.Diagnostics",
    "ptq.moments": "ptq.Moments ptq.MomentsState",
    "transform._trees": "FixedRanges LearnedScale LearnedScales QuantizedTree TrainableTree",
    "transform.adapters": "AdaptedTree",
}
MODULES = {f"jaxquant.{name}": f"jaxquant.{module}" for module, names in _REGISTERING.items() for name in names.split()}
_GRANULARITIES: dict[str, type] = {kind.__name__: kind for kind in (PerTensor, PerAxis, PerToken, PerFeature, Blocked)}


def deserialize_program(data: bytes | bytearray) -> export.Exported:
    """Return a program that `jax.export` saved, after importing the modules that register its trees.

    `jax.export.deserialize` knows only the trees whose modules are imported, and `import jaxquant` imports few. This
    function imports those that the program takes or returns. It changes nothing else: `jax.export.deserialize` does the
    rest, and the program needs the same version of jaxquant as the process that saved it.

    Args:
        data: what `jax.export.Exported.serialize` returned.

    Returns:
        The program. `program.call` takes what the saved function took, and `jax.jit(program.call)` compiles it.

    Raises:
        TypeError: data is not bytes.
        ModuleNotFoundError: a package that a tree needs is not installed, such as optax for `optim.QuantizedState`.
        ValueError: `jax.export` does not know a tree, for example a state of optax; the program that makes it
            registers it, as `jax.export` says.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> cache = jq.KVCache.create((1, 4, 2, 8))
        >>> k = v = jnp.ones((1, 1, 2, 8))
        >>> saved = jax.export.export(jax.jit(jq.KVCache.append))(cache, k, v).serialize()
        >>> program = jq.checkpoint.deserialize_program(saved)  # in any process
        >>> int(program.call(cache, k, v).index)
        1

    Source: https://docs.jax.dev/en/latest/export/export.html
    """
    is_bytes = isinstance(data, bytes | bytearray)
    checks.require_type(is_bytes, _FUNCTION, "data", "bytes", checks.describe_value(data))
    # A program has the names of its trees as plain text. A name that is something else there imports too much, no more.
    for module in sorted({module for name, module in MODULES.items() if name.encode() in data}):
        importlib.import_module(module)
    return export.deserialize(bytearray(data))


def register_tree(
    kind: type, encode: Callable[[Any], Any] = lambda _: None, decode: Callable[[Any], Any] = lambda _: ()
) -> None:
    """Let `jax.export` save a program that takes or returns a tree of this kind.

    Args:
        kind: a class that is registered as a pytree node.
        encode: returns the static part of the tree as what `json` writes. By default there is none.
        decode: returns the static part of what `encode` returned.
    """
    export.register_pytree_node_serialization(
        kind, serialized_name=f"jaxquant.{kind.__name__}",
        serialize_auxdata=lambda static: json.dumps(encode(static), default=_convert_number).encode(),
        deserialize_auxdata=lambda text: decode(json.loads(text)),
    )  # fmt: skip


def _convert_number(number: object) -> int | float | bool:
    """Return a number of numpy, which may stand for one of Python's in a static part, as one of Python's."""
    if not isinstance(number, np.generic):
        raise TypeError(f"expected numbers, strings, lists and dicts in what a tree has besides arrays, got {number!r}")
    return number.item()


def encode_spec(spec: QuantSpec) -> dict[str, Any]:
    """Return a spec as what `json` writes: all its attributes by name."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    is_codebook, inner = isinstance(spec.dtype, Codebook), spec.scale_spec
    return fields | {
        "dtype": {"name": spec.dtype.name, "levels": spec.dtype.levels} if is_codebook else spec.dtype.name,
        "granularity": _encode_granularity(spec.granularity),
        "zero_point_granularity": _encode_granularity(spec.zero_point_granularity),
        "scale_dtype": np.dtype(spec.scale_dtype).name,
        "scale_spec": None if inner is None else encode_spec(inner),
    }


def decode_spec(fields: dict[str, Any]) -> QuantSpec:
    """Return the spec that `encode_spec` described."""
    dtype, inner = fields["dtype"], fields["scale_spec"]
    changes = {
        "dtype": Codebook(dtype["name"], tuple(dtype["levels"])) if isinstance(dtype, dict) else dtype,
        "granularity": _decode_granularity(fields["granularity"]),
        "zero_point_granularity": _decode_granularity(fields["zero_point_granularity"]),
        "scale_spec": None if inner is None else decode_spec(inner),
    }
    return QuantSpec(**{**fields, **changes})


def _encode_granularity(granularity: Choice | None) -> list[Any] | None:
    return None if granularity is None else [type(granularity).__name__, dataclasses.asdict(granularity)]


def _decode_granularity(saved: list[Any] | None) -> Any:
    if saved is None:
        return None
    name, fields = saved
    # JSON has no tuples: an axis and a size may be one.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return _GRANULARITIES[name](**values)
