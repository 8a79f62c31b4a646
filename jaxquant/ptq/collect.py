"""`collect`: statistics of the inputs of each contraction of a prepared function."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.saved_programs import register_tree
from .._core import checks
from .._program import jaxpr
from .._program.analysis import Site, read_product_numbers
from .._program.replacing import Records
from ..calibration import loop
from ..transform import Prepared
from ..transform.session import InspectMode, ProgramPlan, Session, Signature, TracedCall
from . import inputs
from .moments import Moments, MomentsState, compute_status, second_moments

_NAME = "ptq.collect"
MOMENTS = second_moments(groups=True)
Uses = tuple[tuple[str, tuple[inputs.Uses, ...]], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """What `collect` found: a pytree of the moments, with how each parameter is read.

    Attributes:
        moments: a `ptq.Moments` for each contraction, by its name in `prepared.coverage`.
        uses: Static. For each parameter, by its path, how each contraction reads it.
    """

    moments: dict[str, Moments]
    uses: Uses = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> Moments:
        """Return the moments of a contraction."""
        return self.moments[name]

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names."""
        return iter(self.moments)

    def __len__(self) -> int:
        """Return the number of contractions."""
        return len(self.moments)

    def find_uses(self, path: str) -> tuple[inputs.Uses, ...]:
        """Return how the contractions read a parameter."""
        return dict(self.uses).get(path, ())


def _decode_uses(saved: list[Any]) -> tuple[Uses]:
    rows = []
    for path, uses in saved[0]:
        found = (
            inputs.Uses(name, tuple(axis), tuple(summed), groups, tuple(channel), reason)
            for name, axis, summed, groups, channel, reason in uses
        )
        rows.append((path, tuple(found)))
    return (tuple(rows),)


register_tree(Statistics, list, _decode_uses)


def make_mode(plan: ProgramPlan, names: Container[str]) -> InspectMode:
    """Return the float program that also accumulates the second moments of the inputs of some contractions."""
    return InspectMode(plan, functools.partial(_is_counted, plan, names), _accumulate)


def _is_counted(plan: ProgramPlan, names: Container[str], site: Site) -> bool:
    return has_statistics(plan, site) and site.name in names


