"""Adapters on frozen codes: LoRA, DoRA and QA-LoRA on prepared functions, and the files of the package PEFT."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._arrays.quantize import quantize_kernel
from ._arrays.quantized_array import QuantizedArray, read_entries
from ._core import checks, dtypes, granularity
from .checkpoint import CheckpointError, Info, peft
from .checkpoint import load as load_checkpoint
from .checkpoint import save as save_checkpoint
from .checkpoint.formats.gguf_header import ARCHITECTURES
from .transform import Prepared, QuantizedTree
from .transform.adapters import (
    AdaptedTree,
    AdapterAxes,
    LoRA,
    align,
    align_factors,
    check_adapter,
    check_paths,
    compute_factor,
    compute_norms,
    list_factor_shapes,
    multiply_factors,
)
from .transform.rules import matches_pattern
from .transform.session import LeafPlan, Signature, check_float_results, read_quantized

__all__ = ["AdaptedTree", "LoRA", "Merged", "adapt", "load_gguf", "load_peft", "merge", "save_gguf", "save_peft"]

_ADAPT, _MERGE, _SAVE, _LOAD = "lora.adapt", "lora.merge", "lora.save_peft", "lora.load_peft"
_SAVE_GGUF, _LOAD_GGUF = "lora.save_gguf", "lora.load_gguf"
_PREFIX = "base_model.model."
_FACTORS = {"lora_A.weight": "a", "lora_B.weight": "b"}
_TABLE_FACTORS = {"lora_embedding_A": "a", "lora_embedding_B": "b"}
_MAGNITUDE = "lora_magnitude_vector"
_LONGEST_NAME = 63  # bytes: GGML_MAX_NAME of llama.cpp, without the zero at the end
Naming = Callable[[str], str | None]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def adapt(
    prepared: Prepared, q: QuantizedTree, lora: LoRA | Sequence[LoRA], key: jax.Array, *, params: Any = None,
    iterations: int = 1, dtype: DTypeLike = "float32",
) -> AdaptedTree:  # fmt: skip
    """Give converted parameters adapters, which are trained while the codes stay as they are.

    For an adapted tree `Prepared.apply` and `Prepared.fake_apply` contract the codes, and add small contractions with
    the factors a and b of each adapter. At first the factors "b" are 0, so that nothing changes. With `params`, the
    adapters start as an approximation of what the codes have lost.

    An adapter belongs to a parameter: it acts on all contractions and lookups that read the parameter, as on the table
    of a model whose last layer is tied to its embeddings.

    Args:
        prepared: the prepared function. No rule has an `output`.
        q: the converted parameters, as `Prepared.convert` returns them.
        lora: the settings, or several; the first whose targets match a parameter applies to it.
        key: a key of `jax.random`, for the factors "a".
        params: the parameters in floats that q was converted from. Then a @ b times the scaling is the best
            approximation of rank `rank` of the difference between these floats and the codes' values, found with a
            singular value decomposition. None to start with 0.
        iterations: how often the adapters are found. Before each time but the first, what the adapters leave of
            `params` is quantized, as `Prepared.convert` does, and these codes take the place of those of q. That brings
            the sum nearer to `params` at first; it does not have to do so in each iteration.
        dtype: Static. The dtype of the adapters: float32, bfloat16 or float16.

    Returns:
        The tree. Its `adapters` are what an optimizer trains.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: targets match no parameter that is quantized; a parameter that they match can have no adapter,
            because it is concatenated with others, contracted in groups or along several of its axes in turn, or a
            result is rounded to codes; the variant does not fit the parameter; an array of `params` has another shape
            than its codes; or there are several iterations without `params`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["up"]) @ params["down"]
        >>> params = {"up": jnp.eye(4, 8), "down": jnp.eye(8, 2)}
        >>> x = jnp.array([[0.0, 0.5, 1.0, 2.5]])
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> settings = jq.lora.LoRA(rank=2, targets="up")
        >>> adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0))
        >>> jax.tree.map(jnp.shape, adapted.adapters)
        {'up': {'a': (4, 2), 'b': (2, 8)}}
        >>> prepared.apply(adapted, x).shape
        (1, 2)

    Source: Hu et al., arXiv 2106.09685, section 4; with `params` LoftQ, Li et al., arXiv 2310.08659,
    algorithm 1, which begins with the codes of q.
    """
    settings = _read_settings(lora)
    dtype = checks.check_dtype(_ADAPT, "dtype", dtype, dtypes.FLOATS)
    checks.check_integer(_ADAPT, "iterations", iterations)
    expected = "1, or a larger number with params="
    checks.require(
        iterations == 1 or (iterations > 1 and params is not None), _ADAPT, "iterations", expected, iterations
    )
    check_float_results(_ADAPT, prepared)
    checks.require_type(checks.is_key(key), _ADAPT, "key", "a key of jax.random", checks.describe_value(key))
    signature = Signature(read_quantized(_ADAPT, q).params)
    floats = None if params is None else Signature(params)
    for given, name in ((signature, "q.params"), (floats, "params")):
        if given is not None:
            same = given.names == prepared.names
            checks.require(same, _ADAPT, name, "the paths of the parameters of prepare", ", ".join(given.names[:4]))
    chosen = match_targets(_ADAPT, prepared, settings)
    adapters, found, arrays = {}, [], list(signature.arrays)
    for place, setting in chosen.items():
        path, plan, w = prepared.names[place], prepared.leaves[place], signature.arrays[place]
        expected = f"a quantized array at {path}, as Prepared.convert returns it"
        checks.require_type(isinstance(w, QuantizedArray), _ADAPT, "q.params", expected, type(w).__name__)
        with checks.prefix_errors(path):
            check_variant(_ADAPT, setting, plan, w)
        x = None if floats is None else floats.arrays[place]
        if x is not None:
            expected = f"floats of shape {plan.shape} at {path}"
            holds = not isinstance(x, QuantizedArray) and jnp.issubdtype(jnp.result_type(x), jnp.floating)
            checks.require_type(holds, _ADAPT, "params", expected, checks.describe_value(x))
            checks.require(jnp.shape(x) == plan.shape, _ADAPT, "params", expected, f"shape {jnp.shape(x)}")
        for iteration in range(iterations):
            if iteration:
                w = _quantize_rest(x, adapters[path], setting, plan, w)
            adapters[path] = _start_adapter(setting, plan, w, x, jax.random.fold_in(key, place), dtype)
        arrays[place] = w
        found.append((path, setting))
    return AdaptedTree(q.replace(params=signature.rebuild(arrays)) if iterations > 1 else q, adapters, tuple(found))


def _read_settings(lora: Any) -> tuple[LoRA, ...]:
    settings = tuple(lora) if isinstance(lora, Sequence) else (lora,)
    holds = bool(settings) and all(isinstance(setting, LoRA) for setting in settings)
    checks.require_type(holds, _ADAPT, "lora", "a LoRA or a sequence of them", checks.describe_value(lora))
    return settings


def match_targets(function: str, prepared: Prepared, settings: Sequence[LoRA]) -> dict[int, LoRA]:
    """Return the settings of each parameter that gets an adapter, by its place."""
    chosen: dict[int, LoRA] = {}
    for place in prepared.leaves:
        matching = (setting for setting in settings if matches_pattern(setting.targets, prepared.names[place]))
        setting = next(matching, None)
        if setting is not None:
            chosen[place] = setting
    names = [prepared.names[place] for place in prepared.leaves]
    for setting in settings:
        is_used = any(setting is other for other in chosen.values())
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "(there are none)"
        expected = f"targets that match one of the quantized parameters {listed}, which no LoRA before it matches"
        checks.require(is_used, function, "lora", expected, repr(setting.targets))
    return chosen


def check_variant(function: str, lora: LoRA, plan: LeafPlan, q: QuantizedArray) -> None:
    """Raise unless a parameter can have an adapter with these settings."""
    axes = plan.adapter
    if not isinstance(axes, AdapterAxes):
        checks.refuse(function, "lora", "targets that can have adapters", f"one that cannot: {axes}")
    if lora.variant == "dora":
        others = [name for name in axes.operations if name not in ("dot_general", "conv_general_dilated")]
        expected = 'variant="lora" or "qa" for a parameter of ' + " and ".join(others)
        checks.require(not others, function, "lora", expected, '"dora"')
    if lora.variant == "qa":
        is_integer = q.codebook is None and q.codes.dtype not in dtypes.SMALL_FLOATS
        expected = "a parameter with integer codes, which can have offsets, or another variant"
        checks.require(is_integer, function, "lora", expected, f'"qa" for {q.format} codes')
        expected = 'variant="lora" for a table that is only looked up, whose offsets would be as many as its codes'
        checks.require(axes.operations != ("take",), function, "lora", expected, '"qa"')


def _start_adapter(
    lora: LoRA, plan: LeafPlan, q: QuantizedArray, floats: Any, key: jax.Array, dtype: Any
) -> Mapping[str, jax.Array]:
    """Return the initial values of an adapter."""
    axes = plan.adapter
    assert isinstance(axes, AdapterAxes)
    shapes = list_factor_shapes(lora, plan.shape, axes, q)
    if floats is None:
        bound = math.prod(shapes["a"][len(axes.shared) : -1]) ** -0.5
        a = jax.random.uniform(key, shapes["a"], jnp.float32, -bound, bound)
        adapter = {"a": a, "b": jnp.zeros(shapes["b"])}
    else:
        error = jnp.asarray(floats, jnp.float32) - q.dequantize().astype(jnp.float32)
        adapter = _factorize(error, lora, axes, q, shapes)
    adapter = {name: part.astype(dtype) for name, part in adapter.items()}
    if lora.variant == "dora":
        factors = align_factors(adapter, lora, plan.shape, axes, q)
        norms = compute_norms(q, factors["a"], factors["b"], axes)
        adapter["magnitude"] = norms.reshape(shapes["magnitude"]).astype(dtype)
    return adapter


def _quantize_rest(
    x: Any, adapter: Mapping[str, jax.Array], lora: LoRA, plan: LeafPlan, q: QuantizedArray
) -> QuantizedArray:
    """Return the codes of what an adapter leaves of floats."""
    axes = plan.adapter
    assert isinstance(axes, AdapterAxes)
    factors = align_factors(adapter, lora, plan.shape, axes, q)
    rest = jnp.asarray(x, jnp.float32) - multiply_factors(factors["a"], factors["b"])
    return plan.store(quantize_kernel(rest.astype(q.dtype), plan.spec, plan.stored_last))


def _factorize(
    error: jax.Array, lora: LoRA, axes: AdapterAxes, q: QuantizedArray, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Return the factors of the best approximation of an array."""
    if lora.variant == "qa":
        sizes = granularity.Aligned(q.block_size).sizes(q.scale.shape, error.shape)
        assert sizes is not None
        for axis in axes.inputs:
            error = _average_blocks(error, axis, q.scale.shape[axis], sizes[axis])
    order = (*axes.shared, *axes.inputs, *axes.outputs)
    matrix = error.transpose(order)
    cut = len(axes.shared)
    shared, outputs = matrix.shape[:cut], math.prod(matrix.shape[cut + len(axes.inputs) :])
    u, s, v = jnp.linalg.svd(matrix.reshape(*shared, -1, outputs), full_matrices=False)
    count = min(lora.rank, s.shape[-1])
    root = jnp.sqrt(s[..., :count])
    a, b = u[..., :count] * root[..., None, :] / lora.scaling, root[..., None] * v[..., :count, :]
    pads = [(0, 0)] * cut
    a = jnp.pad(a, [*pads, (0, 0), (0, lora.rank - count)])
    b = jnp.pad(b, [*pads, (0, lora.rank - count), (0, 0)])
    return {"a": a.reshape(shapes["a"]), "b": b.reshape(shapes["b"])}


