"""Where workers are: their labels, the links between them, and over which of these KV may pass.

The class of a link is the names of the labels that have the same value at both of its ends, in order. A worker's host
is a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Link = tuple[str, ...]  # its class: ("host", "rack"), ("rack",), () ...
HOST = "host"
_STRICT = "strict:"


def labels_of(host: str, given: Iterable[str]) -> dict[str, str]:
    """A worker's labels by name, in its order, of `NAME=VALUE`; one named host stands for its address."""
    return dict(sorted(({HOST: host} | dict(label.split("=", 1) for label in given)).items()))


def link_of(one: Mapping[str, str], other: Mapping[str, str]) -> Link:
    """The class of the link between two workers with these labels, which are in the order of names."""
    return tuple([name for name, value in one.items() if other.get(name) == value])


def strict_label(pairing: str) -> str:
    """The label whose value must be the same at both ends of a link; empty where any link may be used. `pairing`:
    routing.pairing."""
    return pairing.removeprefix(_STRICT) if pairing.startswith(_STRICT) else ""
