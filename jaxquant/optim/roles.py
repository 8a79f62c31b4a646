"""What the leaves of optax's states are: second moments, copies of parameters, or anything else."""

from __future__ import annotations

from typing import Any

import jax

MOMENT, SECOND_MOMENT, KEPT = "moment", "second moment", "kept"

# The leaves of optax's states that are never negative: averages, sums and maxima of squares or of magnitudes.
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
# Those for which 8 bits are too few: parameters, what a line search compares, and sums. A sum stops growing when the
# numbers that are added are less than half the distance of two levels.
_KEPT = {
    "ScheduleFreeState": ("z",),
    "MultiStepsState": ("acc_grads",),
    "ProdigyState": ("params0", "grad_sum"),
    "DAdaptAdamWState": ("grad_sum",),
    "MadgradState": ("grad_sum_sq", "s", "x0"),
    "DoGState": ("init_params",),
    "DoWGState": ("init_params",),
    "ScaleByDistanceOverGradientsState": ("grad_sum_of_squares", "init_params"),
    "MechanicState": ("x0",),
    "SAMState": ("cache",),
    "COCOBState": ("init_particles", "cumulative_gradients", "scale", "subgradients", "reward"),
    "ScaleByLBFGSState": ("params", "updates", "diff_params_memory", "diff_updates_memory", "weights_memory"),
    "ZoomLinesearchState": ("params", "updates", "grad"),
    "ScaleByZoomLinesearchState": ("grad",),
    "ScaleByBacktrackingLinesearchState": ("grad",),
    "GaLoreState": ("projector",),
    "ScaleByRssState": ("sum_of_squares",),
    "ScaleBySM3State": ("mu",),
    "ScaleByRpropState": ("step_sizes", "prev_updates"),
    "AccumulateAvgUpdatesState": ("avg_grad",),
}


def mark_leaves(state: Any) -> Any:
    """Return a tree of the structure of an optimizer state with the role of each leaf."""

    def mark_node(node: Any) -> Any:
        if not _is_state(node):
            return MOMENT
        name = type(node).__name__
        roles = dict.fromkeys(_SECOND_MOMENTS.get(name, ()), SECOND_MOMENT)
        roles |= dict.fromkeys(_KEPT.get(name, ()), KEPT)
        fields = []
        for field, child in zip(node._fields, node, strict=True):
            role = roles.get(field)
            fields.append(mark_leaves(child) if role is None else jax.tree.map(lambda _, role=role: role, child))
        return type(node)(*fields)

    return jax.tree.map(mark_node, state, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    """Return whether a node is a state that optax defines; another library may use the same names for other things."""
    name = type(node).__name__
    is_named = name in _SECOND_MOMENTS or name in _KEPT
    return is_named and type(node).__module__.partition(".")[0] == "optax" and hasattr(node, "_fields")