def _average_blocks(x: jax.Array, axis: int, count: int, size: int) -> jax.Array:
    """Return the mean of each block along an axis; the last one may be short."""
    length = x.shape[axis]
    if count == length:
        return x
    size = length if count == 1 else size
    padded = jnp.pad(x, [(0, count * size - length if i == axis else 0) for i in range(x.ndim)])
    sums = padded.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]).sum(axis + 1)
    lengths = jnp.minimum(size, length - size * jnp.arange(count)).astype(x.dtype)
    return sums / lengths.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


class Merged(NamedTuple):
    """Parameters with their adapters in codes, and what that costs.

    Attributes:
        tree: the parameters and the ranges, for `Prepared.apply`.
        losses: by the path of each adapted parameter, a float32 scalar: the norm of the rounding errors, divided by the
            norm of what the adapter changes. At 1 and more, rounding takes away as much as training has given.
    """

    tree: QuantizedTree
    losses: dict[str, jax.Array]


def merge(prepared: Prepared, adapted: AdaptedTree) -> Merged:
    """Put adapters into the codes of their parameters.

    With the variant "qa", the codes and the scales stay as they are, and offsets take the place of zero points: nothing
    is rounded but the offsets, as floats. Otherwise the sum of the parameter and its adapter is quantized again, as
    `Prepared.convert` does. Codes that `prepare` was given, as of a GGUF file, keep their dtype and granularity, and
    those of their scales, so that the same type of GGUF holds them again. That changes codes and scales, and loses a
    part of what was trained, as `losses` says: serve the adapted tree itself if that is too much.

    Args:
        prepared: the prepared function.
        adapted: the parameters with their adapters.

    Returns:
        The tree without adapters, and the losses.

    Raises:
        TypeError: prepared is no `Prepared`, or adapted no `AdaptedTree`.
        ValueError: the tree has other paths than in `prepare`, or adapters of other paths or shapes than `adapt` made.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"w": jnp.array([[1.0, 0.5], [-2.0, 7.0]])}, jnp.array([[0.5, 1.0]])
        >>> rules = [jq.Rule(weight=jq.Weight("int4", block=2))]
        >>> prepared = jq.prepare(lambda p, x: x @ p["w"], params, x, rules=rules)
        >>> settings = jq.lora.LoRA(rank=1, variant="qa")
        >>> adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0))
        >>> adapted = adapted.replace(adapters={"w": {"a": jnp.ones((1, 1)), "b": jnp.array([[0.25, -1.0]])}})
        >>> tree, losses = jq.lora.merge(prepared, adapted)
        >>> tree.params["w"].offset, bool((tree.params["w"].codes == adapted.frozen.params["w"].codes).all())
        (Array([[ 0.25, -1.  ]], dtype=float32), True)
        >>> bool(losses["w"] < 1e-6)
        True

    Source: Hu et al., arXiv 2106.09685, section 4.1; for "qa" Xu et al., arXiv 2309.14717, section 3.3.
    """
    checks.require_type(
        isinstance(adapted, AdaptedTree), _MERGE, "adapted", "an AdaptedTree", checks.describe_value(adapted)
    )
    check_float_results(_MERGE, prepared)
    signature, settings = Signature(read_quantized(_MERGE, adapted.frozen).params), dict(adapted.settings)
    same = signature.names == prepared.names
    checks.require(same, _MERGE, "adapted", "the paths of the parameters of prepare", ", ".join(signature.names[:4]))
    check_paths(_MERGE, adapted, prepared.names, prepared.leaves)
    arrays, losses = list(signature.arrays), {}
    for place, plan in prepared.leaves.items():
        path = prepared.names[place]
        if path in settings:
            with checks.prefix_errors(path), checks.name_errors(_MERGE):
                check_adapter(_MERGE, path, adapted.adapters[path], settings[path], plan, arrays[place])
                arrays[place], losses[path] = _merge_adapter(
                    arrays[place], adapted.adapters[path], settings[path], plan
                )
    return Merged(adapted.frozen.replace(params=signature.rebuild(arrays)), losses)


