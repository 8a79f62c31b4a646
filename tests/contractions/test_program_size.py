"""The number of operations in the program of one product: XLA takes the longer to compile the more there are."""

import jax
import jax.numpy as jnp
import pytest

import jaxquant as jq

from ..support.hlo import Program

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.10 has other forms for one row")


@pytest.mark.parametrize(
    ("dtype", "block", "stored_last", "most"),
    [
        ("int8", None, None, 130),
        ("int8", None, 0, 160),
        ("int8", 32, None, 130),
        ("int4", 32, None, 350),
        ("int5", 32, 0, 320),
    ],
)
def test_one_row(dtype: str, block: int | None, stored_last: int | None, most: int) -> None:
    """The limits lie above today's numbers, and below those of programs with more operations for each row.

    An int4 program cuts out each row of words: LLVM does not vectorize it otherwise.
    """
    spec = jq.QuantSpec(dtype, jq.PerAxis(1) if block is None else jq.Blocked(0, block))
    q = jax.eval_shape(lambda w: jq.quantize(w, spec, stored_last=stored_last), jnp.ones((640, 1024)))
    program = Program(jq.matmul, jax.ShapeDtypeStruct((1, 640), jnp.float32), q)
    assert sum(len(body) for body in program.computations.values()) <= most
