"""Which leaves of optax's states become codes: moments and second moments."""

from __future__ import annotations

from typing import Any

import jax

MOMENT, SECOND_MOMENT, KEPT = "moment", "second moment", "kept"

# The leaves of optax's states that hold averages of gradients or updates, or the last gradients.
_MOMENTS = {
    "ScaleByAdamState": ("mu",),
    "ScaleByAmsgradState": ("mu",),
    "ScaleByRStdDevState": ("mu",),
    "ScaleByRStdDevWithCountState": ("mu",),
    "ScaleByLionState": ("mu",),
    "ScaleByBeliefState": ("mu",),
    "ScaleByNovogradState": ("mu",),
    "ScaleByAdanState": ("m", "v", "g"),
    "ScaleBySM3State": ("nu",),
    "ScaleByOptimisticGradientState": ("previous_gradient",),
    "TraceState": ("trace",),
    "EmaState": ("ema",),
    "MuonState": ("mu",),
    "SophiaState": ("mu",),
    "ScaleByAdemamixState": ("m1",),
    "ProdigyState": ("exp_avg",),
    "DAdaptAdamWState": ("exp_avg",),
    "MomoState": ("exp_avg",),
    "MomoAdamState": ("exp_avg",),
}
# Those that are never negative and by whose root an update is divided: averages and maxima of squares.
_SECOND_MOMENTS = {
    "ScaleByAdamState": ("nu",),
    "ScaleByAmsgradState": ("nu", "nu_max"),
    "ScaleByRmsState": ("nu",),
    "ScaleByRmsWithCountState": ("nu",),
    "ScaleByRStdDevState": ("nu",),
    "ScaleByRStdDevWithCountState": ("nu",),
    "ScaleByBeliefState": ("nu",),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdanState": ("n",),
    "FactoredState": ("v_row", "v_col", "v"),
    "ScaleByAdemamixState": ("nu",),
    "ScaleBySimplifiedAdEMAMixState": ("n",),
    "ProdigyState": ("exp_avg_sq",),
    "DAdaptAdamWState": ("exp_avg_sq",),
    "MomoAdamState": ("exp_avg_sq",),
}


def mark_leaves(state: Any) -> Any:
    """Return a tree of the structure of an optimizer state with the role of each leaf."""

    def mark_node(node: Any) -> Any:
        if not _is_state(node):
            return KEPT
        name = type(node).__name__
        roles = dict.fromkeys(_MOMENTS.get(name, ()), MOMENT)
        roles |= dict.fromkeys(_SECOND_MOMENTS.get(name, ()), SECOND_MOMENT)
        fields = []
        for field, child in zip(node._fields, node, strict=True):
            role = roles.get(field)
            fields.append(mark_leaves(child) if role is None else jax.tree.map(lambda _, role=role: role, child))
        return type(node)(*fields)

    return jax.tree.map(mark_node, state, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    """Return whether a node is a state that optax defines; another library may use the same names for other things."""
    name = type(node).__name__
    is_named = name in _MOMENTS or name in _SECOND_MOMENTS
    return is_named and type(node).__module__.partition(".")[0] == "optax" and hasattr(node, "_fields")