def _merge_adapter(q: QuantizedArray, adapter: Any, lora: LoRA, plan: LeafPlan) -> tuple[QuantizedArray, jax.Array]:
    axes = plan.adapter
    assert isinstance(axes, AdapterAxes)
    factors = align_factors(adapter, lora, plan.shape, axes, q)
    before = q.dequantize().astype(jnp.float32)
    after = before + multiply_factors(factors["a"], factors["b"])
    if lora.variant == "dora":
        magnitude = align(jnp.asarray(adapter["magnitude"])[..., None], (*axes.shared, *axes.outputs), after.ndim)
        after *= compute_factor(magnitude[..., 0], compute_norms(q, factors["a"], factors["b"], axes))
    new = _shift_blocks(q, adapter, lora, plan) if lora.variant == "qa" else plan.store(
        quantize_kernel(after.astype(q.dtype), plan.spec, plan.stored_last)
    )  # fmt: skip
    change, error = (jnp.sqrt(jnp.sum((x - after) ** 2)) for x in (before, new.dequantize().astype(jnp.float32)))
    return new, jnp.where(error == 0, 0.0, error / change)


def _shift_blocks(q: QuantizedArray, adapter: Any, lora: LoRA, plan: LeafPlan) -> QuantizedArray:
    """Return the codes with offsets that have the adapter in them."""
    axes = plan.adapter
    assert isinstance(axes, AdapterAxes)
    # Of an array with one element for each block, so that no factor is repeated.
    shape = tuple(q.scale.shape[axis] if axis in axes.inputs else n for axis, n in enumerate(plan.shape))
    factors = align_factors(adapter, lora, shape, axes, q)
    offset: Any = 0.0 if q.offset is None else read_entries(q.offset).astype(jnp.float32)
    if q.zero_point is not None:
        offset = -q.zero_point.astype(jnp.float32) * dtypes.scale_as_float32(read_entries(q.scale))
    total = offset + multiply_factors(factors["a"], factors["b"])
    return q.replace(zero_point=None, offset=total)


