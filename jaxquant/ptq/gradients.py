"""`collect_gradients`: what errors of each weight do to the results, as second moments of gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._core import checks
from ..calibration import loop
from ..transform import Prepared
from ..transform._calls import Signature
from ..transform._inspect import check_prepared
from . import inputs
from ._grid import MatrixLayout, make_layout
from .tune import make_function

_NAME = "ptq.collect_gradients"
_HIGHEST = jax.lax.Precision.HIGHEST


def collect_gradients(
    prepared: Prepared, params: Any, batches: Iterable[Any], *, key: jax.Array, progress: bool | None = None,
    **arguments: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """Return what errors of each weight do to the results of a prepared function.

    H = mean of G G^T over the batches, with G the gradient of sum(r * f(params, x)), and r of a normal distribution

    An error E of a weight changes the results by dy, and the mean of sum(r * dy)^2 over r is sum(dy^2). To first order,
    sum(r * dy) is sum(G * E). If the errors of different outputs are uncorrelated, the mean of its square is
    trace(E^T H E). This is the objective of `ptq.gptq`, with H in the place of the second moments of the inputs. Those
    say what an error does to the outputs of its own contraction, and these what it does to the results: an input counts
    as much as the results depend on the outputs that it goes to, and errors that later sums cancel count little.

    Args:
        prepared: the prepared function. It returns arrays of floats, and can be differentiated.
        params: its parameters, in floats.
        batches: as for `Prepared.calibrate`. Each of them gives one gradient, of rank d for a weight with d outputs.
        key: a random key, for r.
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call.

    Returns:
        A dict by path: float32 [groups, inputs, inputs] for each weight that is contracted as a whole. Pass it to
        `ptq.apply` as `gradients`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than those of `prepare`; there is no batch; or a gradient
            has a NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda w, x: (x @ w).mean(0)
        >>> x = jnp.array([[1.0, 3.0], [1.0, -3.0]])  # the mean of the second input is 0
        >>> prepared = jq.prepare(apply, jnp.ones((2, 4)), x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> (second,) = ptq.collect_gradients(prepared, jnp.ones((2, 4)), [x] * 8, key=jax.random.key(0)).values()
        >>> bool(second[0, 1, 1] < 1e-9 * second[0, 0, 0])  # so that its errors do not count
        True

    Source: Tseng et al., arXiv 2505.22988, section 3.2, for second moments of gradients as the Hessian of one side.
    """
    check_prepared(_NAME, prepared)
    loop.check_progress(_NAME, progress)
    checks.require_type(checks.is_key(key), _NAME, "key", "one key of jax.random", checks.describe_value(key))
    loop._check_batches(_NAME, batches)
    signature = prepared._read_parameters("convert", params)
    run_function = make_function(_NAME, prepared, signature, arguments)
    step = loop.BatchStep(_NAME, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    layouts: dict[int, MatrixLayout] = {}
    sums: dict[int, jax.Array] = {}
    add_batch, count = _make_step(run_function, layouts), 0
    bar = loop.Bar("gradients", operator.length_hint(batches) or None, progress)
    try:
        for index, batch in enumerate(batches):
            args, kwargs = loop.split_arguments(step, index, batch)
            if not index:
                layouts |= _list_layouts(prepared, params, args, {**kwargs, **arguments})
                sums = {leaf: jnp.zeros((x.groups, x.inputs, x.inputs)) for leaf, x in layouts.items()}
            sums = add_batch(sums, signature.arrays, Signature((args, kwargs)), jax.random.fold_in(key, index))
            count = index + 1
            bar.count_step()
    finally:
        bar.stop()
    checks.require(count > 0, _NAME, "batches", "at least one batch", "none")
    means = {prepared.names[leaf]: total / count for leaf, total in sums.items()}
    for path, second in means.items():
        with checks.prefix_errors(path):
            is_finite = bool(jnp.isfinite(second).all())
            expected, got = "finite gradients", "a NaN or an infinity, or squares that overflow float32"
            checks.require(is_finite, _NAME, "batches", expected, got)
    return means


def _make_step(
    run_function: Callable[..., list[jax.Array]], layouts: Mapping[int, MatrixLayout]
) -> Callable[..., dict[int, jax.Array]]:
    """Return a function that adds the second moments of one gradient to the sums of those before it.

    Args:
        run_function: the float function.
        layouts: how each weight is arranged as a matrix, by the place of the parameter.
    """

    @jax.jit
    def add_batch(sums: dict[int, jax.Array], arrays: Any, other: Signature, key: jax.Array) -> dict[int, jax.Array]:
        def project_results(weights: dict[int, jax.Array]) -> jax.Array:
            results = run_function([weights.get(leaf, x) for leaf, x in enumerate(arrays)], other)
            pairs = zip(jax.random.split(key, len(results)), results, strict=True)
            return jnp.sum(jnp.stack([jnp.sum(jax.random.normal(part, y.shape) * y) for part, y in pairs]))

        slopes = jax.grad(project_results)({leaf: arrays[leaf] for leaf in sums})
        rows = {leaf: layouts[leaf].arrange(slope.astype(jnp.float32)) for leaf, slope in slopes.items()}
        return {leaf: sums[leaf] + jnp.matmul(g, jnp.swapaxes(g, 1, 2), precision=_HIGHEST) for leaf, g in rows.items()}

    return add_batch


def _list_layouts(prepared: Prepared, params: Any, args: Any, kwargs: Any) -> dict[int, MatrixLayout]:
    """Return how the contractions read each parameter, by its place, if all of them read it as a whole, and alike."""
    call = prepared._trace("collect_gradients", params, args, kwargs)
    layouts = {}
    for leaf, plan in prepared.leaves.items():
        uses = inputs.list_uses(call, leaf)
        alike = {(use.axis, frozenset(use.summed), use.groups) for use in uses}
        if len(alike) == 1 and not any(use.reason for use in uses):
            layouts[leaf] = make_layout(_NAME, plan.shape, uses[0].axis, uses[0].groups)
    return layouts
