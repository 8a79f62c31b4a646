"""The size of models: protobuf writes no message of 2 GB, so the arrays of larger models are kept outside of it."""

from __future__ import annotations

from onnx import ModelProto

LARGEST_MESSAGE = 2**31 - 2**20
# Smaller arrays stay in the model, as onnx's functions leave them there.
LARGEST_INNER_ARRAY = 1024


def count_array_bytes(model: ModelProto) -> int:
    """Return the bytes of the arrays that a model holds."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def is_large(model: ModelProto) -> bool:
    """Return whether protobuf cannot write a model, because of its arrays."""
    # `ByteSize` fails for a model that is too large, so it tells the size of none that matters.
    return count_array_bytes(model) >= LARGEST_MESSAGE


def count_bytes(model: ModelProto) -> int:
    """Return the bytes that a model takes in files."""
    if not is_large(model):
        return model.ByteSize()
    rest = ModelProto()
    rest.CopyFrom(model)
    del rest.graph.initializer[:]
    return count_array_bytes(model) + rest.ByteSize()
