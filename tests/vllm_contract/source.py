"""What Python packages define, read from their source without importing them: names, classes with their bases, members.

So two versions of a package can be compared, of which one cannot run here.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Union

import msgspec

Definition = Union[ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign, ast.AnnAssign]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DIGITS = 12
# A function or class; an attribute that is set; a variable or field. By text: to parse all files takes half a minute.
_DEFINES = re.compile(r"(?:def|class)\s+(\w+)|\.(\w+)\s*(?::[^=\n]+)?=[^=]|^\s*(\w+)\s*[:=]", re.MULTILINE)


class Found(msgspec.Struct, frozen=True):
    """Where a name is defined. `node` is None for a module."""

    module: str
    node: Definition | None


class Source:
    """The modules below these folders, in which packages lie (`site-packages`, an unpacked wheel, a checkout)."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._names: dict[str, dict[str, Definition | tuple[str, str]]] = {}
        self._members: dict[ast.ClassDef, dict[str, Definition]] = {}

    def has(self, package: str) -> bool:
        return any((folder / package).is_dir() for folder in self._folders)

    def find(self, module: str, name: str) -> Found | None:
        """The definition of `module.name`, through re-exports; None if there is none."""
        for _ in range(8):  # re-exports of re-exports
            if self._file(f"{module}.{name}") is not None:
                return Found(f"{module}.{name}", None)
            found = self.names_of(module).get(name)
            if not isinstance(found, tuple):
                return Found(module, found) if found is not None else None
            module, name = found
            if not name:
                return Found(module, None)
        return None

    def member(self, owner: Found, name: str) -> Found | None:
        """A class's method, class variable or instance variable, its own or inherited; or a name in a module."""
        if owner.node is None:
            return self.find(owner.module, name)
        return next(iter(self.members(owner).get(name, [])), None)

    def members(self, cls: Found) -> dict[str, list[Found]]:
        """All members of a class: of each its definition, then those above it that it hides, and may call."""
        found: dict[str, list[Found]] = {}
        for one in self.lineage(cls):
            assert isinstance(one.node, ast.ClassDef)
            for name, node in self._own_members(one.node).items():
                found.setdefault(name, []).append(Found(one.module, node))
        return found

    def _own_members(self, cls: ast.ClassDef) -> dict[str, Definition]:
        if cls not in self._members:
            self._members[cls] = _members(cls)
        return self._members[cls]

    def lineage(self, cls: Found) -> Iterator[Found]:
        """The class and its bases, each once, nearest first; without those of other packages."""
        waiting, seen = [cls], set[int]()
        while waiting:
            one = waiting.pop(0)
            if not isinstance(one.node, ast.ClassDef) or id(one.node) in seen:
                continue
            seen.add(id(one.node))
            yield one
            for base in one.node.bases:
                name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
                head, _, rest = name.partition(".")
                found = self.find(one.module, head)
                if found is not None and rest:
                    found = self.member(found, rest)
                if found is not None:
                    waiting.append(found)

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Every name that vLLM's modules seem to define, or to set on an object, wherever."""
        files = (file for folder in self._folders for file in (folder / "vllm").rglob("*.py"))
        found = (_DEFINES.findall(file.read_text("utf-8")) for file in files)
        return frozenset(name for defined in found for groups in defined for name in groups)

    def _file(self, module: str) -> Path | None:
        paths = [folder.joinpath(*module.split(".")) for folder in self._folders]
        files = (file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py"))
        return next((file for file in files if file.is_file()), None)

    def names_of(self, module: str) -> dict[str, Definition | tuple[str, str]]:
        """What a module's names stand for: a definition, or (module, name) where it is imported; the name is empty for
        a module."""
        if module not in self._names:
            file = self._file(module)
            tree = ast.parse(file.read_text("utf-8")) if file is not None else ast.Module([], [])
            is_package = file is not None and file.name == "__init__.py"
            self._names[module] = dict(_top_level(tree.body, module, is_package))
        return self._names[module]


def _top_level(
    body: list[ast.stmt], module: str, is_package: bool
) -> Iterator[tuple[str, Definition | tuple[str, str]]]:
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Assign(targets=targets):
                yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.ImportFrom(module=source, names=names, level=level):
                if level:
                    parts = module.split(".")
                    up = level - 1 if is_package else level
                    source = ".".join([*parts[: len(parts) - up], *([source] if source else [])])
                yield from ((alias.asname or alias.name, (source or "", alias.name)) for alias in names)
            case ast.Import(names=names):
                yield from ((alias.asname, (alias.name, "")) for alias in names if alias.asname)
            case ast.If(body=then, orelse=other):
                yield from _top_level([*other, *then], module, is_package)
            case ast.Try(body=tried, handlers=handlers):
                caught = [statement for handler in handlers for statement in handler.body]
                yield from _top_level([*caught, *tried], module, is_package)


def _members(cls: ast.ClassDef) -> dict[str, Definition]:
    members: dict[str, Definition] = {}
    for method in (node for node in cls.body if isinstance(node, _FUNCTIONS)):
        for node in ast.walk(method):  # instance variables
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(node, ast.Assign | ast.AnnAssign) and _is_own(target):
                    assert isinstance(target, ast.Attribute)
                    members.setdefault(target.attr, node)
    members |= {name: node for name, node in _top_level(cls.body, "", False) if not isinstance(node, tuple)}
    return members


def _is_own(target: ast.expr | None) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


# ---- shapes --------------------------------------------------------------------------------------------------------


def signature(node: Definition | None) -> str:
    """How it is called or read, without annotations: arguments of a function, of a class's constructor or its fields.
    Empty for a module and for a variable."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
            decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
            return f"{decorators}{kind}({ast.unparse(_bare(node.args))})"
        case ast.ClassDef():
            made = [each for each in node.body if isinstance(each, _FUNCTIONS) and each.name == "__init__"]
            if made:
                return signature(made[0])
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return ", ".join(f"{ast.unparse(f.target)}{f'={ast.unparse(f.value)}' if f.value else ''}" for f in fields)
    return ""


def body_hash(definitions: list[Found]) -> str:
    """A hash of what these do: their code without comments, docstrings and annotations."""
    texts = [_bare_code(found.node) for found in definitions if found.node is not None]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:_DIGITS] if texts else ""


def _bare_code(node: Definition) -> str:
    bare = copy.deepcopy(node)
    for inner in ast.walk(bare):
        if isinstance(inner, _FUNCTIONS):
            inner.args, inner.returns = _bare(inner.args), None
        if isinstance(inner, (*_FUNCTIONS, ast.ClassDef)) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(bare)


def _bare(arguments: ast.arguments) -> ast.arguments:
    bare = copy.deepcopy(arguments)
    for each in ast.walk(bare):
        if isinstance(each, ast.arg):
            each.annotation = None
    return bare
