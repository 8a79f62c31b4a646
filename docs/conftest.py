"""The tests run the code blocks of these pages. The hooks belong to the build of the site and need its packages."""

import os
from collections.abc import Iterator

import jax
import pytest

# docs/distributed.md needs eight devices; tests/conftest.py sets the same where both are loaded.
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

collect_ignore = ["_hooks", "gallery"]  # tests/project/test_gallery.py executes the notebooks


@pytest.fixture(autouse=True)
def _promote_as_optax(request: pytest.FixtureRequest) -> Iterator[None]:
    """Allow the arithmetic of optax's Adam, which mixes dtypes, on the pages that call it."""
    uses_adam = request.node.path.name in ("optimizer-states.md", "train-for-a-format.md")
    with jax.numpy_dtype_promotion("standard" if uses_adam else "strict"):
        yield
