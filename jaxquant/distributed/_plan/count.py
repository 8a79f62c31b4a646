"""The bytes of a plan: of the arrays on a device, and of what it sends."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ..._core import dtypes
from ..traffic import Collective, count_sent
from . import steps
from .sizes import Format, Sizes, check_sizes, list_matrices, make_shape, make_weight_spec

P = PartitionSpec
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


class StoredArray(NamedTuple):
    """An array that is stored between steps.

    Attributes:
        shape: its shape on all devices together.
        dtype: its dtype.
        axes: for each dimension the axis of the mesh that cuts it, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


class Plan(NamedTuple):
    """The bytes of one step on one device.

    Attributes:
        stored: the bytes of "weights", "optimizer state", "saved activations" and "KV cache", of those that the step
            has.
        sent: the bytes that the device sends, by kind of collective.
        arrays: the arrays of the weights and of the cache, by their path.
    """

    stored: dict[str, int]
    sent: dict[str, int]
    arrays: dict[str, StoredArray]


class Step(NamedTuple):
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


def make_training_step(sizes: Sizes, form: Format, batch: int, sequence: int) -> Step:
    """Return a training step; its weights are float32 in every format, and travel in the format."""
    layers = {
        name: (jax.ShapeDtypeStruct((sizes.layers, *shape), jnp.float32), P(None, *_cut(cut)))
        for name, (shape, cut) in list_matrices(sizes).items()
    }
    gain = (jax.ShapeDtypeStruct((sizes.layers, sizes.width), jnp.float32), P())
    pairs = {
        "embed": (jax.ShapeDtypeStruct((sizes.vocabulary, sizes.width), jnp.float32), P("model", "data")),
        "unembed": (jax.ShapeDtypeStruct((sizes.width, sizes.vocabulary), jnp.float32), P("data", "model")),
        "norm": (jax.ShapeDtypeStruct((sizes.width,), jnp.float32), P()),
        "layers": {**layers, "norm1": gain, "norm2": gain},
    }
    params, specs = _split_pairs(pairs)
    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    function = functools.partial(steps.train, sizes, form)
    return Step(function, (params, tokens), (specs, P("data")), (P(), specs), {"weights": 0})


def make_decoding_step(sizes: Sizes, form: Format, batch: int, sequence: int) -> Step:
    """Return a decoding step of one token for each sequence; its weights and its cache are stored in the format."""
    layers = {}
    for name, (shape, cut) in list_matrices(sizes).items():
        # Blocks along the axis that is not cut, so that each device has whole blocks.
        matrix = make_shape((sizes.layers, *shape), form.dtype, make_weight_spec(form, 2 - cut))
        layers[name] = (matrix, P(None, *("model" if axis == cut else None for axis in range(2))))
    gain = (jax.ShapeDtypeStruct((sizes.layers, sizes.width), jnp.float32), P())
    pairs = {
        "embed": (jax.ShapeDtypeStruct((sizes.vocabulary, sizes.width), form.dtype), P("model")),
        "unembed": (
            make_shape((sizes.width, sizes.vocabulary), form.dtype, make_weight_spec(form, 0)),
            P(None, "model"),
        ),
        "norm": (jax.ShapeDtypeStruct((sizes.width,), jnp.float32), P()),
        "layers": {**layers, "norm1": gain, "norm2": gain},
    }
    params, specs = _split_pairs(pairs)
    shape = (sizes.layers, batch, sequence, sizes.kv_heads, sizes.head_dim)
    cache = dict.fromkeys(("key", "value"), make_shape(shape, form.dtype, form.cache))
    cache_spec = dict.fromkeys(cache, P(None, "data", None, "model"))
    tokens, step = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function = functools.partial(steps.decode, sizes, form)
    in_specs = (specs, cache_spec, P("data"), P())
    stored = {"weights": 0, "KV cache": 1}
    return Step(function, (params, cache, tokens, step), in_specs, (P("data"), cache_spec), stored)


