"""The error for a model that cannot be loaded."""


class ModelError(ValueError):
    """The error for a model file that is damaged, unsafe, larger than its limits, or not supported.

    Whatever is wrong with a file, `load` and `check` raise this error, with a text that says what it is.
    """
