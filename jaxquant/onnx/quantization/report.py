"""What became of a model that was quantized: its nodes, its size, its error and its time in ONNX Runtime."""

from __future__ import annotations

import collections
import dataclasses
import html
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto

from ..limits import count_model_bytes
from ..saturation import SaturatingProduct
from .ranges import Batch, run_session

_TURNS, _SECONDS = 15, 3.0
_WORST = 5


@dataclasses.dataclass(frozen=True)
class NodeRow:
    """A node with weights, or one that runs on codes.

    Attributes:
        name: the name of its first output.
        operator: its operator.
        form: "integer": sums of codes; "codes": codes in, codes out; "weights": codes that become floats before
            the operator reads them; "float".
        reason: why it is in floats, or only its weights are codes.
        sqnr: the ratio of signal to noise of the output beside the float model's, with all that came before
            quantized, too, in decibels; None if it was not measured.
    """

    name: str
    operator: str
    form: str
    reason: str = ""
    sqnr: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizationReport:
    """What became of a model; `str` prints a table.

    Attributes:
        model: the quantized model.
        rows: the nodes with weights, and those that run on codes.
        outputs: the ratio of signal to noise of each float output, in decibels.
        bytes_before: the size of the model that was given.
        bytes_after: the size of the quantized model.
        seconds_before: the least time of a call of the float model in ONNX Runtime, with one thread, on the first batch
            of the comparison; NaN without data.
        seconds_after: the same of the quantized model.
        data: what the ranges and the errors were found with.
        saturating: the products that can saturate on x86-64 processors without VNNI.
    """

    model: ModelProto
    rows: tuple[NodeRow, ...]
    outputs: dict[str, float]
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float
    data: str
    saturating: tuple[SaturatingProduct, ...] = ()

    def __str__(self) -> str:
        """Return the table."""
        lines = [f"{name:8} {text}" for name, text in self._describe_model()]
        counts = collections.Counter((row.form, row.operator, row.reason) for row in self.rows)
        width = max([len(row.operator) for row in self.rows], default=0)
        lines += [
            f"{form:8} {n:4} {operator:{width}}{f'  {reason}' if reason else ''}".rstrip()
            for (form, operator, reason), n in sorted(counts.items())
        ]
        measured = sorted((row for row in self.rows if row.sqnr is not None), key=lambda row: row.sqnr or 0)
        if measured:
            lines.append("the nodes with the largest errors, for --keep:")
            lines += [
                f"  {describe_sqnr(row.sqnr):>9}  {row.operator:{width}}  {row.name}" for row in measured[:_WORST]
            ]
        if self.saturating:
            lines.append(self._describe_saturation())
        return "\n".join(lines)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file that loads nothing, with a picture of errors if matplotlib is installed.

        The table has a row for each node with weights or codes, in the order of the model.

        Args:
            path: the file to write.

        Raises:
            ValueError: the folder of the path does not exist.
        """
        # Quantizing needs no pages and pictures.
        from ...report import page, pictures

        file = page.check_html_path(path, "QuantizationReport.to_html")
        facts = [f"<li>{name}: {html.escape(text)}</li>" for name, text in self._describe_model()]
        if self.saturating:
            facts.append(f"<li>{self._describe_saturation()}</li>")
        header = "<tr><th>output of the node</th><th>operator</th><th>form</th><th class='number'>error, dB</th></tr>"
        rows = "\n".join(_make_html_row(row) for row in self.rows)
        picture, errors = "", {row.name: row.sqnr for row in self.rows if row.sqnr is not None}
        if errors and importlib.util.find_spec("matplotlib") is not None:
            picture = pictures.write_svg(pictures.draw_errors(errors))
        page.write_page(file, "Quantized ONNX model", f"<ul>{''.join(facts)}</ul>", "Nodes", header, rows, picture)

    def _describe_model(self) -> list[tuple[str, str]]:
        """Return the size, the data, the times and the errors of the outputs."""
        share = self.bytes_after / self.bytes_before
        facts = [
            ("size", f"{self.bytes_before:,} bytes before, {self.bytes_after:,} after: {share:.2f}"),
            ("data", self.data),
        ]
        if not np.isnan(self.seconds_before):
            before, after = 1e3 * self.seconds_before, 1e3 * self.seconds_after
            facts.append(("time", f"{before:.2f} ms before, {after:.2f} after: {after / before:.2f} (one thread)"))
        return [*facts, *(("error", f"{name}: {describe_sqnr(sqnr)}") for name, sqnr in self.outputs.items())]

    def _describe_saturation(self) -> str:
        return (
            f"{len(self.saturating)} products can saturate on x86-64 processors without VNNI: "
            "quantize with exact_everywhere for the same integers on all processors"
        )


def _make_html_row(row: NodeRow) -> str:
    """Return a row of the table, with the reason below the name."""
    reason = f'<div class="reason">{html.escape(row.reason)}</div>' if row.reason else ""
    error = "" if row.sqnr is None else describe_sqnr(row.sqnr).removesuffix(" dB")
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in (row.operator, row.form))
    return f'<tr class="{row.form}"><td>{html.escape(row.name)}{reason}</td>{cells}<td class="number">{error}</td></tr>'


def describe_sqnr(sqnr: float | None) -> str:
    """Return decibels as text."""
    return "exact" if sqnr is None or sqnr == np.inf else f"{sqnr:.1f} dB"


class Error:
    """The ratio of signal to noise, over batches."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, expected: Any, got: Any) -> None:
        """Count the elements of two arrays; a NaN or an infinity is noise unless both have it."""
        x, y = (np.asarray(part).astype(np.float64) for part in (expected, got))
        self.signal += float(np.square(x[np.isfinite(x)]).sum())
        if x.shape != y.shape:
            self.noise = np.inf
            return
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        noise = np.square(x[differs] - y[differs]).sum()
        self.noise += np.inf if np.isnan(noise) else float(noise)

    def read(self) -> float:
        """Return the ratio in decibels: inf without noise, -inf without signal or if the shapes differ."""
        if not self.noise:
            return np.inf
        ratio = self.signal / self.noise
        return float(10 * np.log10(ratio)) if ratio else -np.inf


def compare_outputs(
    before: onnxruntime.InferenceSession, after: onnxruntime.InferenceSession, batches: Sequence[Batch],
    names: Sequence[str],
) -> dict[str, float]:  # fmt: skip
    """Return the ratio of signal to noise of float values of two sessions, by name."""
    errors = {name: Error() for name in names}
    for batch in batches if names else ():
        results = (run_session(session, batch, names) for session in (before, after))
        for name, x, y in zip(names, *results, strict=True):
            if isinstance(x, np.ndarray) and x.dtype.kind == "f":
                errors[name].add(x, y)
    return {name: error.read() for name, error in errors.items() if error.signal or error.noise}


def measure_times(sessions: Sequence[onnxruntime.InferenceSession], batch: Batch) -> list[float]:
    """Return the least time of a call of each session in seconds; the sessions take turns."""
    times: list[list[float]] = [[] for _ in sessions]
    for session in sessions:
        run_session(session, batch)
    begin = time.perf_counter()
    while len(times[0]) < _TURNS and (len(times[0]) < 3 or time.perf_counter() - begin < _SECONDS):
        for session, spans in zip(sessions, times, strict=True):
            start = time.perf_counter()
            run_session(session, batch)
            spans.append(time.perf_counter() - start)
    return [min(spans) for spans in times]


def count_bytes(model: ModelProto) -> int:
    """Return the bytes of a model."""
    return count_model_bytes(model)
