"""The plan of a transformer on a mesh: a training step and a decoding step, traced with abstract shapes and counted."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jax.typing import DTypeLike

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.dot import matmul
from .._core import checks, dtypes
from .._core.granularity import Blocked, PerToken
from .._program.jaxpr import Equation
from .gather import all_gather
from .reduce import psum
from .traffic import Collective, count_sent

_Tree = dict[str, Any]
_P = PartitionSpec
_KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


# The sizes of a transformer and of a mesh, and the formats that a plan compares.


class ModelSizes(NamedTuple):
    """The sizes of a decoder with grouped queries and a gated feed-forward network.

    Attributes:
        layers: the number of layers.
        width: the number of features between layers.
        heads: the number of query heads.
        kv_heads: the number of key and value heads.
        hidden: the number of hidden features of the feed-forward network.
        vocabulary: the number of tokens.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """The number of features of a head."""
        return self.width // self.heads


# The sizes of Llama 2 7B and 70B (arXiv 2307.09288) and of Llama 3.1 405B (arXiv 2407.21783, table 3).
PRESETS = {
    "7B": ModelSizes(32, 4096, 32, 32, 11008, 32000),
    "70B": ModelSizes(80, 8192, 64, 8, 28672, 32000),
    "400B": ModelSizes(126, 16384, 128, 8, 53248, 128256),
}


class _Format(NamedTuple):
    """In what weights, gradients, activations and the cache are stored, and in what they travel.

    Attributes:
        name: the name of the column.
        dtype: the dtype of activations and of what is not quantized.
        weights: the dtype of the codes of weights, where they are stored for decoding and when they travel, with a
            scale for each 128 elements; None means that they are floats.
        traffic: how gradients and activations are quantized when they travel; None is `dtype`.
        cache: how keys and values are quantized; None is `dtype`.
        moments: how Adam's moments are stored; None is float32.
    """

    name: str
    dtype: Any
    weights: Any = None
    traffic: QuantSpec | None = None
    cache: QuantSpec | None = None
    moments: QuantSpec | None = None


_BLOCK = 128
_BYTES = QuantSpec(jnp.int8, Blocked(-1, _BLOCK))
_MOMENTS = QuantSpec(jnp.uint8, Blocked(-1, 256), symmetric=True)
FORMATS = {
    form.name: form
    for form in (
        _Format("float32", jnp.float32),
        _Format("bfloat16", jnp.bfloat16),
        _Format("int8", jnp.bfloat16, jnp.int8, _BYTES, QuantSpec(jnp.int8, PerToken()), _MOMENTS),
        # Gradients and activations lose too much in 4 bits.
        _Format("int4", jnp.bfloat16, jnp.int4, _BYTES, QuantSpec(jnp.int4, PerToken()), _MOMENTS),
    )
}


def _check_sizes(sizes: ModelSizes, mesh: Mapping[str, int], batch: int, sequence: int) -> None:
    """Raise unless the mesh divides the sizes."""
    function = "distributed.plan"
    names = ("data", "model")
    checks.require(set(mesh) == set(names), function, "mesh", "the axes data and model", dict(mesh))
    for argument, value in {**sizes._asdict(), **mesh, "batch": batch, "sequence": sequence}.items():
        checks.require(value > 0, function, argument, "a positive int", value)
    divisors = {
        "width": math.lcm(sizes.heads, mesh["data"]),
        "heads": math.lcm(sizes.kv_heads, mesh["model"]),
        "kv_heads": mesh["model"],
        "hidden": mesh["model"],
        "vocabulary": mesh["model"],
    }
    for name, divisor in divisors.items():
        value = getattr(sizes, name)
        checks.require(value % divisor == 0, function, name, f"a multiple of {divisor}", value)
    checks.require(batch % mesh["data"] == 0, function, "batch", f"a multiple of {mesh['data']}, the axis data", batch)


