"""Names of vLLM that our code uses, in two releases whose sources are parsed and never imported."""

import ast
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

OURS = ("engine", "server", "quant", "scripts", "trials", "lookalikes", "tests")
QUALIFIED = re.compile(r"vllm(\.\w+)+(:\w+(\.\w+)*)?")


@dataclass(frozen=True)
class Name:
    """A name of vLLM that our code uses."""

    module: str  # dotted
    path: tuple[str, ...]  # class, attribute; empty for the module itself
    user: str  # our file and line

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}" if self.path else self.module


class Release:
    """The sources of a release. `root` is the folder that holds `vllm/`."""

    def __init__(self, root: Path) -> None:
        if not (root / "vllm" / "__init__.py").is_file():
            raise typer.BadParameter(f"{root}: expected a folder that holds vllm/__init__.py")
        self.root = root

    @functools.cache  # noqa: B019 - two instances, for the life of the program
    def tree(self, module: str) -> ast.Module | None:
        """The parsed module, None if it does not exist."""
        base = self.root.joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, module: str, path: tuple[str, ...], seen: frozenset[str] = frozenset()) -> ast.AST | None:
        """The definition of `path` in `module`, through re-exports and base classes. None if there is none."""
        tree = self.tree(module)
        if tree is None or f"{module}:{path}" in seen:
            return None
        seen |= {f"{module}:{path}"}
        if not path:
            return tree
        here = _defined(tree, path[0])
        if isinstance(here, ast.ImportFrom):
            source = _absolute(here, module, is_package=self._is_package(module))
            original = next(alias.name for alias in here.names if (alias.asname or alias.name) == path[0])
            return self.find(source, (original, *path[1:]), seen) or self.find(f"{source}.{original}", path[1:], seen)
        if here is None and self.tree(f"{module}.{path[0]}") is not None:
            return self.find(f"{module}.{path[0]}", path[1:], seen)
        if here is None or len(path) == 1:
            return here
        return self._member(module, here, path[1:], seen) if isinstance(here, ast.ClassDef) else here

    def _member(self, module: str, owner: ast.ClassDef, path: tuple[str, ...], seen: frozenset[str]) -> ast.AST | None:
        found = _defined(owner, path[0])
        if found is not None:
            return found
        for base in owner.bases:
            if isinstance(base, ast.Name) and (inherited := self.find(module, (base.id, *path), seen)) is not None:
                return inherited
        return None

    def _is_package(self, module: str) -> bool:
        return (self.root.joinpath(*module.split(".")) / "__init__.py").is_file()

    @functools.cached_property
    def places(self) -> dict[str, list[str]]:
        """By name of a class or function at module level: the modules that define it."""
        places: dict[str, list[str]] = {}
        for file in sorted((self.root / "vllm").rglob("*.py")):
            module = ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    places.setdefault(node.name, []).append(module)
        return places


def _defined(scope: ast.Module | ast.ClassDef, name: str) -> ast.AST | None:
    """The last statement of `scope` that binds `name`, also inside `if` and `try`."""
    found: ast.AST | None = None
    for node in _statements(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound = {node.name}
        elif isinstance(node, ast.ImportFrom):
            bound = {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            bound = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound = {node.target.id}
        else:
            continue
        if name in bound:
            found = node
    return found


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(node)


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def used(root: Path) -> list[Name]:
    """Every name of vLLM in our code: imported, written as a string, or overridden in a subclass."""
    names: dict[tuple[str, tuple[str, ...]], Name] = {}
    for folder in OURS:
        for file in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            where = str(file.relative_to(root))
            for name in (*_imported(tree, where), *_quoted(tree, where), *_overridden(tree, where)):
                names.setdefault((name.module, name.path), name)
    return sorted(names.values(), key=str)


def _is_vllm(module: str | None) -> bool:
    return module is not None and (module == "vllm" or module.startswith("vllm."))


def _imported(tree: ast.Module, file: str) -> Iterator[Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_vllm(node.module):
            for alias in node.names:
                yield Name(str(node.module), (alias.name,), f"{file}:{node.lineno}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_vllm(alias.name):
                    yield Name(alias.name, (), f"{file}:{node.lineno}")


def _quoted(tree: ast.Module, file: str) -> Iterator[Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and QUALIFIED.fullmatch(node.value):
            module, _, path = node.value.partition(":")
            if path:
                yield Name(module, tuple(path.split(".")), f"{file}:{node.lineno}")
            else:
                module, _, last = module.rpartition(".")
                yield Name(module, (last,), f"{file}:{node.lineno}")


def _overridden(tree: ast.Module, file: str) -> Iterator[Name]:
    """Methods of our classes whose base is imported from vLLM: the base's method of that name, where there is one."""
    sources = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _is_vllm(node.module)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in sources:
                module, name = sources[base.id]
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield Name(module, (name, method.name), f"{file}:{method.lineno}")


def _signature(node: ast.AST) -> list[str]:
    """The parameters of a function, or of a class's own constructor."""
    if isinstance(node, ast.ClassDef):
        made = _defined(node, "__init__")
        return _signature(made) if made is not None else []
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    starred = [
        f"{stars}{argument.arg}" for stars, argument in (("*", arguments.vararg), ("**", arguments.kwarg)) if argument
    ]
    return [argument.arg + (f"={ast.unparse(default)}" if default else "") for argument, default in pairs] + starred


def _code(node: ast.AST) -> list[str]:
    """The lines of a definition without comments, docstrings and line breaks inside statements."""
    node = ast.parse(ast.unparse(node))
    for part in ast.walk(node):
        if (
            isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(part) is not None
        ):
            part.body = part.body[1:] or [ast.Pass()]
    return ast.unparse(node).splitlines()


def compare(name: Name, before: Release, after: Release) -> str | None:
    """What changed of `name`; None if nothing did, or if it is not in the release before either."""
    old = before.find(name.module, name.path)
    if old is None:
        return None
    new = after.find(name.module, name.path)
    if new is None:
        last = name.path[-1] if len(name.path) == 1 else ""
        now = after.places.get(last, [])
        near = f"; now in {', '.join(now[:3])}" if now else ""
        return f"missing{near}"
    if not name.path or isinstance(old, ast.Module):
        return None
    removed, added = _difference(_signature(old), _signature(new))
    if removed or added:
        return "signature: " + "; ".join([f"without {part}" for part in removed] + [f"with {part}" for part in added])
    removed, added = _difference(_code(old), _code(new))
    return f"body: {len(removed) + len(added)} lines" if removed or added else None


def _difference(old: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """What is only in `old`, and what is only in `new`."""
    lines = list(difflib.ndiff(old, new))
    return [line[2:] for line in lines if line[0] == "-"], [line[2:] for line in lines if line[0] == "+"]
