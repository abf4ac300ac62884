"""Tables as Markdown, which benchmarks print and save."""

from collections.abc import Iterable


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A line for each row, below those of the head."""
    titles = list(head)
    lines: list[Iterable[object]] = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
