"""The plan of a transformer on a mesh: a training step and a decoding step, traced with abstract shapes and counted."""
