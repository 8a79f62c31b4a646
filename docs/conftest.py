"""The tests run the code blocks of these pages. The hooks belong to the build of the site and need its packages."""

from collections.abc import Iterator

import jax
import pytest

collect_ignore = ["_hooks"]


@pytest.fixture(autouse=True)
def _promote_as_optax(request: pytest.FixtureRequest) -> Iterator[None]:
    """Allow the arithmetic of optax's Adam, which mixes dtypes, on the page that calls it."""
    with jax.numpy_dtype_promotion("standard" if request.node.path.name == "optimizer-states.md" else "strict"):
        yield
