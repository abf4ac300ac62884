"""YAML as configuration files have it. The parser is imported by who reads some: most commands read none."""

from __future__ import annotations

import functools
import re
from typing import Any


class NotYaml(ValueError):
    """One line. `line` counts from 1; 0 where it is not known."""

    def __init__(self, why: str, line: int) -> None:
        super().__init__(why)
        self.line = line


def load_yaml(text: str, typed: bool = False) -> Any:
    """`typed`: on a command line, where each character counts but in a list, a section or quotes. Raises NotYaml."""
    import yaml

    try:
        loader = _loader()(text := text.strip() if typed else text)
        if typed and not text.startswith(("[", "{", "'", '"')):
            node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
        else:
            node = loader.get_single_node()
        if _values(node, {}) > _MOST_VALUES:
            raise NotYaml(f"it has more than {_MOST_VALUES} values, with what its aliases (*) repeat", 0)
        return loader.construct_document(node) if node is not None else None
    # A number of five thousand digits is a ValueError, and a thousand open brackets are a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        why = " ".join(str(getattr(error, "problem", error)).split())
        raise NotYaml(why, where.line + 1 if where else 0) from None


def line_of(text: str, key: str) -> int:
    """The line, from 1, of `a.b.c` in YAML that `load_yaml` takes, or of the part of it that is there, or else 0."""
    import yaml

    try:
        node, line = _loader()(text).get_single_node(), 0
    except (yaml.YAMLError, ValueError, RecursionError):
        return 0
    rest = f"{key}."
    while isinstance(node, yaml.MappingNode):
        # A name may have dots, as those of models do.
        found = next(((name, value) for name, value in node.value if rest.startswith(f"{name.value}.")), None)
        if found is None:
            break
        line, node, rest = found[0].start_mark.line + 1, found[1], rest[len(found[0].value) + 1 :]
    return line


_MOST_VALUES = 100_000


def _values(node: Any, seen: dict[int, float]) -> float:
    """How many values a node has once its aliases are written out, which a few lines of them can make billions.

    `seen` has the counts so far, by node; it is infinite for a node that contains itself.
    """
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in seen:
        seen[id(node)] = float("inf")
        parts = (part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
        seen[id(node)] = 1 + sum(_values(part, seen) for part in parts)
    return seen[id(node)]


@functools.cache
def _loader() -> Any:
    """A loader that knows only `_SCALARS`, and refuses a key that is there twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Refuses a key that is there twice: YAML forbids it, and the last would silently replace the first."""
            names = set()
            for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(name, yaml.ScalarNode):
                    if (name.tag, name.value) in names and name.tag != "tag:yaml.org,2002:merge":
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{name.value!r} is there twice", name.start_mark
                        )
                    names.add((name.tag, name.value))
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {}
    for kind, pattern, first in _SCALARS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"^(?:{pattern})$"), first)
    return Loader


# What is no text: the pattern, and what it begins with. As in JSON, with 0x10, 1_000, .5 and .inf. In YAML 1.1, the
# parser's, the `off` of `mode: off` is a boolean, 010 is 8, 1:30 is 90, and 1e-6 is text.
_DIGITS = r"[0-9][0-9_]*"
_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("null", "|~|null|Null|NULL", ["", *"~nN"]),
    ("bool", "(?i:true|false)", [*"tTfF"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", [*"-+0123456789"]),
    ("float", rf"[-+]?(?:{_DIGITS}\.[0-9_]*|\.{_DIGITS}|{_DIGITS}(?=[eE]))(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", [*"-+."]),
    ("merge", "<<", ["<"]),
)
