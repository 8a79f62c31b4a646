"""The tests run the code blocks of these pages. The hooks belong to the build of the site and need its packages."""

import os

# docs/distributed.md needs eight devices; tests/conftest.py sets the same where both are loaded.
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

collect_ignore = ["_hooks"]
