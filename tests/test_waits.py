"""No test relies on how fast this machine is: what has to happen may take a minute, whoever else uses the cores."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_wait import DEADLINE_S

TESTS = Path(__file__).parent
# Calls of these end a wait: the position of their time-out, and its name.
BOUNDED = {"asyncio.timeout": (0, "delay"), "asyncio.wait_for": (1, "timeout"), "until": (2, "timeout_s")}
PROCESSES = {"run", "wait", "communicate"}  # of subprocess, by keyword only


def number(node: ast.expr | None, constants: dict[str, float]) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def may_time_out(node: ast.AST) -> bool:
    """In its lines a time-out is what the test expects."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return any("TimeoutError" in ast.unparse(item.context_expr) for item in node.items)
    return isinstance(node, ast.Try) and any("Timeout" in ast.unparse(each.type) for each in node.handlers if each.type)


def hurried(text: str) -> Iterator[tuple[int, str]]:
    """Line and call of each wait for something to happen that gives it less than DEADLINE_S."""
    tree = ast.parse(text)
    constants = {
        target.id: value
        for node in tree.body
        if isinstance(node, ast.Assign) and (value := number(node.value, {})) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    expected = [range(node.lineno, (node.end_lineno or 0) + 1) for node in ast.walk(tree) if may_time_out(node)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in BOUNDED:
            position, name = BOUNDED[called]
            given = node.args[position] if len(node.args) > position else keywords.get(name)
        elif called.rpartition(".")[2] in PROCESSES and called != "asyncio.wait":
            given = keywords.get("timeout")
        else:
            continue
        seconds = number(given, constants)
        if seconds is not None and seconds < DEADLINE_S and not any(node.lineno in lines for lines in expected):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_what_has_to_happen_may_take_a_minute(path: Path):
    assert list(hurried(path.read_text())) == [], "use DEADLINE_S of support_wait"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("async with asyncio.timeout(5): await it", True),
        ("SOON_S = 5\nasync def f():\n    await asyncio.wait_for(it, SOON_S)", True),
        ("until(it, timeout_s=1)", True),
        ("subprocess.run(it, timeout=30)", True),
        ("async with asyncio.timeout(DEADLINE_S): await it", False),
        ("with pytest.raises(TimeoutError):\n    asyncio.wait_for(it, 0.2)", False),
        ("done, _ = await asyncio.wait([it], timeout=0.05)", False),
    ],
)
def test_hurried_waits_are_found(text: str, found: bool):
    assert bool(list(hurried(text))) is found