def _list_matrices(sizes: ModelSizes) -> dict[str, tuple[tuple[int, int], int]]:
    """Return the shape of each matrix of a layer, and the dimension that the axis `model` cuts."""
    keys = sizes.kv_heads * sizes.head_dim
    return {
        "query": ((sizes.width, sizes.width), 1),
        "key": ((sizes.width, keys), 1),
        "value": ((sizes.width, keys), 1),
        "out": ((sizes.width, sizes.width), 0),
        "gate": ((sizes.width, sizes.hidden), 1),
        "up": ((sizes.width, sizes.hidden), 1),
        "down": ((sizes.hidden, sizes.width), 0),
    }


def _make_weight_spec(form: _Format, axis: int) -> QuantSpec | None:
    """Return how a matrix is quantized, with blocks along an axis; None if the format holds floats."""
    return None if form.weights is None else QuantSpec(form.weights, Blocked(axis, _BLOCK))


def _make_shape(shape: tuple[int, ...], dtype: DTypeLike, spec: QuantSpec | None) -> Any:
    """Return the shape of an array of floats or, with a spec, of its codes and scales."""
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return struct if spec is None else jax.eval_shape(lambda x: quantize(x, spec), struct)


# Collectives of one format.


# A training step and a decoding step of a transformer on one device of a mesh, with its collectives.
#
# The axis `data` cuts the batch and, in training, the matrices (FSDP); the axis `model` cuts heads, hidden features and
# the vocabulary (tensor parallelism). A plan only traces these functions.


def _gather_weight(form: _Format, shard: jax.Array, axis: int) -> jax.Array:
    """Gather a matrix that is cut along `axis` over the mesh axis `data`; scatter its gradient."""
    shard = shard.astype(form.dtype)
    # The axis `data` leaves few elements along the axis that it cuts: the blocks are along the other one.
    spec = _make_weight_spec(form, 1 - axis)
    if spec is None:
        return lax.all_gather(shard, "data", axis=axis, tiled=True)
    return all_gather(shard, "data", spec=spec, axis=axis, tiled=True, backward_spec=form.traffic)


def _add_shares(form: _Format, x: jax.Array) -> jax.Array:
    """Return the sum of activations over the axis `model`."""
    return lax.psum(x, "model") if form.traffic is None else psum(x, "model", spec=form.traffic)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_activations(form: _Format, x: jax.Array) -> jax.Array:
    """Return the sum over the axis `model`; every device holds its cotangent."""
    return _add_shares(form, x)


def _sum_activations_fwd(form: _Format, x: jax.Array) -> tuple[jax.Array, None]:
    return _sum_activations(form, x), None


def _sum_activations_bwd(form: _Format, _: None, g: jax.Array) -> tuple[jax.Array]:
    del form
    return (g,)