def _accumulate(site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
    """Return the float result, and the states updated by the inputs."""
    vectors = inputs.read_vectors(site, lax.stop_gradient(inputs.read_operand(site, operands)))
    state = MOMENTS.update(records[site.name], vectors)
    (result,) = jaxpr.evaluate(site.equation, operands)
    return result, {**records, site.name: state}


def has_statistics(plan: ProgramPlan, site: Site) -> bool:
    """Return whether statistics of a contraction's inputs help to quantize its parameter."""
    # The inputs of a lookup are indices: their moments say nothing about the rows of its table.
    return plan.sites[site.name].is_replaced and bool(site.views) and site.operation != "take"


def make_states(call: TracedCall, names: Container[str] | None = None) -> dict[str, MomentsState]:
    """Return the states without data of some contractions, or of all, by the name of the contraction."""
    states = {}
    for site in call.analysis.sites.values():
        if has_statistics(call.plan, site) and (names is None or site.name in names):
            operand = site.equation.invars[1 - site.weight].aval  # type: ignore[operator]
            shape = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
            state = MOMENTS.init(jax.eval_shape(functools.partial(inputs.read_vectors, site), shape))
            lengths = site.lengths
            states[site.name] = jax.tree.map(lambda x, n=lengths: jnp.broadcast_to(x, (*n, *x.shape)), state)
    return states


def share_inputs(call: TracedCall) -> dict[str, str]:
    """Return for each contraction with statistics the name of the first one with the same inputs.

    The same are the inputs of the contractions that sum the same dimensions of one value, as queries, keys and values
    do.
    """
    first: dict[Any, str] = {}
    shared = {}
    for site in call.analysis.sites.values():
        if has_statistics(call.plan, site):
            key: Any = site.name
            if site.operation != "conv_general_dilated":
                place = 1 - site.weight  # type: ignore[operator]
                summed, batch = (dimensions[place] for dimensions in read_product_numbers(site.equation))
                # The value, in its program; another call of the same function has another address.
                key = (site.address[:-1], id(site.equation.invars[place]), tuple(summed), tuple(batch))
            shared[site.name] = first.setdefault(key, site.name)
    return shared


def update_states(session: Session, states: Any, call: TracedCall) -> Any:
    """Return the states after one call of the function in floats."""
    return session.inspect(call, functools.partial(_is_counted, call.plan, states), _accumulate, states)


def collect(
    prepared: Prepared, params: Any, batches: Iterable[Any], *, limit: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None, progress: bool | None = None, **arguments: Any,
) -> Statistics:  # fmt: skip
    """Return statistics of the inputs of each contraction with a parameter that the rules quantize.

    The function runs in floats on each batch, in one jitted program. A contraction with d inputs has a state of 8 d^2
    bytes, and statistics of 4 d^2; those that read the same value, as queries, keys and values do, share them. The
    inputs of a convolution are its windows. A contraction in a scan over stacked layers has statistics for each layer;
    in another loop, one for all iterations together.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        batches: an iterable of batches, as for `Prepared.calibrate`: an array is one argument, a tuple holds positional
            arguments, a mapping keyword arguments.
        limit: the most bytes of states at a time. What does not fit is accumulated in further passes over the batches,
            which must not be an iterator then. The activations of one batch and the statistics come on top. None for
            one pass.
        checkpoint: the path of a file from which an interrupted loop goes on, and which it writes every minute. With
            several passes, later ones have files of this name and a number.
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call, such as `train=False`.

    Returns:
        A `ptq.Statistics`, which holds a `ptq.Moments` for each contraction, by its name in `prepared.coverage`. The
        arrays have a first axis for groups, of length 1 without groups, and before it the axes of scans over layers.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there is no batch, a batch is not finite, or the sum of its squares overflows float32 (activations
            of 1e19 and more), or it has contractions that the first one has not, a contraction has seen no data, the
            state of a contraction exceeds the limit, or the file was written for another function or other parameters.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> params = {"first": jnp.eye(4), "second": jnp.ones((4, 2))}
        >>> x = jnp.array([[0.0, 0.5, -1.0, 2.5]])
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int4(block=4))
        >>> stats = ptq.collect(prepared, params, [x, -x])
        >>> stats["second"].largest, stats["second"].mean
        (Array([[0. , 0.5, 1. , 2.5]], dtype=float32), Array([[0.  , 0.25, 0.5 , 1.25]], dtype=float32))

    Source: Frantar et al., arXiv 2210.17323, section 3, for second moments of a layer's inputs.
    """
    session = Session(_NAME, prepared, params)
    signature = session.parameters
    call: TracedCall | None = None
    uses: Uses = ()

    # The states are the largest arrays, and only a file needs those before a batch that is not finite.
    @functools.partial(jax.jit, donate_argnums=0 if checkpoint is None else ())
    def observe_batch(state: Any, arrays: Any, batch: Signature) -> tuple[Any, dict[str, jax.Array]]:
        args, kwargs = batch.rebuild(batch.arrays)
        current = session.trace(args, {**kwargs, **arguments}, arrays)
        _check_contractions(current, shared)
        updated = update_states(session, state, current)
        # Looked at after each batch, so that the error names the first batch with a NaN.
        return updated, {name: compute_status(state) for name, state in updated.items()}

    # The parameters are arguments of the jitted function: arrays that it closes over would be copied into the program.
    step = loop.BatchStep(
        _NAME, lambda state, *batch: observe_batch(state, signature.arrays, Signature(batch)),
        functools.cache(lambda: loop.compute_fingerprint(dict(zip(signature.names, signature.arrays, strict=True)))),
        lambda state: "\n".join(f"{name} {x.largest.shape}" for name, x in state.items()), frozenset(arguments),
    )  # fmt: skip
    first, again = _take_first(step, batches)
    if first is not None:
        call = session.trace(first[0], {**first[1], **arguments})
        uses = tuple((session.names[leaf], inputs.list_uses(call, leaf)) for leaf in session.leaves)
    shared = {} if call is None else share_inputs(call)
    # Only the shapes: all states together may not fit.
    shapes = {} if call is None else jax.eval_shape(functools.partial(make_states, call, set(shared.values())))
    passes = _plan_passes(shapes, limit)
    can_repeat = len(passes) == 1 or again is batches
    expected = f"batches that can be read {len(passes)} times, such as a list, because of the limit"
    checks.require_type(can_repeat, _NAME, "batches", expected, type(batches).__name__)
    moments: dict[str, Moments] = {}
    for index, names in enumerate(passes):
        path = checkpoint if index == 0 or checkpoint is None else f"{os.fspath(checkpoint)}.{index}"
        start = {} if call is None else make_states(call, names)
        final = loop.run_loop(step, start, again, checkpoint=path, progress=progress, inspect=lambda state: None)
        # A state is twice as large as its moments, and is freed before the next ones are made.
        moments |= {name: finalize_moments(_NAME, name, final.pop(name)) for name in names}
    return Statistics({name: moments[first] for name, first in shared.items()}, uses)


def _check_contractions(call: TracedCall, known: Mapping[str, str]) -> None:
    """Raise unless a call has the contractions of the first batch only, which says what each of them reads."""
    found = share_inputs(call)
    added = [name for name in found if name not in known]
    expected, got = "batches with calls that have the contractions of the first one", f"also {', '.join(added[:4])}"
    checks.require(not added, _NAME, "batches", expected, got)
    other = [name for name, first in found.items() if known[name] != first]
    expected = "batches with calls in which the same contractions share their inputs as in the first one"
    checks.require(not other, _NAME, "batches", expected, f"others for {', '.join(other[:4])}")


def _plan_passes(states: Mapping[str, Any], limit: int | None) -> list[list[str]]:
    """Return the names of the contractions of each pass, such that their states fit into a limit together."""
    if limit is None:
        return [list(states)]
    checks.check_integer(_NAME, "limit", limit)
    passes, free = [[]], limit
    for name, state in states.items():
        size = sum(x.size * x.dtype.itemsize for x in state)
        checks.require(size <= limit, _NAME, "limit", f"at least {size} bytes, for {name}", limit)
        if size > free:
            passes.append([])
            free = limit
        passes[-1].append(name)
        free -= size
    return passes


def _take_first(step: loop.BatchStep, batches: object) -> tuple[Any, Any]:
    """Return the arguments of the first batch, and all batches; None and the value itself if it holds none."""
    if not isinstance(batches, Iterable) or isinstance(batches, jax.Array | Mapping | str) or hasattr(batches, "dtype"):
        return None, batches  # the loop raises
    first = next(iterator := iter(batches), None)
    if iterator is batches:  # it cannot be started again
        batches = itertools.chain(() if first is None else (first,), iterator)
    return (None if first is None else loop.split_arguments(step.function, 0, first, step.arguments)), batches


def finalize_moments(function: str, name: str, state: MomentsState) -> Moments:
    """Return the moments of a contraction, with the axes of its scans; errors name a public function."""
    lengths = state.count.shape
    with checks.prefix_errors(name), checks.name_errors(function):
        layers = state.count.size
        flat = jax.tree.map(lambda x: x.reshape(layers, *x.shape[len(lengths) :]), state)
        # One layer after the other, and not vectorized: `finalize` looks at the values, and raises an error for one.
        parts = [MOMENTS.finalize(jax.tree.map(lambda x, at=index: x[at], flat)) for index in range(layers)]
    return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*lengths, *xs[0].shape), *parts)
