# %% [markdown]
# # Find text in images: the detector of RapidOCR
#
# PP-OCRv4's text detector is a network of 62 convolutions in float32, an ONNX file of 4.7 MB. It gives each pixel the
# probability that it belongs to a line of text. Here it is quantized to 8-bit integers with 9 pages of drawn text, and
# finds the same lines on pages that it has not seen.
#
# ```sh
# pip install -e ".[onnx]" matplotlib
# pip install --no-deps --ignore-requires-python rapidocr-onnxruntime  # a download of 15 MB
# ```

# %%
import importlib.util
import pathlib

import jax
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

import jaxquant as jq

package = importlib.util.find_spec("rapidocr_onnxruntime").submodule_search_locations[0]
file = pathlib.Path(package) / "models" / "ch_PP-OCRv4_det_infer.onnx"

# %% [markdown]
# ## Data
#
# Pages of words in several sizes and colors, as (1, 3, 320, 320) from -1 to 1. Photographs of your pages are better.


# %%
words = ["quantize", "the", "model", "and", "run", "it", "in", "eight", "bits"]


def draw_page(rng):
    page = Image.new("RGB", (320, 320), tuple(rng.integers(150, 256, 3).tolist()))
    pen, y = ImageDraw.Draw(page), 8
    while y < 280:
        size = int(rng.integers(14, 34))
        text = " ".join(rng.choice(words, 1 + 300 // (6 * size)))
        font = ImageFont.load_default(size)
        pen.text((int(rng.integers(4, 40)), y), text, fill=tuple(rng.integers(0, 110, 3).tolist()), font=font)
        y += size + int(rng.integers(8, 24))
    return np.moveaxis(np.asarray(page, np.float32) / 127.5 - 1, -1, 0)[None]


rng = np.random.default_rng(0)
pages = [draw_page(rng) for _ in range(12)]

# %% [markdown]
# ## Quantize
#
# Nine pages find the ranges, and three compare the two files in ONNX Runtime. The weights have 7 bits, so that every
# processor gives the same integers ([Which processor, which integers](../processors.md)).

# %%
report = jq.onnx.quantize(str(file), data=pages, exact_everywhere=True)
small = report.model.SerializeToString()
print(f"{file.stat().st_size:,} bytes in float32, {len(small):,} in integers")
print({name: f"{sqnr:.1f} dB" for name, sqnr in report.outputs.items()})

# %% [markdown]
# ## Compare the lines
#
# A line is a connected set of pixels with a probability above 0.3. Two lines are the same if they share more than half
# of their pixels.


# %%
def find_lines(session, page):
    (probability,) = session.run(None, {session.get_inputs()[0].name: page})
    labels, count = ndimage.label(probability[0, 0] > 0.3)
    return [labels == number for number in range(1, count + 1)], probability


def count_same(lines, others):
    return sum(any((a & b).sum() > (a | b).sum() / 2 for b in others) for a in lines)


sessions = [onnxruntime.InferenceSession(model) for model in (str(file), small)]
print("page  float32  integers  the same")
for number in (9, 10, 11):
    (floats, _), (integers, _) = (find_lines(session, pages[number]) for session in sessions)
    print(f"{number:4}{len(floats):9}{len(integers):10}{count_same(floats, integers):10}")

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
axes[0].imshow(np.moveaxis(pages[11][0], 0, -1) / 2 + 0.5)
axes[0].set_title("a page")
for axis, session, title in zip(axes[1:], sessions, ("float32", "8-bit integers"), strict=True):
    axis.imshow(find_lines(session, pages[11])[1][0, 0], cmap="viridis", vmin=0, vmax=1)
    axis.set_title(title)
for axis in axes:
    axis.set_axis_off()

# %% [markdown]
# ## In JAX
#
# The quantized file is a function in JAX, too, for `vmap`, for further training, or to be a part of a larger program.

# %%
fn, params = jq.onnx.load(report.model)
y = jax.jit(fn)(params, pages[11])
runtime = find_lines(sessions[1], pages[11])[1]
print("probabilities as in ONNX Runtime, up to 1e-5:", bool(np.abs(np.asarray(y) - runtime).max() < 1e-5))
