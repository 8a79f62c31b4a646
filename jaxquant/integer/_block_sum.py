"""The sum of integer contractions over blocks of a contracted dimension, one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from .._kernels import barriers


def sum_over_blocks(contract: Callable[[Any], jax.Array], blocks: Any) -> jax.Array:
    """Return the float32 sum of `contract(block)` over all blocks, in ascending order, each sum rounded once.

    It is a loop, because a contraction of all blocks at once would keep the accumulators of all blocks in memory.

    Args:
        contract: returns the scaled product of one block, float32.
        blocks: a pytree of arrays whose first dimension counts the blocks, one block or more.
    """
    first, rest = (jax.tree.map(lambda stack, run=run: stack[run], blocks) for run in (0, slice(1, None)))
    # The sum starts from the first term and not from an array of zeros, because under shard_map the carry of the loop
    # must vary over devices from the first step. Adding 0 turns -0 into 0, as a sum from 0 does.
    total = contract(first) + np.float32(0)
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        return total

    def add_block(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return barriers.round_result(total + contract(block)), None

    return lax.scan(add_block, total, rest)[0]
