"""How the package is built, in figures: modules, imports, names, and the frames between a call and its arithmetic.

`python -m tests.project.structure` prints them. `--root PATH` reads the source of another checkout, and prints only
what can be read from source. `--list NAME` prints what a figure counts, such as the private imports, one by one.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import io
import pathlib
import re
import statistics
import sys
import tokenize
import types
from collections.abc import Callable, Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "jaxquant"
# The packages below everything else: any package may import their modules, private ones included.
SHARED = ("_core", "_kernels", "_program", "_arrays")
KERNELS = f"{PACKAGE}._kernels"
# Their layers have the names that Flax gave to its own layers, in both of its interfaces.
LAYERS = (f"{PACKAGE}.flax.linen", f"{PACKAGE}.flax.nnx")


@dataclasses.dataclass(frozen=True)
class Import:
    """A module of the package that another one imports.

    Attributes:
        importer: the module with the import statement.
        imported: the module that the statement names, or in which it looks up a name.
        names: the number of names that the statement takes from `imported`.
        line: the line of the statement.
        where: "module" if importing the importer runs the statement, "function" if a call of a function does, and
            "typing" if only type checkers read it.
    """

    importer: str
    imported: str
    names: int
    line: int
    where: str


class Source:
    """The modules of a checkout, parsed.

    Attributes:
        paths: the file of each module, by the module's full name. A package's name stands for its `__init__.py`.
        trees: the syntax tree of each module.
    """

    def __init__(self, root: pathlib.Path = ROOT) -> None:
        self.root = root
        self.paths = {_name_module(path, root): path for path in sorted((root / PACKAGE).rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}

    @functools.cached_property
    def imports(self) -> list[Import]:
        """The imports of the package's modules by each other."""
        return [found for name in self.paths for found in self._list_imports(name)]

    def _list_imports(self, name: str) -> Iterator[Import]:
        is_package = self.paths[name].name == "__init__.py"
        package = name if is_package else name.rpartition(".")[0]
        for node, where in _list_import_statements(self.trees[name], "module"):
            targets = collections.Counter(self._resolve(node, package))
            for target, count in targets.items():
                if target != name:
                    yield Import(name, target, count, node.lineno, where)

    def _resolve(self, node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
        """Yield the module of this package that each name of an import statement comes from."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in self.paths)
            return
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            module = f"{base}.{alias.name}"
            if module in self.paths:
                yield module
            elif base in self.paths:
                yield base

    def graph(self, *where: str) -> dict[str, set[str]]:
        """Return the modules that each module imports, by the kinds of statements in `where`."""
        graph: dict[str, set[str]] = {name: set() for name in self.paths}
        for found in self.imports:
            if found.where in where:
                graph[found.importer].add(found.imported)
        return graph


def _name_module(path: pathlib.Path, root: pathlib.Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _list_import_statements(node: ast.AST, where: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, where
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _list_import_statements(ast.Module([statement], []), "typing")
            for statement in child.orelse:
                yield from _list_import_statements(ast.Module([statement], []), where)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _list_import_statements(child, "function")
        elif not isinstance(child, ast.expr):
            yield from _list_import_statements(child, where)


# Lines


def list_definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a module, and its classes and functions at any depth."""
    blocks: list[ast.AST] = [tree]
    while blocks:
        block = blocks.pop()
        if isinstance(block, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield block
        # No expression holds a definition, and most nodes of a tree are expressions.
        blocks += [node for node in ast.iter_child_nodes(block) if not isinstance(node, ast.expr)]


def find_docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in list_definitions(tree):
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def find_comment_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold a comment and no code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}


def count_code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines without docstrings, comments and blank lines."""
    prose = find_docstring_lines(tree) | find_comment_lines(text)
    return sum(bool(line.strip()) and n not in prose for n, line in enumerate(text.splitlines(), 1))


# Imports


def find_closures(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the modules that each module depends on, directly or through others, without itself.

    Python also runs the `__init__.py` of each package above an imported module. Those are not counted, because the one
    of jaxquant imports nearly everything: a module depends on what its import statements name.
    """
    closures = {}
    for name in graph:
        seen: set[str] = set()
        todo = [name]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        closures[name] = seen - {name}
    return closures


def summarize_closures(graph: dict[str, set[str]]) -> tuple[int, int]:
    """Return the median and the 90th percentile of the number of modules that a module depends on."""
    sizes = sorted(len(closure) for closure in find_closures(graph).values())
    return int(statistics.median(sizes)), sizes[len(sizes) * 9 // 10]


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of two or more modules that depend on each other: the strongly connected components."""
    closures = find_closures(graph)
    cycles = {
        frozenset({name, *(other for other in closure if name in closures[other])})
        for name, closure in closures.items()
    }
    return sorted(sorted(cycle) for cycle in cycles if len(cycle) > 1)


def list_private_imports(imports: Iterable[Import]) -> list[Import]:
    """Return the imports of underscore modules of another package, other than the packages in SHARED.

    `p._m` and all below it is private to the package p: modules of p and of packages inside p may import it. The
    packages `jaxquant._x` are private to jaxquant, so that every module may import their modules, in the order that
    import-linter enforces, but not what is private in turn, such as `jaxquant._x._m`.
    """
    return [found for found in imports if found.where != "typing" and _is_private(found)]


def _is_private(found: Import) -> bool:
    parts = found.imported.split(".")
    if parts[1:2] and parts[1] in SHARED:
        return False
    for depth, part in enumerate(parts[2:], 2):
        if part.startswith("_"):
            owner = ".".join(parts[:depth])
            return not f"{found.importer}.".startswith(f"{owner}.")
    return False


# Names


def find_repeated_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the class names that are defined more than once, at any depth, with the modules that define them.

    A layer that is public in both of the packages in LAYERS counts once.
    """
    modules = collections.defaultdict(list)
    for name, tree in trees.items():
        for node in list_definitions(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(name)
    layers = set.intersection(*(read_public_names(trees[package]) for package in LAYERS))
    repeated = {}
    for name, where in sorted(modules.items()):
        is_layer = [name in layers and module.startswith(LAYERS) for module in where]
        if len(where) - max(sum(is_layer) - 1, 0) > 1:
            repeated[name] = where
    return repeated


def read_public_names(tree: ast.Module) -> set[str]:
    """Return the names in `__all__` of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


def list_parameters(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str, ast.arg]]:
    """Yield the module and the function of each parameter, self and cls excepted, and the parameter."""
    for name, tree in trees.items():
        for node in list_definitions(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
                for argument in [*named, *rest]:
                    if argument.arg not in ("self", "cls"):
                        yield name, node.name, argument


def list_any_parameters(trees: dict[str, ast.Module]) -> list[str]:
    """Return the parameters that are annotated `Any`, alone, as "module.function: parameter"."""
    return [
        f"{module}.{function}: {argument.arg}"
        for module, function, argument in list_parameters(trees)
        if argument.annotation is not None and ast.unparse(argument.annotation) in ("Any", "typing.Any")
    ]


def list_platform_calls(trees: dict[str, ast.Module]) -> list[str]:
    """Return the mentions of `platform_dependent` outside `_kernels`, as "module:line"."""
    found = []
    for name, tree in trees.items():
        if name != KERNELS and not name.startswith(f"{KERNELS}."):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr == "platform_dependent":
                    found.append(f"{name}:{node.lineno}")
    return found


# Frames


@dataclasses.dataclass(frozen=True)
class Walk:
    """The functions of jaxquant from a public call to its arithmetic.

    Attributes:
        frames: the functions' qualified names, the public one first.
        deepest: the number of frames on the longest way to the same primitive, such as the form of another backend.
        repeated: the names that two different functions of the way share, Python's own such as `__call__` excepted.
    """

    frames: tuple[str, ...]
    deepest: int
    repeated: tuple[str, ...]


def walk(call: Callable[[], object], primitive: str) -> Walk:
    """Return the frames between a call and the first use of a primitive that it traces.

    Frames of JAX, Flax and Python are not counted, and neither are uses in `jax.eval_shape`, which only asks for the
    shape of a result. The call must have shapes that this process has not seen before, because JAX would run the
    program that it has traced already.
    """
    folder = str(pathlib.Path(sys.modules[PACKAGE].__file__ or "").parent)
    ways: list[list[types.CodeType]] = []

    def record(frame: types.FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_name != "bind":
            return
        if getattr(frame.f_locals.get("self"), "name", None) != primitive:
            return
        codes = list(_list_frames(frame))
        if not any(code.co_name == "eval_shape" for code in codes):
            ways.append([code for code in reversed(codes) if code.co_filename.startswith(folder)])

    # A tool that measures coverage sets a profile, too.
    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(previous)
    assert ways, f"expected a call that traces {primitive}, got none: has a call of the same shapes been traced before?"
    functions = collections.Counter(code.co_name for code in set(ways[0]))
    repeated = sorted(name for name, count in functions.items() if count > 1 and re.match(r"_?[a-z]", name))
    return Walk(tuple(code.co_qualname for code in ways[0]), max(map(len, ways)), tuple(repeated))


def _list_frames(frame: types.FrameType | None) -> Iterator[types.CodeType]:
    while frame is not None:
        # Comprehensions are frames in Python 3.11 and not in later versions.
        if not frame.f_code.co_name.endswith(("comp>", "genexpr>")):
            yield frame.f_code
        frame = frame.f_back


def trace_walks() -> dict[str, Walk]:
    """Return the walks of some public calls. The shapes are such that no other test has them."""
    import jax.numpy as jnp
    import numpy as np

    import jaxquant as jq
    from jaxquant.flax import linen as qnn

    spec = jq.QuantSpec("int8")
    x = jnp.ones((5, 1031))
    q, codes = jq.quantize(jnp.ones((1031, 7)), spec), jq.quantize(jnp.ones((3, 1031)), spec)
    layer = qnn.Dense(11, weight_spec=spec, activation_spec=spec)
    kernel = {"params": {"kernel": jnp.ones((1031, 11)), "bias": jnp.ones(11)}}
    return {
        "jq.matmul(a, q), a float": walk(lambda: jq.matmul(x, q), "dot_general"),
        "jq.matmul(a, q), both quantized": walk(lambda: jq.matmul(codes, q), "dot_general"),
        "jq.quantize_linear": walk(lambda: jq.quantize_linear(x, np.float32(0.1), np.int8(0)), "div"),
        "qnn.Dense": walk(lambda: layer.apply(kernel, x), "dot_general"),
    }


# The command


@dataclasses.dataclass(frozen=True)
class Figures:
    """What can be read from source. The closures are pairs of the median and the 90th percentile."""

    modules: int
    code_lines: int
    comment_lines: int
    closure: tuple[int, int]
    closure_at_import: tuple[int, int]
    private_imports: int
    private_names: int
    cycles: int
    repeated_classes: int
    parameters: int
    any_parameters: int
    platform_calls: int


def measure(source: Source) -> Figures:
    """Return the figures of a checkout."""
    texts = {name: path.read_text() for name, path in source.paths.items()}
    private = list_private_imports(source.imports)
    return Figures(
        modules=len(source.paths),
        code_lines=sum(count_code_lines(text, source.trees[name]) for name, text in texts.items()),
        comment_lines=sum(len(find_comment_lines(text)) for text in texts.values()),
        closure=summarize_closures(source.graph("module", "function")),
        closure_at_import=summarize_closures(source.graph("module")),
        private_imports=len(private),
        private_names=sum(found.names for found in private),
        cycles=len(find_cycles(source.graph("module", "function"))),
        repeated_classes=len(find_repeated_classes(source.trees)),
        parameters=sum(1 for _ in list_parameters(source.trees)),
        any_parameters=len(list_any_parameters(source.trees)),
        platform_calls=len(list_platform_calls(source.trees)),
    )


def format_figures(figures: Figures) -> list[str]:
    """Return a line for each figure."""
    rows = [
        ("modules", figures.modules),
        ("code lines (without docstrings, comments, blanks)", figures.code_lines),
        ("comment lines", figures.comment_lines),
        ("import closure, median and 90th percentile", "{} and {}".format(*figures.closure)),
        ("  of imports at module level only", "{} and {}".format(*figures.closure_at_import)),
        ("private imports across packages", figures.private_imports),
        ("  names that they import", figures.private_names),
        ("import cycles", figures.cycles),
        ("class names used twice or more", figures.repeated_classes),
        ("parameters annotated Any", f"{figures.any_parameters} of {figures.parameters}"),
        ("platform_dependent outside _kernels", figures.platform_calls),
    ]
    return [f"{name:52} {value}" for name, value in rows]


def format_walk(name: str, way: Walk) -> str:
    """Return a line for a walk, with its functions on the next."""
    repeated = f", names shared by two functions: {', '.join(way.repeated)}" if way.repeated else ""
    functions = " > ".join(function.rsplit("<locals>.", 1)[-1] for function in way.frames)
    return f"frames of {name + ',':42} {len(way.frames)} (deepest {way.deepest}){repeated}\n    {functions}"


def list_details(source: Source, name: str) -> list[str]:
    """Return what a figure counts."""
    if name == "private":
        found = list_private_imports(source.imports)
        return [f"{i.importer}:{i.line} imports {i.names} from {i.imported}" for i in found]
    if name == "cycles":
        return [" <-> ".join(cycle) for cycle in find_cycles(source.graph("module", "function"))]
    if name == "classes":
        return [f"{k}: {', '.join(where)}" for k, where in find_repeated_classes(source.trees).items()]
    if name == "any":
        return list_any_parameters(source.trees)
    if name == "platform":
        return list_platform_calls(source.trees)
    closures = find_closures(source.graph("module", "function"))
    return [f"{len(closure):4} {k}" for k, closure in sorted(closures.items(), key=lambda item: -len(item[1]))]


def main() -> None:
    """Print the figures, or what one of them counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, help="another checkout, for the figures that are read from source")
    parser.add_argument("--list", choices=("private", "cycles", "classes", "any", "platform", "closures"))
    options = parser.parse_args()
    source = Source((options.root or ROOT).resolve())
    if options.list:
        print("\n".join(list_details(source, options.list)))
        return
    print("\n".join(format_figures(measure(source))))
    if options.root is None:
        for name, way in trace_walks().items():
            print(format_walk(name, way))


if __name__ == "__main__":
    main()