def save_peft(
    folder: str | os.PathLike[str], prepared: Prepared, adapted: AdaptedTree, *, names: Naming | None = None,
    base_model: str | None = None,
) -> None:  # fmt: skip
    """Write adapters as PEFT does, for torch and for the servers that read PEFT's files.

    Factors of the variant "qa" are written with a row for each input, as plain LoRA. Adapters of a stack of layers
    become one of each layer. PEFT's layers multiply by the transpose of a matrix (outputs, inputs), so several axes of
    inputs or outputs become one, in their order in the parameter.

    Args:
        folder: the folder, which is made if there is none. Files of these names in it are replaced.
        prepared: the prepared function.
        adapted: the parameters with their adapters.
        names: a function from the path of a parameter to the name of the torch module, such as
            "model.layers.0.self_attn.q_proj". Of stacked layers it holds "{}" for the number of the layer. None takes
            the path with dots in place of "/", without a last "weight", "kernel" or "embedding". If the weights come
            from a GGUF file of Llama's architecture, the rows of q and k, and therefore the columns of b, are in
            another order than in torch: put the weights in torch's order before training.
        base_model: what the file names as the model, `base_model_name_or_path`.

    Returns:
        None.

    Raises:
        CheckpointError: the folder cannot be made or written to.
        ModuleNotFoundError: safetensors is not installed.
        TypeError: an argument has a wrong type.
        ValueError: an adapter belongs to a convolution, to several stacks, or to a table that is contracted, too, which
            PEFT's files cannot say; adapters differ in their variant, dropout or rule of scaling; or two parameters
            have one name.

    Example:
        >>> import os, tempfile, jax, jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"proj": {"kernel": jnp.ones((4, 2))}}, jnp.ones((1, 4))
        >>> apply = lambda params, x: x @ params["proj"]["kernel"]
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> q = prepared.convert(params)
        >>> adapted = jq.lora.adapt(prepared, q, jq.lora.LoRA(rank=3), jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jq.lora.save_peft(folder, prepared, adapted)
        ...     print(*sorted(os.listdir(folder)))
        ...     loaded = jq.lora.load_peft(folder, prepared, q)
        adapter_config.json adapter_model.safetensors
        >>> bool((loaded.adapters["proj/kernel"]["a"] == adapted.adapters["proj/kernel"]["a"]).all())
        True

    Source: the files of PEFT 0.21, https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    is_tree = isinstance(adapted, AdaptedTree)
    checks.require_type(is_tree, _SAVE, "adapted", "an AdaptedTree", checks.describe_value(adapted))
    check_float_results(_SAVE, prepared)
    expected = "the name of a model, as text, or None"
    is_name = base_model is None or isinstance(base_model, str)
    checks.require_type(is_name, _SAVE, "base_model", expected, checks.describe_value(base_model))
    settings = dict(adapted.settings)
    expected = "adapters with one variant, dropout and rule of scaling, because a file has one of each"
    kinds = {(x.variant == "dora", float(x.dropout), x.rank_stabilized) for x in settings.values()}
    checks.require(len(kinds) == 1, _SAVE, "adapted", expected, sorted(kinds))
    tensors: dict[str, np.ndarray] = {}
    modules: dict[str, LoRA] = {}
    for entry in _iterate_matrices(_SAVE, prepared, adapted, names or _name_module):
        modules[entry.module] = entry.lora
        for suffix, part in _list_suffixes(entry.axes, entry.lora).items():
            tensors[f"{_PREFIX}{entry.module}.{suffix}"] = entry.parts[part]
    peft.write_folder(folder, _make_config(modules, base_model), tensors)


def load_peft(
    folder: str | os.PathLike[str], prepared: Prepared, q: QuantizedTree, *, names: Naming | None = None
) -> AdaptedTree:
    """Read the adapters of PEFT's files, and put them on converted parameters.

    Args:
        folder: the folder with `adapter_config.json` and `adapter_model.safetensors`.
        prepared: the prepared function.
        q: the converted parameters.
        names: a function from the path of a parameter to the name of the torch module, as in `save_peft`. It is called
            for each parameter with codes, and returns None for one without adapters in the file.

    Returns:
        The tree. Its adapters have the dtype of the file.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        CheckpointError: a file cannot be read.
        TypeError: an argument has a wrong type.
        ValueError: a file is damaged or has settings that change what an adapter computes; a tensor is missing, has
            another shape than its parameter needs, or belongs to no parameter that is quantized.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"proj": {"kernel": jnp.ones((4, 2))}}, jnp.ones((1, 4))
        >>> apply = lambda params, x: x @ params["proj"]["kernel"]
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> q = prepared.convert(params)
        >>> adapted = jq.lora.adapt(prepared, q, jq.lora.LoRA(rank=3), jax.random.key(0))
        >>> names = lambda path: {"proj/kernel": "model.layers.0.mlp.up_proj"}[path]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jq.lora.save_peft(folder, prepared, adapted, names=names)
        ...     jq.lora.load_peft(folder, prepared, q, names=names)
        AdaptedTree(QuantizedTree(1 quantized array, 0 other, 0 ranges, nbytes=16), proj/kernel: rank 3)

    Source: the files of PEFT 0.21, https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    check_float_results(_LOAD, prepared)
    codes = Signature(read_quantized(_LOAD, q).params)
    same = codes.names == prepared.names
    checks.require(same, _LOAD, "q.params", "the paths of the parameters of prepare", ", ".join(codes.names[:4]))
    config, tensors = peft.read_folder(_LOAD, folder)
    left, adapters, settings = dict(tensors), {}, []
    for place, plan in prepared.leaves.items():
        path, axes = prepared.names[place], plan.adapter
        # Parameters that can have no adapter have no tensors, or the tensors are left over.
        if not isinstance(axes, AdapterAxes) or len(axes.shared) > 1:
            continue
        modules = _list_modules(_LOAD, path, plan, axes, names or _name_module)
        suffixes = [*_FACTORS, *_TABLE_FACTORS, _MAGNITUDE]
        if not any(f"{_PREFIX}{module}.{suffix}" in tensors for module, _ in modules for suffix in suffixes):
            continue
        _read_axes(_LOAD, "folder", path, plan)
        lora = _choose_settings(config, path, [module for module, _ in modules])
        with checks.prefix_errors(path):
            check_variant(_LOAD, lora, plan, codes.arrays[place])
        stems = [f"{_PREFIX}{module}" for module, _ in modules]
        adapters[path] = _read_adapter(_LOAD, left, lora, plan, axes, stems, _list_suffixes(axes, lora))
        settings.append((path, lora))
    expected = _describe_names(prepared, names or _name_module)
    checks.require(not left, _LOAD, "folder", expected, ", ".join(sorted(left)[:4]))
    checks.require(bool(settings), _LOAD, "folder", expected, "a file without tensors")
    return AdaptedTree(q, adapters, tuple(settings))


