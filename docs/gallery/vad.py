# %% [markdown]
# # Find speech in recordings: Silero VAD
#
# Silero VAD gives each 32 ms of a recording the probability that somebody speaks. It is an ONNX file of 1.2 MB in
# float32: six convolutions and an LSTM, whose state goes from one window to the next. So the error of a window goes on
# to the windows after it, and the recipe matters.
#
# ```sh
# pip install -e ".[onnx]" matplotlib scipy
# pip install --no-deps silero-vad  # a download of 11 MB, of which only a file is read
# pip install --no-deps --target recordings pytest-audioeval  # 27 short recordings of speech, 4 MB, MIT license
# export PYTHONPATH=recordings
# ```

# %%
import importlib.util
import pathlib
import warnings

import jax
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from scipy.io import wavfile

import jaxquant as jq


def find_folder(package):
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


file = find_folder("silero_vad") / "data" / "silero_vad_16k_sequence.onnx"
warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of a chunk with the name of the program that wrote the file

# %% [markdown]
# ## Data
#
# For each of nine languages, three recordings at 16 kHz with pauses between them, in faint noise. The network reads
# windows of 512 samples, each with the last 64 samples of the window before.

# %%
folders = sorted((find_folder("pytest_audioeval") / "samples" / "audio").iterdir())
rng = np.random.default_rng(0)


def join_recordings(folder):
    parts = [np.zeros(16000)]
    for path in sorted(folder.glob("*.wav")):
        parts += [wavfile.read(path)[1], np.zeros(int(rng.integers(8000, 20000)))]
    x = np.concatenate(parts)
    return (x / np.abs(x).max() / 2 + rng.normal(size=x.shape) * 0.003).astype(np.float32)


def cut_windows(x):
    x = np.pad(x, (64, -len(x) % 512))
    return {"input": np.lib.stride_tricks.sliding_window_view(x, 576)[::512].copy(), "h": state, "c": state}


state = np.zeros((1, 1, 128), np.float32)
recordings = {folder.name: join_recordings(folder) for folder in folders}
batches = {language: cut_windows(x) for language, x in recordings.items()}
known, unseen = list(batches)[:6], list(batches)[6:]
print("known:", *known, "unseen:", *unseen)

# %% [markdown]
# ## Quantize
#
# `static` computes with codes, and needs the known languages for their ranges. `dynamic` quantizes the activations of
# matrix products only, of which this network has none: its weights are codes, and its sums are floats.

# %%
files = {"float32": str(file)}
for recipe in ("static", "dynamic"):
    data = [batches[language] for language in known]
    report = jq.onnx.quantize(str(file), data=data, recipe=recipe, exact_everywhere=True)
    files[recipe] = report.model.SerializeToString()

speech = {}
print("file         bytes  largest error  windows decided otherwise")
for name, model in files.items():
    session = onnxruntime.InferenceSession(model)
    runs = [session.run(["speech_probs"], batches[language])[0] for language in unseen]
    speech[name] = np.concatenate(runs)
    size = len(model) if isinstance(model, bytes) else file.stat().st_size
    error = np.abs(speech[name] - speech["float32"]).max()
    differ = int(((speech[name] > 0.5) != (speech["float32"] > 0.5)).sum())
    print(f"{name:8}{size:10,}{error:15.2f}{differ:16} of {speech[name].size}")

# %% [markdown]
# `dynamic` decides as float32 does, and is as small. The picture shows one of the unseen languages.

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 4), sharex=True, layout="constrained")
axes[0].specgram(recordings["pl"], NFFT=1024, Fs=16000, noverlap=0, cmap="magma", vmin=-83)
axes[0].set(title="a recording", ylabel="Hz", ylim=(0, 4000))
count = len(batches["pl"]["input"])
seconds = np.arange(count) * 0.032
for (name, values), style in zip(speech.items(), ("k-", "C1-", "C0--"), strict=True):
    axes[1].plot(seconds, values[:count], style, label=name)
axes[1].set(title="probability of speech", xlabel="seconds", xlim=(0, seconds[-1]))
axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
None

# %% [markdown]
# ## In JAX
#
# The quantized file is a function in JAX, too.

# %%
fn, params = jq.onnx.load(files["dynamic"])
probability, _, _ = jax.jit(fn)(params, *batches["pl"].values())
same = np.abs(np.asarray(probability) - speech["dynamic"][:count]).max() < 1e-4
print("probabilities as in ONNX Runtime, up to 1e-4:", bool(same))