_sum_activations.defvjp(_sum_activations_fwd, _sum_activations_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy_activations(form: _Format, x: jax.Array) -> jax.Array:
    """Return activations that every device of the axis `model` uses; their cotangents are added."""
    del form
    return x


def _copy_activations_fwd(form: _Format, x: jax.Array) -> tuple[jax.Array, None]:
    return _copy_activations(form, x), None


def _copy_activations_bwd(form: _Format, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_add_shares(form, g),)


_copy_activations.defvjp(_copy_activations_fwd, _copy_activations_bwd)


# Layers.


def _normalize(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Return x divided by its root mean square over features, times a gain."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + np.float32(1e-6))
    return (wide * gain.reshape((1,) * (x.ndim - 1) + gain.shape)).astype(x.dtype)


def _run_attention(sizes: ModelSizes, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the attention of heads, [batch, length, heads * head_dim]."""
    batch, length = q.shape[:2]
    q, k, v = (x.reshape(batch, x.shape[1], -1, sizes.head_dim) for x in (q, k, v))
    q = q.reshape(batch, length, k.shape[2], -1, sizes.head_dim)
    scores = jnp.einsum("blkgd,bmkd->bkglm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * np.float32(sizes.head_dim**-0.5), np.float32(-1e30))
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkglm,bmkd->blkgd", weights, v).reshape(batch, length, -1)


def _feed_forward(
    x: jax.Array, gate: QuantizedArray | jax.Array, up: QuantizedArray | jax.Array, down: QuantizedArray | jax.Array
) -> jax.Array:
    """Return this device's part of the gated feed-forward network."""
    return _matmul_any(jax.nn.silu(_matmul_any(x, gate)) * _matmul_any(x, up), down)


def _matmul_any(x: jax.Array, w: QuantizedArray | jax.Array) -> jax.Array:
    """Return the product with a matrix of floats or of codes, in the dtype of x."""
    return matmul(x, w).astype(x.dtype) if isinstance(w, QuantizedArray) else x @ w


def _look_up(form: _Format, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the embeddings of tokens from a table that is cut along its rows over the axis `model`."""
    first = lax.axis_index("model") * table.shape[0]
    local = tokens - first
    is_here = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(is_here, local, 0)]
    return _sum_activations(form, jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype)))


# Training.


def _compute_loss(sizes: ModelSizes, form: _Format, params: _Tree, tokens: jax.Array) -> jax.Array:
    """Return the loss of this device's batch; the layers are recomputed in the backward pass."""
    x = _look_up(form, _gather_weight(form, params["embed"], 1), tokens)
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool)).reshape(1, 1, 1, length, length)

    @jax.checkpoint
    def apply_layer(x: jax.Array, layer: _Tree) -> tuple[jax.Array, None]:
        w = {n: _gather_weight(form, layer[n], 1 - cut) for n, (_, cut) in _list_matrices(sizes).items()}
        h: Any = _copy_activations(form, _normalize(x, layer["norm1"]))
        q, k, v = (h @ w[n] for n in ("query", "key", "value"))
        out = _run_attention(sizes, q, k, v, mask) @ w["out"]
        added: Any = _sum_activations(form, out)
        x = x + added
        h = _copy_activations(form, _normalize(x, layer["norm2"]))
        added = _sum_activations(form, _feed_forward(h, w["gate"], w["up"], w["down"]))
        return x + added, None

    x, _ = lax.scan(apply_layer, x, params["layers"])

    @jax.checkpoint
    def compute_token_losses(x: jax.Array, norm: jax.Array, shard: jax.Array) -> jax.Array:
        h: Any = _copy_activations(form, _normalize(x, norm))
        logits = jnp.matmul(h, _gather_weight(form, shard, 0), preferred_element_type=jnp.float32)
        top = lax.stop_gradient(lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), "model"))
        total = _sum_over_model(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
        local = jnp.roll(tokens, -1, 1) - lax.axis_index("model") * logits.shape[-1]
        is_here = (local >= 0) & (local < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(is_here, local, 0)[..., None], axis=-1)[..., 0]
        return jnp.log(total) + top - _sum_over_model(jnp.where(is_here, picked, np.float32(0)))

    return jnp.mean(compute_token_losses(x, params["norm"], params["unembed"]))


def _sum_over_model(x: jax.Array) -> jax.Array:
    # One number for each token: not worth quantizing.
    return _sum_activations(_Format("float32", jnp.float32), x)


def _train(sizes: ModelSizes, form: _Format, params: _Tree, tokens: jax.Array) -> tuple[jax.Array, _Tree]:
    """Return the loss and the gradients of this device's parameters."""
    loss, grads = jax.value_and_grad(functools.partial(_compute_loss, sizes, form))(params, tokens)
    # The gains are on every device; the gradients of matrices have been scattered.
    gains = [grads["norm"], grads["layers"]["norm1"], grads["layers"]["norm2"]]
    grads["norm"], grads["layers"]["norm1"], grads["layers"]["norm2"] = lax.psum(gains, "data")
    return lax.pmean(loss, "data"), grads


# Decoding.


def _decode(sizes: ModelSizes, form: _Format, params: _Tree, cache: _Tree, tokens: jax.Array, step: jax.Array) -> Any:
    """Return the logits of the next tokens and the cache with the present ones."""
    x = _look_up(form, params["embed"], tokens)

    def apply_layer(x: jax.Array, layer_and_cache: Any) -> tuple[jax.Array, _Tree]:
        w, old = layer_and_cache
        h = _normalize(x, w["norm1"])
        q, k, v = (_matmul_any(h, w[n]) for n in ("query", "key", "value"))
        new = {name: _append(form, old[name], value, step) for name, value in (("key", k), ("value", v))}
        keys, values = (_read_cache(new[name]) for name in ("key", "value"))
        length = keys.shape[1]
        mask = (jnp.arange(length) <= step).reshape(1, 1, 1, 1, length)
        keys, values = (part.reshape(*part.shape[:2], -1) for part in (keys, values))
        x = x + _add_shares(form, _matmul_any(_run_attention(sizes, q, keys, values, mask), w["out"]))
        h = _normalize(x, w["norm2"])
        return x + _add_shares(form, _feed_forward(h, w["gate"], w["up"], w["down"])), new

    x, cache = lax.scan(apply_layer, x, (params["layers"], cache))
    logits = _matmul_any(_normalize(x, params["norm"]), params["unembed"])
    return lax.all_gather(logits.astype(jnp.float32), "model", axis=2, tiled=True), cache


def _append(form: _Format, cache: QuantizedArray | jax.Array, x: jax.Array, step: jax.Array) -> Any:
    """Return a cache, [batch, length, heads, head_dim], with the keys or values of one step."""
    x = x.reshape(x.shape[0], 1, *cache.shape[2:])
    entry = x if form.cache is None else quantize(x, form.cache)
    zero = jnp.int32(0)
    return jax.tree.map(lambda old, new: lax.dynamic_update_slice(old, new, (zero, step, zero, zero)), cache, entry)


def _read_cache(cache: QuantizedArray | jax.Array) -> jax.Array:
    """Return keys or values as floats."""
    return cache.dequantize() if isinstance(cache, QuantizedArray) else cache


# The bytes of a plan: of the arrays on a device, and of what it sends.


class _StoredArray(NamedTuple):
    """An array that is stored between steps.

    Attributes:
        shape: its shape on all devices together.
        dtype: its dtype.
        axes: for each dimension the axis of the mesh that cuts it, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


class MeshPlan(NamedTuple):
    """The bytes of one step on one device.

    Attributes:
        stored: the bytes of "weights", "optimizer state", "saved activations" and "KV cache", as far as the step has
            them.
        sent: the bytes that the device sends, by kind of collective.
        arrays: the arrays of the weights and of the cache, by their path.
    """

    stored: dict[str, int]
    sent: dict[str, int]
    arrays: dict[str, _StoredArray]


class _ShardedStep(NamedTuple):
    """A step, ready to be traced or compiled.

    Attributes:
        function: the step on one device.
        arguments: the shapes of all arguments, on all devices together.
        in_specs: how the mesh cuts them.
        out_specs: how it cuts the results.
        stored: which arguments are stored between steps: their name in a plan, and their place.
    """

    function: Any
    arguments: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: Any
    stored: dict[str, int]

    def map_over(self, mesh: Mesh | AbstractMesh) -> Any:
        """Return the step on all devices of a mesh."""
        # Without check_vma the derivative of a sum over devices is what the step itself says.
        return jax.shard_map(
            self.function, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check_vma=False
        )


def make_training_step(sizes: ModelSizes, form: _Format, batch: int, sequence: int) -> _ShardedStep:
    """Return a training step; its weights are float32 in every format, and travel in the format."""
    layers = {
        name: (jax.ShapeDtypeStruct((sizes.layers, *shape), jnp.float32), _P(None, *_cut(cut)))
        for name, (shape, cut) in _list_matrices(sizes).items()
    }
    gain = (jax.ShapeDtypeStruct((sizes.layers, sizes.width), jnp.float32), _P())
    pairs = {
        "embed": (jax.ShapeDtypeStruct((sizes.vocabulary, sizes.width), jnp.float32), _P("model", "data")),
        "unembed": (jax.ShapeDtypeStruct((sizes.width, sizes.vocabulary), jnp.float32), _P("data", "model")),
        "norm": (jax.ShapeDtypeStruct((sizes.width,), jnp.float32), _P()),
        "layers": {**layers, "norm1": gain, "norm2": gain},
    }
    params, specs = _split_pairs(pairs)
    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    function = functools.partial(_train, sizes, form)
    return _ShardedStep(function, (params, tokens), (specs, _P("data")), (_P(), specs), {"weights": 0})


def make_decoding_step(sizes: ModelSizes, form: _Format, batch: int, sequence: int) -> _ShardedStep:
    """Return a decoding step of one token for each sequence; its weights and its cache are stored in the format."""
    layers = {}
    for name, (shape, cut) in _list_matrices(sizes).items():
        # Blocks along the axis that is not cut, so that each device has whole blocks.
        matrix = _make_shape((sizes.layers, *shape), form.dtype, _make_weight_spec(form, 2 - cut))
        layers[name] = (matrix, _P(None, *("model" if axis == cut else None for axis in range(2))))
    gain = (jax.ShapeDtypeStruct((sizes.layers, sizes.width), jnp.float32), _P())
    pairs = {
        "embed": (jax.ShapeDtypeStruct((sizes.vocabulary, sizes.width), form.dtype), _P("model")),
        "unembed": (
            _make_shape((sizes.width, sizes.vocabulary), form.dtype, _make_weight_spec(form, 0)),
            _P(None, "model"),
        ),
        "norm": (jax.ShapeDtypeStruct((sizes.width,), jnp.float32), _P()),
        "layers": {**layers, "norm1": gain, "norm2": gain},
    }
    params, specs = _split_pairs(pairs)
    shape = (sizes.layers, batch, sequence, sizes.kv_heads, sizes.head_dim)
    cache = dict.fromkeys(("key", "value"), _make_shape(shape, form.dtype, form.cache))
    cache_spec = dict.fromkeys(cache, _P(None, "data", None, "model"))
    tokens, step = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function = functools.partial(_decode, sizes, form)
    in_specs = (specs, cache_spec, _P("data"), _P())
    stored = {"weights": 0, "KV cache": 1}
    return _ShardedStep(function, (params, cache, tokens, step), in_specs, (_P("data"), cache_spec), stored)


def make_plan(
    sizes: ModelSizes, form: _Format, mesh: Mapping[str, int], *, batch: int, sequence: int, is_training: bool
) -> MeshPlan:
    """Return the bytes of a step, traced on an abstract mesh: it needs no device."""
    _check_sizes(sizes, mesh, batch, sequence)
    make_step = make_training_step if is_training else make_decoding_step
    step = make_step(sizes, form, batch, sequence)
    stored = {
        name: _count_all_bytes(_local_shapes(step.arguments[i], step.in_specs[i], mesh))
        for name, i in step.stored.items()
    }
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    jaxpr = jax.make_jaxpr(step.map_over(abstract))(*step.arguments)
    if is_training:
        stored["optimizer state"] = _count_moments(form, step, mesh)
        stored["saved activations"] = _count_saved(jaxpr.jaxpr, sizes.layers)
    sent: dict[str, int] = collections.defaultdict(int)
    for collective in _list_collectives(jaxpr.jaxpr, mesh):
        sent[collective.kind] += collective.sent_bytes
    return MeshPlan(stored, dict(sorted(sent.items())), _list_arrays(step))


def _list_arrays(step: _ShardedStep) -> dict[str, _StoredArray]:
    """Return the arrays that a step stores; of a quantized array, its codes and its scale."""
    arrays = {}
    for name, index in step.stored.items():
        specs, structure = jax.tree_util.tree_flatten_with_path(step.in_specs[index], is_leaf=_is_spec)
        for (path, spec), node in zip(specs, structure.flatten_up_to(step.arguments[index]), strict=True):
            for rest, leaf in jax.tree_util.tree_leaves_with_path(node):
                key = jax.tree_util.keystr((*path, *rest), simple=True, separator="/")
                axes = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
                arrays[f"{name}/{key}"] = _StoredArray(tuple(leaf.shape), str(leaf.dtype), axes)
    return arrays


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


# Bytes of arrays.


def _count_all_bytes(shapes: object) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(_count_bytes(leaf) for leaf in jax.tree.leaves(shapes))


def _local_shapes(tree: object, specs: object, mesh: Mapping[str, int]) -> Any:
    """Return the shapes of the parts of arrays that one device holds."""

    def cut(spec: PartitionSpec, node: object) -> Any:
        return jax.tree.map(lambda leaf: _cut_shape(leaf, spec, mesh), node)

    return jax.tree.map(cut, specs, tree, is_leaf=_is_spec)


def _cut_shape(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    names = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    lengths = (n if name is None else n // mesh[name] for n, name in zip(leaf.shape, names, strict=True))
    return jax.ShapeDtypeStruct(tuple(lengths), leaf.dtype)


def _count_moments(form: _Format, step: _ShardedStep, mesh: Mapping[str, int]) -> int:
    """Return the bytes of Adam's two moments of the parameters on one device, cut as the parameters are."""
    shards = jax.tree.leaves(_local_shapes(step.arguments[0], step.in_specs[0], mesh))
    moments = [_make_shape((math.prod(shard.shape),), jnp.float32, form.moments) for shard in shards]
    return 2 * _count_all_bytes(moments)


def _count_bytes(leaf: Any) -> int:
    width = 8 if leaf.dtype == bool else dtypes.count_packed_bits(np.dtype(leaf.dtype))
    return -(-math.prod(leaf.shape) * width // 8)


# Equations of the traced step.


def _list_collectives(jaxpr: Any, mesh: Mapping[str, int], calls: int = 1) -> Iterator[Collective]:
    """Yield the collectives of a traced program and of the bodies of its loops."""
    for equation in jaxpr.eqns:
        kind = _KINDS.get(equation.primitive.name)
        if kind is not None:
            names = equation.params.get("axes", equation.params.get("axis_name"))
            names = names if isinstance(names, tuple) else (names,)
            devices = math.prod(mesh[name] for name in names)
            for result in equation.outvars if devices > 1 else ():
                bits = 8 * _count_bytes(result.aval)
                sent = calls * count_sent(kind, bits, devices)
                yield Collective(kind, str(result.aval.dtype), result.aval.shape, devices, calls, sent)
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in _list_bodies(equation):
            yield from _list_collectives(inner, mesh, calls * trips)


def _list_bodies(equation: Equation) -> list[Any]:
    """Return the programs in the parameters of an equation."""
    bodies = [getattr(value, "jaxpr", value) for value in jax.tree.leaves(list(equation.params.values()))]
    return [body for body in bodies if hasattr(body, "eqns")]


def _count_saved(jaxpr: Any, layers: int) -> int:
    """Return the bytes that the forward pass over the layers keeps for the backward pass, on one device.

    They are what the first loop over the layers stacks. The loops of quantizations stack nothing.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == layers:
            pairs = zip(equation.outvars, equation.params["jaxpr"].jaxpr.outvars, strict=True)
            # What a loop stacks has a dimension more than in its body.
            if saved := sum(_count_bytes(a.aval) for a, b in pairs if a.aval.ndim > b.aval.ndim):
                return saved
        for inner in _list_bodies(equation):
            if saved := _count_saved(inner, layers):
                return saved
    return 0


def _cut(model_axis: int) -> tuple[str, str]:
    """Return the axes that cut a matrix in training: one dimension by `model`, the other by `data`."""
    return ("data", "model") if model_axis == 1 else ("model", "data")


def _split_pairs(pairs: Any) -> tuple[Any, Any]:
    """Return the shapes and the partitions of a tree of pairs of them."""
    is_pair = lambda node: isinstance(node, tuple)  # noqa: E731 a leaf of two lines is harder to read
    return tuple(jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=is_pair) for i in range(2))
