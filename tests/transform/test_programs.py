"""Program shapes: all contractions are listed, and run on codes as the coverage says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.programs_with_bodies import PROGRAMS
from ..support.contraction_crawler import count_contractions, count_rows
from ..support.prepared import (
    RECIPES,
    check_gradients,
    convert_and_apply,
    differentiate,
    find_ranges,
    find_sqnr,
    same_trees,
)

# Blocks of 4 rows do not divide into 6.
PAIRS = [(name, recipe) for recipe in RECIPES for name in PROGRAMS]
FORMS = {"integer": "i", "lookup": "l", "float": "f", "weight-only": "w"}
# With 16 terms, 8 bits have about 40 dB for one product; 4 bits of a whole tensor about 15.
LEAST_SQNR = {
    "w4a8": 6, "gguf": 6, "gptq": 6, "weight_only_int4": 6, "mxfp4": 6, "nvfp4": 6,
    "weight_only_fp8": 12, "fp8_dynamic": 12, "mxfp8": 12,
}  # fmt: skip
LEAST_COSINE = {"w4a8": 0.5, "gguf": 0.5, "gptq": 0.5, "weight_only_int4": 0.5, "mxfp4": 0.5, "nvfp4": 0.5}
# The crawler's input must be arrays; ids and floats all are.
every_program = pytest.mark.parametrize("name", PROGRAMS)
other_recipes = pytest.mark.parametrize(
    ("name", "recipe"), [(name, recipe) for name, recipe in PAIRS if recipe != "w8a8_dynamic"]
)


def _prepare(name, recipe, rng, **options):
    example = PROGRAMS[name]
    params, inputs = example.sample(rng)
    return example, params, inputs, jq.prepare(example.function, params, *inputs, rules=RECIPES[recipe], **options)


@every_program
def test_coverage_lists_every_contraction(name, rng):
    example, params, inputs, prepared = _prepare(name, "w8a8_dynamic", rng)
    assert count_rows(prepared.coverage) == count_contractions(example.function, params, *inputs)
    rows = prepared.coverage.rows
    assert "".join(FORMS[row.form] for row in rows) == example.forms
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.reason for row in prepared.coverage.floats)
    assert all(row.where for row in rows)


@other_recipes
@pytest.mark.full
def test_rows_do_not_depend_on_rules(name, recipe, rng):
    example, params, inputs, prepared = _prepare(name, recipe, rng)
    assert count_rows(prepared.coverage) == count_contractions(example.function, params, *inputs)


@pytest.mark.parametrize("recipe", ["gptq", "weight_only_int4", "nvfp4"])
def test_a_reshape_may_cut_blocks(recipe, rng):
    """Blocks of 4 of 24 are not blocks of 6: each index has an entry then, and the values stay."""
    example, params, inputs, prepared = _prepare("split_and_whole", recipe, rng)
    q = prepared.convert(params, find_ranges(prepared, params, *inputs))
    w = {"w": q.params["w"].dequantize()}
    for got, want in zip(prepared.apply(q, *inputs), example.function(w, *inputs), strict=True):
        if recipe != "nvfp4":  # whose activations are quantized, too
            np.testing.assert_allclose(got, want, 1e-5, 1e-5)
        assert find_sqnr(got, want) > 15


def _check_values(name, recipe, rng):
    example, params, inputs, prepared = _prepare(name, recipe, rng)
    ranges = find_ranges(prepared, params, *inputs)
    got = convert_and_apply(prepared, params, ranges, *inputs)

    @jax.jit
    def compute_both(params, ranges, *inputs):
        return prepared.fake_apply(prepared.trainable(params, ranges), *inputs), example.function(params, *inputs)

    fake, want = compute_both(params, ranges, *inputs)
    same_trees(got, fake)
    assert find_sqnr(got, want) > LEAST_SQNR.get(recipe, 25)


@every_program
@pytest.mark.sample(2)
def test_apply_equals_fake_apply(name, rng):
    _check_values(name, "w8a8_dynamic", rng)


@other_recipes
@pytest.mark.sample(2)
def test_apply_equals_fake_apply_with_recipes(name, recipe, rng):
    _check_values(name, recipe, rng)


@pytest.mark.parametrize(("name", "recipe"), [pair for pair in PAIRS if PROGRAMS[pair[0]].is_differentiable])
@pytest.mark.sample(1)
def test_gradient_of_fake_apply(name, recipe, rng):
    example, params, inputs, prepared = _prepare(name, recipe, rng)
    # Quantized values may lie beyond the range of the floats, where they saturate and have no gradient.
    # A branch that no input takes has no range, and needs one here.
    found = find_ranges(prepared, params, *inputs)
    ranges = jax.tree.map(lambda bound: jnp.where(jnp.isfinite(bound), 1.1 * bound, 1), found)
    fake, gradients = differentiate(
        lambda params, *xs: prepared.fake_apply(prepared.trainable(params, ranges), *xs), params, *inputs
    )
    want, float_gradients = differentiate(example.function, params, *inputs)
    assert find_sqnr(fake, want) > LEAST_SQNR.get(recipe, 25)
    check_gradients(gradients, float_gradients, LEAST_COSINE.get(recipe, 0.8))


# Their floats are computed by other fusions than op by op.
FUSED = ("weight_norm", "split_outputs", "concatenate_outputs", "embedding_of_one_token")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in FUSED])
@pytest.mark.sample(1)
def test_eager_equals_jit(name, rng):
    _, params, inputs, prepared = _prepare(name, "w8a8_dynamic", rng)
    qparams = prepared.convert(params)
    same_trees(prepared.apply(qparams, *inputs), jax.jit(prepared.apply)(qparams, *inputs))


# No input takes the second branch of `cond`, which then has no range.
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "cond"])
@pytest.mark.sample(1)
def test_vmap_over_inputs(name, rng):
    example, params, inputs, prepared = _prepare(name, "w8a8_static", rng)
    others = example.sample_inputs(rng)
    state = prepared.observe(prepared.observe(prepared.init(), params, *inputs), params, *others)
    finalize = jax.jit(prepared.finalize)
    # A branch that no batch has taken has no range.
    for _ in range(100):
        if all(np.isfinite(end).all() for end in jax.tree.leaves(finalize(state))):
            break
        state = prepared.observe(state, params, *example.sample_inputs(rng))
    qparams = prepared.convert(params, finalize(state))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), inputs, others)
    got = jax.jit(jax.vmap(lambda *xs: prepared.apply(qparams, *xs)))(*stacked)
    for place, one in enumerate((inputs, others)):
        part = jax.tree.map(lambda x, place=place: x[place], got)
        want = jax.jit(prepared.apply)(qparams, *one)
        if "f" in example.forms:
            # Sums of floats may have another order.
            assert find_sqnr(part, want) > 40
        else:
            same_trees(part, want)


# Programs whose first dimension is a batch.
BATCHED = [
    "product", "attention", "convolution", "tied_embedding", "remat", "nested_jit", "scan_over_layers",
    "reshape_to_heads", "concatenate_outputs", "cond", "loop_in_branch",
]  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.sample(1)
def test_another_batch_size(name, rng):
    _, params, inputs, prepared = _prepare(name, "w8a8_static", rng)
    ranges = find_ranges(prepared, params, *inputs)
    # Traced, because no input takes the second branch of `cond`, and without a range it is refused.
    qparams = jax.jit(prepared.convert)(params, ranges)
    wide = [jnp.concatenate([x, x, x]) if x.ndim else x for x in inputs]
    assert [row.name for row in prepared.check(params, *wide).rows] == [row.name for row in prepared.coverage.rows]
    got = jax.jit(prepared.apply)(qparams, *wide)
    want = jax.jit(prepared.apply)(qparams, *inputs)
    same_trees(got[: len(want)], want)


# Contractions that stay in floats: the reason, and the paths of the parameters that are not quantized.
REASONS = {
    "low_rank_update": [("both operands are parameters", {"a", "b"}), ("dot_general at", {"w", "a", "b"})],
    "weight_norm": [("mul at", {"v", "g"})],
    "masked_weight": [("gt at", {"w", "mask"})],
    "concatenate_inputs": [("parameters are concatenated along an axis that is summed", {"a", "b"})],
    "closed_over_constant": [("an operand is an array that the function closes over", set())],
    "constant_times_weight": [("computed by dot_general at", {"w"})],
    "cond_that_returns_a_weight": [("cond at", {"a", "b"})],
    "weights_swapped_by_scan": [("scan at", {"a", "b"})],
    "dead_code": [("nothing uses its result", {"unused"})],
    "contraction_in_condition": [("in the condition of a loop", {"w"})],
    "lookup_of_windows": [("a gather of something else than whole entries", {"table"})],
    "lookup_in_a_computed_table": [("computed by mul at", {"table"})],
    "attention": [("a product of activations", set())] * 2,
}
# A rule does not want these in integers, or nothing is lost by floats.
UNWANTED = ("closed_over_constant", "dead_code", "attention")


@pytest.mark.parametrize("name", REASONS)
def test_float_rows_say_why(name, rng):
    _, _, _, prepared = _prepare(name, "w8a8_dynamic", rng)
    rows = [(row.reason, set(row.paths)) for row in prepared.coverage.floats]
    assert len(rows) == len(REASONS[name])
    for (reason, paths), (part, expected) in zip(rows, REASONS[name], strict=True):
        assert part in reason
        assert paths == expected


@pytest.mark.parametrize("name", [name for name in REASONS if name not in UNWANTED])
def test_strict_raises(name, rng):
    with pytest.raises(ValueError, match=r"codes for each contraction that a rule matches \(strict=True\)") as error:
        _prepare(name, "w8a8_dynamic", rng, strict=True)
    for reason, paths in REASONS[name]:
        assert reason in str(error.value)
        assert all(path in str(error.value) for path in paths)


@pytest.mark.parametrize("name", UNWANTED)
def test_strict_ignores_what_no_rule_wants(name, rng):
    _prepare(name, "w8a8_dynamic", rng, strict=True)


@pytest.mark.slow
def test_custom_gradient_is_kept(rng):
    _, params, (x,), prepared = _prepare("custom_vjp_around", "w8a8_dynamic", rng)
    _, _, _, plain = _prepare("product", "w8a8_dynamic", rng)
    gradients = [
        jax.grad(lambda params, one=one: one.fake_apply(params, x).sum())(params)["w"] for one in (prepared, plain)
    ]
    # The rule reads the inputs in floats, so the gradients differ by the errors of their codes.
    ratio = np.linalg.norm(gradients[0]) / np.linalg.norm(gradients[1])
    np.testing.assert_allclose(ratio, 7, rtol=0.05)
