"""The tests run the code blocks of these pages. The hooks belong to the build of the site and need its packages."""

collect_ignore = ["_hooks"]
