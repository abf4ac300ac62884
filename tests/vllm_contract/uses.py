"""Finds in our source every name of vLLM and NIXL that it uses, and compares what two versions have under it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_contract.source import Found, Source, body_hash, signature

PACKAGES = ("vllm", "nixl")
_FOLDERS = ("orchestrator", "workers", "connectors")


class Use(msgspec.Struct, frozen=True, order=True):
    """A name of another package, and how we use it.

    imported: by name; optional: imported where it is there; read: an attribute of something imported, or of an
    argument of an imported type; replaced: one that we assign to; overridden: of a base class, which our subclass
    has too; inherited: which our subclass has not, so theirs runs; named: an attribute of an object whose class the
    source does not tell: only its existence is known.
    """

    symbol: str  # "vllm.v1.engine.core:EngineCore.abort_requests"; "A|B" where we import A, and B if there is no A
    how: str


class Shape(msgspec.Struct, frozen=True):
    """What a symbol is in one version. Empty strings: nothing that can be called, or not looked at."""

    signature: str = ""
    body: str = ""  # of what we override, replace or inherit: there what it does counts, not only how it is called
    missing: bool = False


def uses(project: Path, source: Source) -> dict[Use, list[str]]:
    """All uses, each with the places ("workers/x.py:12") that have it. `source` has our modules and theirs."""
    found: dict[Use, list[str]] = {}
    for folder in _FOLDERS:
        for file in sorted((project / folder).rglob("*.py")):
            place = file.relative_to(project)
            module = ".".join(place.with_suffix("").parts)
            for use, line in _ModuleUses(module, ast.parse(file.read_text("utf-8")), source).find():
                places = found.setdefault(use, [])
                if (at := f"{place}:{line}") not in places:
                    places.append(at)
    return found


class _ModuleUses:
    """The uses of one of our modules."""

    def __init__(self, module: str, tree: ast.Module, source: Source) -> None:
        self._module, self._tree, self._source = module, tree, source
        self._theirs: dict[str, tuple[str, Found]] = {}  # a name here: its symbol, and where it is defined
        self._known = set[int]()  # attribute nodes whose owner is known
        tried = [inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in node.body]
        self._imports, self._tried = _imported_names(tree.body), _imported_names(tried)
        self._alternatives: dict[str, list[str]] = {}  # where a name is imported from

    def find(self) -> Iterator[tuple[Use, int]]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and _is_theirs(node.module or ""):
                yield from self._import(node)
        for node in ast.walk(self._tree):
            match node:
                case ast.ClassDef():
                    yield from self._subclass(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from self._arguments(node)
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._theirs:
                    yield from self._read(node, *self._theirs[name], attribute)
        if not self._theirs:
            return
        own = _own_names(self._tree)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and id(node) not in self._known and node.attr not in own:
                if node.attr in self._source.attributes:
                    yield Use(f"vllm:*.{node.attr}", "named"), node.lineno

    def _import(self, node: ast.ImportFrom) -> Iterator[tuple[Use, int]]:
        for alias in node.names:
            name, symbol = alias.asname or alias.name, f"{node.module}:{alias.name}"
            if (found := self._source.find(node.module or "", alias.name)) is not None:
                self._theirs[name] = symbol, found
            others = self._alternatives.setdefault(name, [])
            others.append(symbol)
            if len(others) == self._imports.count(name):
                optional = len(others) == 1 and name in self._tried
                yield Use("|".join(others), "optional" if optional else "imported"), node.lineno

    def _read(self, node: ast.Attribute, symbol: str, owner: Found, name: str) -> Iterator[tuple[Use, int]]:
        self._known.add(id(node))
        if self._source.member(owner, name) is not None:  # else it is our addition
            of = f"{owner.module}:{name}" if owner.node is None else f"{symbol}.{name}"
            yield Use(of, "replaced" if isinstance(node.ctx, ast.Store) else "read"), node.lineno

    def _arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[Use, int]]:
        """Attributes of arguments that are declared to be of an imported type."""
        declared = {
            argument.arg: self._theirs[argument.annotation.id]
            for argument in [*function.args.args, *function.args.kwonlyargs]
            if isinstance(argument.annotation, ast.Name) and argument.annotation.id in self._theirs
        }
        for node in ast.walk(function):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in declared:
                    yield from self._read(node, *declared[name], attribute)

    def _subclass(self, cls: ast.ClassDef) -> Iterator[tuple[Use, int]]:
        ours, theirs = self._ancestry(self._module, cls)
        for symbol, base in theirs:
            members = self._source.members(base)
            for method in cls.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in members:
                    yield Use(f"{symbol}.{method.name}", "overridden"), method.lineno
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and node.attr in members and _is_self_or_super(node.value):
                    self._known.add(id(node))
            for name in members.keys() - ours:
                yield Use(f"{symbol}.{name}", "inherited"), cls.lineno

    def _ancestry(self, module: str, cls: ast.ClassDef) -> tuple[set[str], list[tuple[str, Found]]]:
        """The methods that the class and our other classes above it define, and the first classes above them that are
        not ours."""
        ours = {node.name for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        theirs: list[tuple[str, Found]] = []
        for base in cls.bases:
            head, _, rest = ast.unparse(base).partition(".")
            known = self._source.names_of(module).get(head)
            if isinstance(known, ast.ClassDef):
                above = self._ancestry(module, known)
            elif isinstance(known, tuple) and (found := self._source.find(*known)) is not None:
                name = f"{known[0]}:{known[1]}"
                if rest and (inner := self._source.member(found, rest)) is not None:
                    name, found = f"{found.module}:{rest}", inner
                if not isinstance(found.node, ast.ClassDef):
                    continue
                theirs_now = [(name, found)] if _is_theirs(found.module) else []
                above = (set(), theirs_now) if theirs_now else self._ancestry(found.module, found.node)
            else:
                continue
            ours |= above[0]
            theirs += above[1]
        return ours, theirs


def shapes(source: Source, used: dict[Use, list[str]]) -> dict[Use, Shape]:
    """What each use finds in this version."""
    return {use: _shape(source, use) for use in used if source.has(use.symbol.partition(".")[0].partition(":")[0])}


def _shape(source: Source, use: Use) -> Shape:
    if use.how == "named":
        return Shape(missing=use.symbol.partition("*.")[2] not in source.attributes)
    for symbol in use.symbol.split("|"):
        module, _, path = symbol.partition(":")
        *owners, last = path.split(".")
        owner: Found | None = Found(module, None)
        for name in owners:
            owner = source.member(owner, name) if owner is not None else None
        found = source.member(owner, last) if owner is not None else None
        if owner is not None and found is not None:
            theirs_runs = use.how in ("overridden", "replaced", "inherited")
            bodies = source.members(owner)[last] if owners else [found]
            return Shape(signature(found.node), body_hash(bodies) if theirs_runs else "")
    return Shape(missing=True)


def differences(before: dict[Use, Shape], after: dict[Use, Shape]) -> dict[Use, str]:
    """What changed from one version to another, in a few words, by use."""
    found = {}
    for use, new in after.items():
        old = before[use]
        if use.how == "optional" and old.missing:
            continue
        if new.missing and not old.missing:
            found[use] = "is gone"
        elif new.signature != old.signature:
            found[use] = f"takes {new.signature or 'nothing'}, took {old.signature or 'nothing'}"
        elif new.body != old.body:
            found[use] = "does something else"
    return found


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _imported_names(statements: list[ast.stmt]) -> list[str]:
    """What these statements call the names that they import from there."""
    nodes = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.ImportFrom))
    return [alias.asname or alias.name for node in nodes if _is_theirs(node.module or "") for alias in node.names]


def _is_self_or_super(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _own_names(tree: ast.Module) -> set[str]:
    """Names that this file defines or sets."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