def make_plan(
    sizes: Sizes, form: Format, mesh: Mapping[str, int], *, batch: int, sequence: int, is_training: bool
) -> Plan:
    """Return the bytes of a step, traced on an abstract mesh: it needs no device."""
    check_sizes(sizes, mesh, batch, sequence)
    make_step = make_training_step if is_training else make_decoding_step
    step = make_step(sizes, form, batch, sequence)
    stored = {name: count_local(step.arguments[i], step.in_specs[i], mesh) for name, i in step.stored.items()}
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    jaxpr = jax.make_jaxpr(step.map_over(abstract))(*step.arguments)
    if is_training:
        stored["optimizer state"] = count_moments(form, step, mesh)
        stored["saved activations"] = count_saved(jaxpr.jaxpr, sizes.layers)
    sent: dict[str, int] = collections.defaultdict(int)
    for collective in list_collectives(jaxpr.jaxpr, mesh):
        sent[collective.kind] += collective.sent_bytes
    return Plan(stored, dict(sorted(sent.items())), list_arrays(step))


def list_arrays(step: Step) -> dict[str, StoredArray]:
    """Return the arrays that a step stores; those of a quantized array are its codes and its scale."""
    arrays = {}
    for name, place in step.stored.items():
        specs, structure = jax.tree_util.tree_flatten_with_path(step.in_specs[place], is_leaf=_is_spec)
        for (path, spec), node in zip(specs, structure.flatten_up_to(step.arguments[place]), strict=True):
            for rest, leaf in jax.tree_util.tree_leaves_with_path(node):
                key = jax.tree_util.keystr((*path, *rest), simple=True, separator="/")
                axes = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
                arrays[f"{name}/{key}"] = StoredArray(tuple(leaf.shape), str(leaf.dtype), axes)
    return arrays


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


# Bytes of arrays.


def count_local(tree: Any, specs: Any, mesh: Mapping[str, int]) -> int:
    """Return the bytes of the parts of arrays that one device holds."""
    shapes = local_shapes(tree, specs, mesh)
    return sum(_count_bytes(leaf) for leaf in jax.tree.leaves(shapes))


def local_shapes(tree: Any, specs: Any, mesh: Mapping[str, int]) -> Any:
    """Return the shapes of the parts of arrays that one device holds."""

    def cut(spec: PartitionSpec, node: Any) -> Any:
        return jax.tree.map(lambda leaf: _cut_shape(leaf, spec, mesh), node)

    return jax.tree.map(cut, specs, tree, is_leaf=_is_spec)


def _cut_shape(leaf: Any, spec: PartitionSpec, mesh: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    names = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    lengths = (n if name is None else n // mesh[name] for n, name in zip(leaf.shape, names, strict=True))
    return jax.ShapeDtypeStruct(tuple(lengths), leaf.dtype)


def count_moments(form: Format, step: Step, mesh: Mapping[str, int]) -> int:
    """Return the bytes of Adam's two moments of the parameters on one device, cut as the parameters are."""
    shards = jax.tree.leaves(local_shapes(step.arguments[0], step.in_specs[0], mesh))
    moments = [make_shape((math.prod(shard.shape),), jnp.float32, form.moments) for shard in shards]
    return 2 * sum(_count_bytes(leaf) for leaf in jax.tree.leaves(moments))


def _count_bytes(leaf: Any) -> int:
    width = 8 if leaf.dtype == bool else dtypes.find_width(np.dtype(leaf.dtype))
    return -(-math.prod(leaf.shape) * width // 8)


# Equations of the traced step.


def list_collectives(jaxpr: Any, mesh: Mapping[str, int], calls: int = 1) -> Iterator[Collective]:
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
            yield from list_collectives(inner, mesh, calls * trips)


def _list_bodies(equation: Any) -> list[Any]:
    """Return the programs in the parameters of an equation."""
    bodies = [getattr(value, "jaxpr", value) for value in jax.tree.leaves(list(equation.params.values()))]
    return [body for body in bodies if hasattr(body, "eqns")]


def count_saved(jaxpr: Any, layers: int) -> int:
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
            if saved := count_saved(inner, layers):
                return saved
    return 0


def _cut(model_axis: int) -> tuple[str, str]:
    """Return the axes that cut a matrix in training: one dimension by `model`, the other by `data`."""
    return ("data", "model") if model_axis == 1 else ("model", "data")


def _split_pairs(pairs: Any) -> tuple[Any, Any]:
    """Return the shapes and the partitions of a tree of pairs of them."""
    is_pair = lambda node: isinstance(node, tuple)  # noqa: E731 a leaf of two lines is harder to read
    return tuple(jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=is_pair) for i in range(2))
