"""Draw the figures of the README and of the first page: `python -m benchmarks.figures`.

`docs/figures/models.svg` shows rows of the measured tables in the docs, and `docs/figures/near-tie.svg` what this
machine computes. The files are SVG without fonts or scripts, and have colors for light and for dark pages.
"""

from __future__ import annotations

import html
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

DOCS = pathlib.Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "figures"
# Okabe and Ito's palette, which color-blind readers can tell apart; the second colors are for dark pages.
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222; } .head { font-weight: 600; }
.small { font-size: 11px; fill: #555; paint-order: stroke; stroke: #fff; stroke-width: 4px; }
.card { fill: #fff; stroke: #ccc; } .line { stroke: #888; } .ours { fill: #0072b2; } .peer { fill: #d98200; }
.number { text-anchor: end; } .middle { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
text { fill: #e6e6e6; } .small { fill: #b0b4bb; stroke: #1e2129; } .card { fill: #1e2129; stroke: #444; }
.ours { fill: #56b4e9; } .peer { fill: #e69f00; } }
"""


class Row(NamedTuple):
    """A bar of the first figure.

    Attributes:
        label: what was measured.
        is_peer: whether another library made it.
        size: its bytes, of float32's.
        time: its time, of float32's.
        error: its error, in words.
    """

    label: str
    is_peer: bool
    size: float
    time: float
    error: str


class NearTies(NamedTuple):
    """Numbers next to a tie, and their codes.

    Attributes:
        x: the numbers, float32.
        scale: the scale.
        plain: the codes of `jnp.round(x / scale)` under `jit`.
        exact: the codes of `jq.quantize_linear`.
        quotients: the quotients that plain JAX rounds.
    """

    x: np.ndarray
    scale: np.float32
    plain: np.ndarray
    exact: np.ndarray
    quotients: np.ndarray


def read_cells(page: str, name: str, section: str = "") -> list[str]:
    """Return the cells behind the first one of the row of a table.

    Args:
        page: the path of the page in the docs.
        name: the first cell of the row.
        section: the heading of the section with the table; "" for the whole page.

    Raises:
        ValueError: the page has no such row, or several.
    """
    text = (DOCS / page).read_text()
    lines = (text.split(f"\n## {section}\n")[1].split("\n## ")[0] if section else text).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {name} |")]
    if len(rows) != 1:
        raise ValueError(f"{page} has {len(rows)} rows named {name!r}, not one")
    return [cell.strip() for cell in rows[0][1:]]


def read_models() -> dict[str, list[Row]]:
    """Return the bars of each model, from the measured tables."""
    page = "measured/language-model.md"
    floats = read_cells(page, "floats of the file's codes")
    models: dict[str, list[Row]] = {"Gemma 3 270M, a decoder in JAX": []}
    for label, name in (("w8a8_dynamic", "8 bits: w8a8_dynamic"), ("4 bits, GPTQ", "4 bits: GPTQ")):
        row = read_cells(page, name)
        size, time = (float(row[column]) / float(floats[column]) for column in (0, 5))
        models["Gemma 3 270M, a decoder in JAX"].append(Row(label, False, size, time, f"{row[2].split()[0]} nats"))
    page, section = "measured/recipes.md", "A pretrained sentence encoder"
    size, _, cosine, _, time = read_cells(page, "`w8a8_dynamic`", section)
    size = float(size) / float(read_cells(page, "float32", section)[0])
    models["MiniLM, a sentence encoder in JAX"] = [Row("w8a8_dynamic", False, size, float(time), f"cosine {cosine}")]
    for model, name in (
        ("RapidOCR, detection, in ONNX Runtime", "rapidocr, detection"),
        ("RapidOCR, recognition, in ONNX Runtime", "rapidocr, recognition"),
        ("Silero VAD, in ONNX Runtime", "silero_vad, sequence"),
    ):
        cells = read_cells("onnx-quantize.md", name)[2:4]
        models[model] = []
        for label, cell in zip(("jaxquant", "ONNX Runtime's quantizer"), cells, strict=True):
            size, time, error = cell.split(", ")
            models[model].append(Row(label, label != "jaxquant", float(size), float(time), error))
    return models


def compute_near_ties() -> NearTies:
    """Return the numbers of the README that are halfway between two codes, up to the rounding of float32."""
    scale = np.float32(0.037)
    x = ((np.arange(-128, 127) + 0.5) * np.float64(scale)).astype(np.float32)
    divide = jax.jit(lambda x: x / scale)
    plain = jax.jit(lambda x: jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int8))(x)
    exact = jq.quantize_linear(x, scale, output_dtype=jnp.int8)
    return NearTies(x, scale, np.asarray(plain), np.asarray(exact), np.asarray(divide(x)))


def draw_models(models: dict[str, list[Row]]) -> str:
    """Return the figure of sizes, times and errors."""
    label, left, bar, error = 16, (202, 308), 84, 500
    parts, y = [], 50
    for x, text in zip(left, ("of float32's size", "of float32's time"), strict=True):
        parts.append(_write_text(x, 24, text, "small"))
    parts.append(_write_text(error, 24, "error", "small number"))
    for model, rows in models.items():
        parts.append(_write_text(label, y, model, "head"))
        for x in left:
            line = f"M{x + bar / 1.5:.1f} {y + 6}v{20 * len(rows)}"
            parts.append(f'<path class="line" d="{line}" stroke-dasharray="2 3"/>')
        for row in rows:
            y += 20
            kind = "peer" if row.is_peer else "ours"
            parts.append(_write_text(label, y, row.label))
            for x, value in zip(left, (row.size, row.time), strict=True):
                width = bar * value / 1.5
                parts.append(f'<rect class="{kind}" x="{x}" y="{y - 10}" width="{width:.1f}" height="11"/>')
                parts.append(_write_text(x + width + 4, y, f"{value:.2f}", "small"))
            parts.append(_write_text(error, y, row.error, "number"))
        y += 32
    note = "Dashed: float32. Error: loss added per token; mean cosine with float32; signal to noise."
    parts.append(_write_text(label, y - 4, note, "small"))
    title = "Size, time and error of quantized models beside float32 and ONNX Runtime's quantizer"
    return _write_svg(516, y + 10, title, "".join(parts))


def draw_near_tie(ties: NearTies) -> str:
    """Return the figure of a number on which plain JAX and ONNX Runtime disagree."""
    differ = np.flatnonzero(ties.plain != ties.exact)
    # A positive one in the middle, whose digits are short.
    index = int(differ[differ > 128][len(differ[differ > 128]) // 2])
    x, exact = ties.x[index], np.float32(ties.x[index] / ties.scale)
    low, high = sorted((int(ties.plain[index]), int(ties.exact[index])))
    tie = np.float32(low + 0.5)
    steps = {"ours": _count_steps(tie, exact), "peer": _count_steps(tie, ties.quotients[index])}
    parts = [
        _write_text(16, 28, f"x = {x:.9g}, scale = {ties.scale:.9g}", "head"),
        _write_text(16, 48, f"A step to the left or right is one float32: {np.spacing(tie):.3g}.", "small"),
    ]
    middle, y = 258, 112
    parts.append(f'<path class="line" d="M40 {y}H476M{middle} {y - 26}V{y + 26}"/>')
    parts.append(_write_text(middle, y + 42, f"{tie:.1f}, the tie", "small middle"))
    parts.append(_write_text(40, y + 42, f"code {low}", "small"))
    parts.append(_write_text(476, y + 42, f"code {high}", "small number"))
    for kind, step in steps.items():
        parts.append(f'<circle class="{kind}" cx="{middle + 70 * step}" cy="{y}" r="6"/>')
    rows = (
        ("ours", f"ONNX Runtime and jaxquant: x / scale = {exact:.9g}, so {ties.exact[index]}"),
        ("peer", f"plain JAX: x * (1 / scale) = {ties.quotients[index]:.9g}, so {ties.plain[index]}"),
    )
    for number, (kind, text) in enumerate(rows):
        parts.append(f'<circle class="{kind}" cx="22" cy="{y + 66 + 22 * number}" r="6"/>')
        parts.append(_write_text(36, y + 70 + 22 * number, text))
    y += 128
    text = f"All {len(ties.x)} ties between two codes of int8; plain JAX differs on {len(differ)}:"
    parts.append(_write_text(16, y, text))
    for number in range(len(ties.x)):
        kind = "peer" if number in differ else "ours"
        parts.append(f'<rect class="{kind}" x="{16 + 1.9 * number:.1f}" y="{y + 10}" width="1.4" height="22"/>')
    return _write_svg(
        516, y + 48, "A number near a tie gets another code in plain JAX than in ONNX Runtime", "".join(parts)
    )


def _count_steps(start: np.float32, end: np.float32) -> int:
    """Return how many float32 numbers lie between two positive ones, with a sign."""
    first, last = (int(np.float32(x).view(np.int32)) for x in (start, end))
    return last - first


def _write_text(x: float, y: float, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.6g}" y="{y}">{html.escape(text)}</text>'


def _write_svg(width: int, height: int, title: str, body: str) -> str:
    body = re.sub(r"(<(?:text|rect|circle|path))", r"\n\1", body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img">\n<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>{body}\n</svg>\n'
    )


def draw_all() -> dict[str, str]:
    """Return the text of each figure by the name of its file."""
    return {"models.svg": draw_models(read_models()), "near-tie.svg": draw_near_tie(compute_near_ties())}


def main() -> None:
    """Write the figures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in draw_all().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