def save_gguf(
    path: str | os.PathLike[str], prepared: Prepared, adapted: AdaptedTree, *, architecture: str | Info,
    names: Naming | None = None,
) -> None:  # fmt: skip
    """Write adapters as a GGUF file, for llama.cpp to use beside the file of the model.

    The file has the names and shapes that llama.cpp's convert_lora_to_gguf.py gives it: for the tensor
    "blk.0.attn_q.weight" of the model, "blk.0.attn_q.weight.lora_a" [rank, inputs] and ".lora_b" [outputs, rank], in
    the dtype of the adapters. A file has one alpha, by which llama.cpp multiplies and divides by each rank: the factors
    "b" of adapters with another alpha, or of `rank_stabilized` ones with another rank, are multiplied by the quotient.

    Args:
        path: the file.
        prepared: the prepared function.
        adapted: the parameters with their adapters.
        architecture: the architecture that the model's file names, "general.architecture", such as "llama"; or the
            `Info` of that file, whose architecture is taken as it is. llama.cpp refuses adapters of another one.
        names: a function from the path of a parameter to the name of the tensor in the model's file. Of stacked layers
            it holds "{}" for the number of the layer. None takes the paths as they are, as of a GGUF file that
            `jq.checkpoint.load` has read.

    Returns:
        None.

    Raises:
        CheckpointError: the file cannot be written.
        TypeError: an argument has a wrong type.
        ValueError: an adapter belongs to a table or to a convolution, is of the variant "dora", or is too large for
            its dtype with the alpha of the file; two parameters have one name; a tensor's name has more than 63 bytes,
            which llama.cpp cannot read; or the name of the architecture is unknown.

    Example:
        >>> import os, tempfile, jax, jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"blk.0.ffn_up.weight": jnp.ones((2, 4))}, jnp.ones((1, 4))
        >>> apply = lambda params, x: x @ params["blk.0.ffn_up.weight"].T
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> q = prepared.convert(params)
        >>> adapted = jq.lora.adapt(prepared, q, jq.lora.LoRA(rank=3), jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "adapter.gguf")
        ...     jq.lora.save_gguf(path, prepared, adapted, architecture="llama")
        ...     print(*jq.checkpoint.load(path)[1].tensors)
        ...     jq.lora.load_gguf(path, prepared, q)
        blk.0.ffn_up.weight.lora_a blk.0.ffn_up.weight.lora_b
        AdaptedTree(QuantizedTree(1 quantized array, 0 other, 0 ranges, nbytes=16), blk.0.ffn_up.weight: rank 3)

    Source: llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp.
    """
    is_tree = isinstance(adapted, AdaptedTree)
    checks.require_type(is_tree, _SAVE_GGUF, "adapted", "an AdaptedTree", checks.describe_value(adapted))
    check_float_results(_SAVE_GGUF, prepared)
    architecture = _read_architecture(architecture)
    tensors: dict[str, np.ndarray] = {}
    alpha = None
    for module, lora, axes, parts in _iterate_matrices(_SAVE_GGUF, prepared, adapted, names or str):
        expected = 'adapters of products, and not of the variant "dora"'
        holds = axes.operations != ("take",) and lora.variant != "dora"
        checks.require(holds, _SAVE_GGUF, "adapted", expected, f"one of {module} ({lora.variant})")
        size = len(f"{module}.lora_a".encode("utf-8", "surrogateescape"))
        expected, got = f"names of tensors of at most {_LONGEST_NAME} bytes", f"{size} in {module}.lora_a"
        checks.require(size <= _LONGEST_NAME, _SAVE_GGUF, "names", expected, got)
        # What llama.cpp divides by the rank.
        product = lora.scaling * lora.rank
        alpha = product if alpha is None else alpha
        b = parts["b"]
        if product != alpha:
            with np.errstate(over="ignore"):
                b = (b * np.float32(product / alpha)).astype(b.dtype)
            expected = f"adapters whose b, times {product / alpha:.6g} for the file's one alpha, {b.dtype} can hold"
            is_finite = bool(np.isfinite(b.astype(np.float32)).all())
            checks.require(is_finite, _SAVE_GGUF, "adapted", expected, f"others at {module}")
        tensors |= {f"{module}.lora_a": parts["a"], f"{module}.lora_b": b}
    metadata = {
        "general.type": "adapter", "general.architecture": architecture, "adapter.type": "lora",
        "adapter.lora.alpha": np.float32(alpha or 0),
    }  # fmt: skip
    save_checkpoint(path, tensors, Info("gguf", metadata))


