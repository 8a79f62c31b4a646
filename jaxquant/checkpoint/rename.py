"""`rename`: the tensors of a checkpoint as the parameters of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._arrays.quantized_array import QuantizedArray
from .._core import checks
from .info import CheckpointError, Tensor, list_some, shorten_name

_NAME = "checkpoint.rename"
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
Target = str | tuple[str, Callable[[Any], Any]] | None


def rename(tensors: Mapping[str, Tensor], rules: Mapping[str, Target], *, like: Any = None) -> Any:
    """Return the tensors of a checkpoint as a nested tree, such as the parameters of a model.

    The first rule whose pattern is the whole name of a tensor says where it goes. A field such as {i} in a pattern
    stands for letters, digits, "_" and "-", and has the same text in the path.

    Args:
        tensors: arrays and QuantizedArrays by name, as `load` returns them.
        rules: paths by pattern, such as {"blk.{i}.attn_q.weight": "layers/{i}/query/kernel"}. The keys of a path are
            joined by "/". A pair of a path and a function applies the function to the tensor, such as
            `lambda w: w.T`. None leaves the tensor out.
        like: a pytree whose leaves have these paths, such as the parameters of a Flax or Equinox model or their shapes;
            None makes nested dicts.

    Returns:
        Nested dicts of the tensors, or a pytree like `like`.

    Raises:
        CheckpointError: tensors have no rule, leaves of `like` have no tensor, two tensors have one path, or a tensor
            has another shape than the leaf. The names are listed.
        TypeError: the rules are not such a dict.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> tensors = {"blk.0.up.weight": jnp.ones((4, 2)), "blk.1.up.weight": jnp.ones((4, 2)), "rope": jnp.ones(3)}
        >>> rules = {"blk.{i}.up.weight": ("layers/{i}/up", lambda w: w.T), "rope": None}
        >>> tree = checkpoint.rename(tensors, rules)
        >>> tree["layers"]["1"]["up"].shape, list(tree)
        ((2, 4), ['layers'])

    Source: the names of tensors in docs/checkpoint-files.md.
    """
    checks.require_type(isinstance(tensors, Mapping), _NAME, "tensors", "a dict by name", type(tensors).__name__)
    checks.require_type(isinstance(rules, Mapping), _NAME, "rules", "a dict of paths by pattern", type(rules).__name__)
    compiled = [_compile_rule(pattern, target) for pattern, target in rules.items()]
    moved: dict[str, Tensor] = {}
    unmatched = []
    for name, tensor in tensors.items():
        found = ((fields, target) for match, target in compiled if (fields := match(name)) is not None)
        fields, target = next(found, (None, None))
        if fields is None:
            unmatched.append(name)
        if fields is None or target is None:
            continue
        path, function = target if isinstance(target, tuple) else (target, None)
        path = _FIELD.sub(lambda match, fields=fields: fields[match[1]], path)
        if path in moved:
            raise CheckpointError(f"{path!r}: expected one tensor for each path, got a second one, {name!r}")
        moved[path] = tensor if function is None else function(tensor)
    if like is not None:
        return _fill(like, moved, unmatched)
    _refuse_unmatched(unmatched, [])
    return _nest(moved)


def _compile_rule(pattern: object, target: object) -> tuple[Callable[[str], dict[str, str] | None], Target]:
    """Return a function of a name, which returns the fields of the pattern or None, and the target."""
    checks.require_type(isinstance(pattern, str), _NAME, "rules", "patterns that are strings", repr(pattern))
    assert isinstance(pattern, str)
    is_pair = isinstance(target, tuple) and len(target) == 2 and isinstance(target[0], str) and callable(target[1])
    expected = "a path, a pair of a path and a function, or None"
    is_target = target is None or isinstance(target, str) or is_pair
    checks.require_type(is_target, _NAME, f"rules[{pattern!r}]", expected, repr(target))
    path = target[0] if isinstance(target, tuple) else target if isinstance(target, str) else ""
    fields = _FIELD.findall(pattern)
    unknown = [field for field in _FIELD.findall(path) if field not in fields]
    checks.require(not unknown, _NAME, f"rules[{pattern!r}]", f"fields of the pattern, {fields}", unknown)
    checks.require(len(set(fields)) == len(fields), _NAME, "rules", "each field once in a pattern", repr(pattern))
    parts = _FIELD.split(pattern)  # texts and names of fields in turns
    regex = re.compile("".join(rf"(?P<{text}>[\w-]+)" if i % 2 else re.escape(text) for i, text in enumerate(parts)))

    def match(name: str) -> dict[str, str] | None:
        found = regex.fullmatch(name)
        return None if found is None else found.groupdict()

    return match, target  # pyright: ignore[reportReturnType]


def _refuse_unmatched(unmatched: list[str], unfilled: list[str]) -> None:
    """Raise if tensors have no rule, or leaves no tensor."""
    texts = []
    if unmatched:
        texts.append(f"no rule for the tensors {list_some([shorten_name(name) for name in unmatched], 20)}")
    if unfilled:
        texts.append(f"no tensor for the leaves {list_some(unfilled, 20)}")
    if texts:
        raise CheckpointError(f"expected a rule for each tensor and a tensor for each leaf, got {'; '.join(texts)}")


def _nest(moved: Mapping[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, tensor in moved.items():
        *outer, last = path.split("/")
        node: Any = tree
        for key in outer:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise CheckpointError(f'{path!r}: expected no path to be a prefix of another, such as "a" of "a/b"')
        node[last] = tensor
    return tree


def _fill(like: Any, moved: dict[str, Tensor], unmatched: list[str]) -> Any:
    """Return a pytree with its leaves replaced by the tensors of their paths."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: isinstance(x, QuantizedArray))
    leaves = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in pairs}
    extra = [f"{path} (a path without a leaf)" for path in moved if path not in leaves]
    _refuse_unmatched(unmatched + extra, [path for path in leaves if path not in moved])
    for path, leaf in leaves.items():
        if hasattr(leaf, "shape") and tuple(leaf.shape) != tuple(moved[path].shape):
            raise CheckpointError(f"{path!r}: expected shape {tuple(leaf.shape)}, got {tuple(moved[path].shape)}")
    return structure.unflatten([moved[path] for path in leaves])
