"""Calibrators with specs that have offsets and quantized scales: the range is the same, and `quantize` takes it."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import Blocked, PerAxis, QuantSpec, calibration

SPECS = {
    "offset": QuantSpec("uint4", PerAxis(1), offset=True, scale_dtype="float16"),
    "nested": QuantSpec("uint4", Blocked(1, 4), offset=True, scale_spec=QuantSpec("uint6", Blocked(1, 2))),
    "nvfp4": QuantSpec("float4_e2m1fn", Blocked(1, 16), scale_spec=QuantSpec("float8_e4m3fn"),
                       scale_rule="compressed_tensors"),
}  # fmt: skip


FACTORIES = (calibration.minmax, calibration.moving_average, functools.partial(calibration.percentile, q=99.5))


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", SPECS)
def test_ranges_are_those_of_the_granularity(name: str, factory: Any, rng: np.random.Generator) -> None:
    spec = SPECS[name]
    batches = (rng.normal(size=(3, 8, 32)) + 5).astype(np.float32)  # above 0
    ranges = []
    for each in (spec, QuantSpec(spec.dtype, spec.granularity, symmetric=spec.symmetric)):
        calibrator = factory(each)
        state = calibrator.init(batches[0])
        for batch in batches:
            state = calibrator.update(state, batch)
        ranges.append(calibrator.finalize(state))
    for end, plain in zip(*ranges, strict=True):
        np.testing.assert_array_equal(end, plain)
    q = jq.quantize(batches[0], spec, range=ranges[0])
    y = np.asarray(q.dequantize())
    if factory is calibration.minmax and name == "offset":
        low, high = batches.min((0, 1)), batches.max((0, 1))
        np.testing.assert_array_equal(np.asarray(q.offset)[0], low.astype(np.float16))
        assert (np.abs(y - batches[0]) <= 0.51 * (high - low + 0.01) / 15 + 0.005).all()
    assert np.median(np.abs(y - batches[0])) < 1  # an outlier of the batch may be beyond an average or a percentile


@pytest.mark.parametrize("factory", [calibration.mse, calibration.entropy])
def test_calibrators_that_measure_errors_refuse_them(factory: Any) -> None:
    for spec, match in (
        (SPECS["offset"], r"spec\.offset: expected False, because it measures the errors .* minmax"),
        (QuantSpec("int4", Blocked(1, 4), scale_spec=QuantSpec("uint6")), r"spec\.scale_spec: expected None, because"),
    ):
        with pytest.raises(ValueError, match=rf"^jaxquant\.calibration\.{factory.__name__}: {match}"):
            factory(spec)
    assert factory(QuantSpec("int4")).init(jnp.zeros(3)) is not None