def _read_architecture(architecture: str | Info) -> str:
    """Return the name of a known architecture, or the one that a file names."""
    if isinstance(architecture, Info):
        name = architecture.metadata.get("general.architecture")
        expected = 'the Info of a GGUF file, with "general.architecture"'
        is_named = isinstance(name, str) and bool(name)
        checks.require(is_named, _SAVE_GGUF, "architecture", expected, f"one of the format {architecture.format}")
        return str(name)
    is_text = isinstance(architecture, str)
    checks.require_type(is_text, _SAVE_GGUF, "architecture", "text or an Info", checks.describe_value(architecture))
    if architecture not in ARCHITECTURES:
        near = difflib.get_close_matches(architecture, sorted(ARCHITECTURES)) or ["llama", "gemma3"]
        expected = (
            f"an architecture of llama.cpp, such as {', '.join(map(repr, near))}, or the Info of the model's file"
        )
        checks.refuse(_SAVE_GGUF, "architecture", expected, repr(architecture))
    return architecture


def load_gguf(
    path: str | os.PathLike[str], prepared: Prepared, q: QuantizedTree, *, names: Naming | None = None
) -> AdaptedTree:
    """Read the adapters of a GGUF file, and put them on converted parameters.

    Args:
        path: the file, as of `save_gguf` or of llama.cpp's convert_lora_to_gguf.py. It is not trusted.
        prepared: the prepared function.
        q: the converted parameters.
        names: a function from the path of a parameter to the name of the tensor, as in `save_gguf`. It is called for
            each parameter with codes, and returns None for one without adapters in the file.

    Returns:
        The tree. Its adapters have the dtype of the file, or float32 where the file has codes.

    Raises:
        CheckpointError: the file is damaged, or is no file of adapters.
        TypeError: an argument has a wrong type.
        ValueError: a tensor is missing, has another shape than its parameter needs, or belongs to no parameter that is
            quantized.

    Example:
        >>> import os, tempfile, jax, jax.numpy as jnp, jaxquant as jq
        >>> apply = lambda params, x: x @ params["output.weight"].T
        >>> params, x = {"output.weight": jnp.ones((2, 4))}, jnp.ones((1, 4))
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
        >>> q = prepared.convert(params)
        >>> adapted = jq.lora.adapt(prepared, q, jq.lora.LoRA(rank=3), jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "adapter.gguf")
        ...     jq.lora.save_gguf(path, prepared, adapted, architecture="llama")
        ...     loaded = jq.lora.load_gguf(path, prepared, q)
        >>> bool((loaded.adapters["output.weight"]["a"] == adapted.adapters["output.weight"]["a"]).all())
        True

    Source: llama.cpp, src/llama-adapter.cpp.
    """
    check_float_results(_LOAD_GGUF, prepared)
    codes = Signature(read_quantized(_LOAD_GGUF, q).params)
    same = codes.names == prepared.names
    checks.require(same, _LOAD_GGUF, "q.params", "the paths of the parameters of prepare", ", ".join(codes.names[:4]))
    tensors, info = load_checkpoint(path, format="gguf")
    for key, value in (("general.type", "adapter"), ("adapter.type", "lora")):
        if info.metadata.get(key) != value:
            raise CheckpointError(f"{path}: expected {key} {value!r}, got {info.metadata.get(key)!r}")
    alpha = info.metadata.get("adapter.lora.alpha", np.float32(0))
    if not (isinstance(alpha, np.floating) and np.isfinite(alpha)):
        raise CheckpointError(f"{path}: expected adapter.lora.alpha to be a finite float, got {alpha!r}")
    left = {name: np.asarray(x.dequantize() if isinstance(x, QuantizedArray) else x) for name, x in tensors.items()}
    adapters, settings = {}, []
    for place, plan in prepared.leaves.items():
        name, axes = prepared.names[place], plan.adapter
        # Parameters that can have no adapter have no tensors, or the tensors are left over.
        if not isinstance(axes, AdapterAxes) or len(axes.shared) > 1:
            continue
        modules = [module for module, _ in _list_modules(_LOAD_GGUF, name, plan, axes, names or str)]
        ranks = {left[f"{module}.lora_a"].shape[:1] for module in modules if f"{module}.lora_a" in left}
        if not ranks:
            continue
        _read_axes(_LOAD_GGUF, "path", name, plan)
        rank = min(ranks)
        expected = f"matrices of one rank at {name}"
        checks.require(len(ranks) == 1 and 0 not in rank and rank != (), _LOAD_GGUF, "path", expected, sorted(ranks))
        # llama.cpp takes an alpha of 0 for none, and multiplies by 1.
        lora = LoRA(rank[0], name, alpha=float(alpha) or None)
        with checks.prefix_errors(name):
            check_variant(_LOAD_GGUF, lora, plan, codes.arrays[place])
        adapters[name] = _read_adapter(_LOAD_GGUF, left, lora, plan, axes, modules, {"lora_a": "a", "lora_b": "b"})
        settings.append((name, lora))
    expected = _describe_names(prepared, names or str)
    checks.require(not left, _LOAD_GGUF, "path", expected, ", ".join(sorted(left)[:4]))
    checks.require(bool(settings), _LOAD_GGUF, "path", expected, "a file without tensors")
    return AdaptedTree(q, adapters, tuple(settings))


