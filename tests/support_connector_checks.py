"""Finds in vLLM's source every place that asks for a KV connector by its name or class.

Such a check passes ours over. `connector_checks.toml` of the test says what each checks and what answers it here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
_REGISTERED = re.compile(r'register_connector\(\s*"(\w+)"')
_NAME_FIELD = "kv_connector"  # of `KVTransferConfig`


def connector_checks(folder: Path) -> dict[str, list[str]]:
    """By function ("vllm.config.vllm:VllmConfig.validate_block_size"), the connectors that it names, in order, once for
    each time; "kv_connector" where it compares the configured name. `folder` has the package."""
    names = frozenset(_REGISTERED.findall((folder / _FACTORY).read_text()))
    found: dict[str, list[str]] = {}
    for file in sorted((folder / "vllm").rglob("*.py")):
        text = file.read_text()
        if _NAME_FIELD in text or any(name in text for name in names):
            module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            for function, name in _named(ast.parse(text), "", names):
                found.setdefault(f"{module}:{function}", []).append(name)
    return found


def _named(node: ast.AST, function: str, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(function or class, what it names) for all below `node`, which is within `function`."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            function = f"{function}.{name}".lstrip(".")
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Call(func=ast.Attribute(attr="register_connector")):
            return
        case ast.Constant(value=str(name)) if name in names:
            yield function, name
        case ast.Compare() if _compares_name(node):
            yield function, _NAME_FIELD
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            for inner in ast.walk(kinds):
                if isinstance(inner, ast.Name) and inner.id in names:
                    yield function, inner.id
    for child in ast.iter_child_nodes(node):
        yield from _named(child, function, names)


def _compares_name(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    is_named = any(isinstance(side, ast.Attribute) and side.attr == _NAME_FIELD for side in sides)
    return is_named and not any(isinstance(side, ast.Constant) and side.value is None for side in sides)
