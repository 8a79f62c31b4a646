"""The public interface as text: each public name of the package with its signature.

`python -m tests.project.signatures` writes `signatures.txt`, so that a change of the interface is a change of that
file. What is public follows from the packages themselves: `__all__` of `jaxquant`, and of the public modules in it.
"""

from __future__ import annotations

import inspect
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jaxquant as jq

PATH = pathlib.Path(__file__).with_name("signatures.txt")
ROOT = jq.__name__
COMMAND = "python -m tests.project.signatures"


def list_packages(package: types.ModuleType = jq) -> dict[str, types.ModuleType]:
    """Return the public modules by their full names: a package, and the modules that it makes public, at any depth."""
    packages = {package.__name__: package}
    for name in sorted(dir(package)):
        value = getattr(package, name)
        if isinstance(value, types.ModuleType) and value.__name__ not in packages and _is_public(value.__name__):
            packages |= list_packages(value)
    return packages


def _is_public(module: str) -> bool:
    return module.startswith(f"{ROOT}.") and "._" not in module


def list_names(package: types.ModuleType) -> list[str]:
    """Return the public names of a module, without the modules among them."""
    return sorted(name for name in package.__all__ if not isinstance(getattr(package, name), types.ModuleType))


def list_public() -> dict[str, object]:
    """Return the public values by the shortest path from which they can be imported."""
    packages = list_packages()
    paths: dict[int, str] = {}
    public: dict[str, object] = {}
    for prefix in sorted(packages, key=lambda name: (name.count("."), name)):
        for name in list_names(packages[prefix]):
            value = getattr(packages[prefix], name)
            # Two constants may be one object, as small ints are.
            if not callable(value) or paths.setdefault(id(value), f"{prefix}.{name}") == f"{prefix}.{name}":
                public[f"{prefix}.{name}"] = value
    return public


def is_function(value: object) -> bool:
    """Return whether a value is a function, or one in a wrapper such as `functools.cache`."""
    return inspect.isfunction(value) or (not inspect.isclass(value) and hasattr(value, "__wrapped__"))


def list_functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by their path below jaxquant."""
    return {
        path.removeprefix(f"{ROOT}."): value
        for path, value in list_public().items()
        if callable(value) and is_function(value)
    }


def format_value(value: object) -> str:
    """Return a default as text, or "..." where the text would depend on versions or on addresses."""
    text = value.__name__ if inspect.isfunction(value) or inspect.isclass(value) else repr(value)
    return "..." if "<" in text or len(text) > 60 else text


def format_signature(function: Callable[..., Any]) -> str:
    """Return the parameters of a function with their kinds and defaults, without annotations."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        bare = parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        text = str(bare)
        if parameter.default is not inspect.Parameter.empty:
            text += f"={format_value(parameter.default)}"
        parameters.append((parameter.kind, text))
    return f"({', '.join(_mark_kinds(parameters))})"


def _mark_kinds(parameters: list[tuple[Any, str]]) -> Iterator[str]:
    """Yield the parameters with the marks of Python's syntax: / and *."""
    only_positional, starred = False, False
    for kind, text in parameters:
        if only_positional and kind is not inspect.Parameter.POSITIONAL_ONLY:
            yield "/"
        only_positional = kind is inspect.Parameter.POSITIONAL_ONLY
        if kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred |= kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        yield text
    if only_positional:
        yield "/"


def format_class(path: str, cls: type) -> Iterator[str]:
    """Yield a line for the constructor of a class, and one for each public attribute that jaxquant defines."""
    ours = [base for base in cls.__mro__ if base.__module__.split(".")[0] == ROOT]
    python = ("builtins", "abc", "typing", "collections.abc", "enum")
    others = [base for base in cls.__mro__ if base not in ours and base.__module__ not in python]
    if others or issubclass(cls, BaseException):
        yield f"class {path}"
        # What a layer has from Flax depends on the version of Flax, and so does its constructor.
        skipped = {name for base in others for name in (*vars(base), *inspect.get_annotations(base))} - {"__call__"}
        called = ("__call__", "__init__")
    else:
        yield f"class {path}{format_signature(cls)}"
        skipped, called = set(), ("__call__",)
    annotated = {name for base in ours for name in inspect.get_annotations(base)}
    attributes = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    for name in sorted(annotated | set(attributes)):
        is_call = name in called and _is_written_here(attributes.get(name))
        if (name.startswith("_") and not is_call) or (name in skipped and not is_call):
            continue
        value: Any = attributes.get(name)
        if isinstance(value, staticmethod | classmethod):
            value = getattr(cls, name)
        is_method = name not in annotated and (inspect.isfunction(value) or inspect.ismethod(value))
        yield f"    {name}{format_signature(value) if is_method else ''}"


def _is_written_here(value: object) -> bool:
    """Return whether a value is a function of jaxquant's source, and not one that a dataclass has made."""
    folder = str(pathlib.Path(jq.__file__).parent)
    return inspect.isfunction(value) and inspect.unwrap(value).__code__.co_filename.startswith(folder)


def format_public() -> str:
    """Return the text of the file."""
    lines = [f"# The public interface. Written by `{COMMAND}`."]
    public = list_public()
    for prefix, package in sorted(list_packages().items()):
        lines += ["", f"# {prefix}", ""]
        for name in list_names(package):
            path, value = f"{prefix}.{name}", getattr(package, name)
            if path not in public:
                original = next(other for other, known in public.items() if known is value)
                lines.append(f"{path} = {original}")
            elif inspect.isclass(value):
                lines += format_class(path, value)
            elif is_function(value):
                lines.append(f"{path}{format_signature(value)}")
            else:
                lines.append(f"{path}: {type(value).__name__}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(format_public())
    print(f"wrote {PATH}")