class _NamedAdapter(NamedTuple):
    """An adapter of one matrix, as files have it.

    Attributes:
        module: the name of the matrix.
        lora: the settings.
        axes: the axes of the parameter that the matrix is, or is a part of.
        parts: "a" [rank, inputs], "b" [outputs, rank], and the "magnitude" [outputs], if there is one.
    """

    module: str
    lora: LoRA
    axes: AdapterAxes
    parts: dict[str, np.ndarray]


def _iterate_matrices(
    function: str, prepared: Prepared, adapted: AdaptedTree, names: Naming
) -> Iterator[_NamedAdapter]:
    """Yield the adapters of all matrices; a stack has several."""
    check_paths(function, adapted, prepared.names, prepared.leaves)
    q = Signature(read_quantized(function, adapted.frozen).params).arrays
    settings, used = dict(adapted.settings), set()
    for place, plan in prepared.leaves.items():
        path = prepared.names[place]
        if path not in settings:
            continue
        axes = _read_axes(function, "adapted", path, plan)
        check_adapter(function, path, adapted.adapters[path], settings[path], plan, q[place])
        factors = _to_matrices(adapted.adapters[path], plan, axes, q[place])
        for module, index in _list_modules(function, path, plan, axes, names):
            checks.require(module not in used, function, "names", "a name of its own for each parameter", module)
            used.add(module)
            parts = {name: x[index] if x.ndim == 2 else x[index].T for name, x in factors.items()}
            yield _NamedAdapter(module, settings[path], axes, {n: np.ascontiguousarray(x) for n, x in parts.items()})


def _read_axes(function: str, argument: str, path: str, plan: LeafPlan) -> AdapterAxes:
    """Return the axes of an adapter that PEFT's files can hold."""
    axes = plan.adapter
    assert isinstance(axes, AdapterAxes)
    is_known = axes.operations in (("dot_general",), ("take",), ("ragged_dot",)) and len(axes.shared) <= 1
    expected = "adapters of products and of tables that are only looked up, in at most one stack"
    checks.require(is_known, function, argument, expected, f"one of {path} ({' and '.join(axes.operations)})")
    return axes


def _list_modules(function: str, path: str, plan: LeafPlan, axes: AdapterAxes, names: Naming) -> list[tuple[str, int]]:
    """Return the names of a parameter in a file, each with its index in the stack."""
    expected = "a function from the path of a parameter to a name, or None"
    checks.require_type(callable(names), function, "names", expected, checks.describe_value(names))
    name = names(path)
    if name is None and function in (_LOAD, _LOAD_GGUF):
        return []
    with checks.prefix_errors(path):
        checks.require_type(isinstance(name, str), function, "names", "a function that returns text", repr(name))
    assert name is not None
    if not axes.shared:
        return [(name, 0)]
    expected = f'a name with "{{}}" for the number of the layer, because {path} is a stack'
    checks.require("{}" in name, function, "names", expected, name)
    return [(name.replace("{}", str(index)), index) for index in range(plan.shape[axes.shared[0]])]


def _describe_names(prepared: Prepared, names: Naming) -> str:
    """Return what the tensors of a file have to be, with some of their names."""
    paths = [prepared.names[place] for place, plan in prepared.leaves.items() if isinstance(plan.adapter, AdapterAxes)]
    known = [name for name in map(names, paths) if name is not None]
    shown = f"{', '.join(known[:4])}{', ...' if len(known) > 4 else ''}" if known else "nothing"
    return f"tensors of parameters with codes, which names calls {shown}"


def _name_module(path: str) -> str:
    return re.sub(r"\.(weight|kernel|embedding)$", "", path.replace("/", "."))


def _list_suffixes(axes: AdapterAxes, lora: LoRA) -> dict[str, str]:
    """Return the parts of an adapter by the ends of their names in a file."""
    factors = _TABLE_FACTORS if axes.operations == ("take",) else _FACTORS
    return {**factors, _MAGNITUDE: "magnitude"} if lora.variant == "dora" else dict(factors)


def _to_matrices(adapter: Mapping[str, Any], plan: LeafPlan, axes: AdapterAxes, q: Any) -> dict[str, np.ndarray]:
    """Return the parts of an adapter with one axis for the stack, for inputs and for outputs."""
    cut, a = len(axes.shared), jnp.asarray(adapter["a"])
    sizes = granularity.Aligned(q.block_size).sizes(q.scale.shape, plan.shape)
    for i, axis in enumerate(axes.inputs):
        if a.shape[cut + i] != plan.shape[axis] and sizes is not None:
            a = granularity.expand_blocks(a, cut + i, sizes[axis], plan.shape[axis])
    count = math.prod(plan.shape[axis] for axis in axes.shared)
    parts = {"a": a.reshape(count, -1, a.shape[-1])}
    parts["b"] = jnp.asarray(adapter["b"]).reshape(count, a.shape[-1], -1)
    if "magnitude" in adapter:
        parts["magnitude"] = jnp.asarray(adapter["magnitude"]).reshape(count, -1)
    return {name: np.asarray(part) for name, part in parts.items()}


def _make_config(modules: Mapping[str, LoRA], base_model: str | None) -> dict[str, Any]:
    first = next(iter(modules.values()))
    ranks = peft.write_patterns({name: int(lora.rank) for name, lora in modules.items()}, first.rank)
    alphas = peft.write_patterns({name: _read_alpha(lora) for name, lora in modules.items()}, _read_alpha(first))
    return {
        "peft_type": "LORA", "base_model_name_or_path": base_model, "task_type": None, "inference_mode": True,
        "r": int(first.rank), "lora_alpha": _read_alpha(first), "lora_dropout": first.dropout,
        "target_modules": sorted(modules), "use_rslora": first.rank_stabilized, "use_dora": first.variant == "dora",
        "bias": "none", "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }  # fmt: skip


def _read_alpha(lora: LoRA) -> float:
    return int(lora.rank) if lora.alpha is None else lora.alpha


def _choose_settings(config: Mapping[str, Any], path: str, modules: list[str]) -> LoRA:
    """Return the settings of a parameter."""
    found = set()
    for module in modules:
        found.add(peft.match_patterns(_LOAD, config, module))
    checks.require(len(found) == 1, _LOAD, peft.CONFIG, f"one rank and alpha in the stack of {path}", sorted(found))
    ((rank, alpha),) = found
    with checks.prefix_errors(f"{peft.CONFIG}, for {path}"), checks.name_errors(_LOAD):
        return LoRA(
            rank, path, alpha=alpha, dropout=config["lora_dropout"], variant="dora" if config["use_dora"] else "lora",
            rank_stabilized=config["use_rslora"],
        )  # fmt: skip


def _read_adapter(
    function: str, left: dict[str, Any], lora: LoRA, plan: LeafPlan, axes: AdapterAxes, stems: list[str],
    suffixes: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Return an adapter from the tensors of its matrices, which are taken from `left`.

    Args:
        function: the public function that errors name.
        left: the tensors of the file by name.
        lora: the settings.
        plan: how the parameter is quantized.
        axes: the axes of the parameter.
        stems: the beginning of the names of each matrix of the stack.
        suffixes: the parts of an adapter by the ends of their names.
    """
    shared, inputs, outputs = (tuple(plan.shape[i] for i in part) for part in (axes.shared, axes.inputs, axes.outputs))
    flat = {
        "a": (lora.rank, math.prod(inputs)),
        "b": (math.prod(outputs), lora.rank),
        "magnitude": (math.prod(outputs),),
    }
    full = {"a": (*inputs, lora.rank), "b": (lora.rank, *outputs), "magnitude": outputs}
    adapter = {}
    source = "folder" if function == _LOAD else "path"
    for suffix, part in suffixes.items():
        arrays = []
        for stem in stems:
            name = f"{stem}.{suffix}"
            checks.require(name in left, function, source, f"a tensor {name}", "none")
            array = np.asarray(left.pop(name))
            got = f"{array.dtype} {array.shape}"
            holds = array.shape == flat[part] and array.dtype in (np.float32, jnp.bfloat16, np.float16)
            checks.require(holds, function, name, f"float32, bfloat16 or float16 of shape {flat[part]}", got)
            is_finite = bool(np.isfinite(array.astype(np.float32)).all())
            checks.require(is_finite, function, name, "finite numbers", "a NaN or an infinity")
            arrays.append(array if array.ndim == 1 else array.T)
        adapter[part] = jnp.asarray(np.stack(arrays).reshape(*shared, *full[part]))
    return adapter
