"""What the documents name exists: files, links, folders and their imports, keys, commands, metrics, messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.metrics import MetricWrapperBase
from support_siblings import queue_of

from orchestrator.cli.look.views import config_keys
from orchestrator.cli.main import app, load
from orchestrator.config.engine_args import _engine_names, _server_names
from orchestrator.config.settings import Config
from orchestrator.fleet.view import Fleet
from orchestrator.frontend.pages import FleetCollector
from orchestrator.process.telemetry.metrics import Labelled, Metrics
from orchestrator.router.router import GIVEN_UP
from orchestrator.types import DesiredRatio, QueueDepth

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
]
FOLDERS = "orchestrator|workers|connectors|tests|docs|benchmarks|configs|requirements|examples|deploy"
PATHS = re.compile(rf"`(?:python )?((?:{FOLDERS})/[\w./-]*)`")
EXAMPLES = [
    *sorted((ROOT / "configs").glob("*.yaml")),
    *sorted(file for file in (ROOT / "deploy").rglob("*") if file.is_file() and file.suffix != ".json"),
]
KEYS = {key for key, _, _ in config_keys(Config)}
MAX_LINE = 130

PAGES = [path.stem for path in DOCUMENTS if path.parent.name == "docs"]

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def code_spans(document: Path) -> list[str]:
    """What stands in backticks, and in code blocks line by line."""
    text = document.read_text()
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        text = text.replace(block, "")
    return re.findall(r"`([^`]+)`", text) + [line for block in blocks for line in block.splitlines()]


@documents
def test_files_that_are_named_exist(document: Path):
    named = {name.partition(":")[0] for name in PATHS.findall(document.read_text())}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@documents
def test_configuration_keys_that_are_named_exist(document: Path):
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    # Free-form sections hold names that are not ours: workers.engine_args.dtype, workers.env.
    # `python -m` names a module.
    key = re.compile(rf"(?<!-m )(?<!-m orchestrator\.)\b(?:{'|'.join(sections)})(?:\.[a-z_]+)+\b")
    named = {found for span in code_spans(document) if "/" not in span for found in key.findall(span)}
    known = KEYS | {key.rpartition(".")[0] for key in KEYS if "." in key}
    files = (".py", ".log", ".url")
    assert sorted(name for name in named if not name.endswith(files) and not _known(name, known)) == []


def _known(name: str, known: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in known for count in range(2, len(parts) + 1))


def command_lines(text: str) -> Iterator[str]:
    """What follows `orchestrator` wherever a line of the text, or a span in backticks, calls it."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for span in re.findall(r"`([^`\n]+)`", joined) + joined.splitlines():
        for part in re.findall(r"^[\s#$]*(?:\S+=\S+ )*(?:\S*bin/)?orchestrator ((?:[a-z]|--).*)$", span):
            yield part.partition(" #")[0]


def unknown_words(line: str) -> list[str]:
    """The command and the options of a command line that do not exist."""
    words = re.findall(r"[^\s\[\],|]+", line)
    if words[0].startswith("--"):
        return [word for word in words if word not in ("--version", "--install-completion", "--help")]
    if words[0] not in typer.main.get_group(app).commands:  # type: ignore[attr-defined]
        return [words[0]]
    command: Any = load(words.pop(0))
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    own = command.context_settings.get("ignore_unknown_options", False)  # passes the others on to a worker
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known and not own]


@pytest.mark.parametrize("file", [*DOCUMENTS, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_that_are_named_exist(file: Path):
    assert [(line, wrong) for line in command_lines(file.read_text()) if (wrong := unknown_words(line))] == []


def test_unknown_commands_in_documents_are_found():
    text = "`orchestrator scal x` or\n  orchestrator queue show ID \\\n  --bogus 1  # --not-this\n`orchestrator top`"
    lines = list(command_lines(text))
    assert [unknown_words(line) for line in lines] == [["scal"], [], ["--bogus"]]


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = {m[1] for span in code_spans(document) if (m := re.match(r"(?:time )?make ([a-z-]+)", span))}
        assert named <= targets, document


def test_configuration_has_every_key_with_its_type_and_default():
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| `([^`]+)` \| [^|]+ \|$", page("configuration"), re.MULTILINE)
    expected = [(key, kind.replace("|", "or"), default) for key, kind, default in config_keys(Config)]
    assert rows == expected


@documents
def test_lines_are_short(document: Path):
    lines = enumerate(document.read_text().splitlines(), 1)
    # A row of a table cannot be broken.
    assert [n for n, line in lines if len(line) > MAX_LINE and not line.startswith("|")] == []


def test_operations_names_every_command():
    text = page("operations")
    commands = typer.main.get_group(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"`orchestrator {name}" not in text and f"`{name}`" not in text] == []


def our_metrics() -> Iterator[tuple[str, str, str]]:
    """Name with labels, type and meaning, as a scrape shows them, without the suffixes of histograms and summaries."""
    ours = (value.metric if isinstance(value, Labelled) else value for value in vars(Metrics()).values())
    for counted in (value for value in ours if isinstance(value, MetricWrapperBase)):
        yield _as_written(counted._name, counted._labelnames), counted._type, counted._documentation
    fleet = Fleet("f")
    fleet.desired = DesiredRatio(1, 1)
    for read in FleetCollector(fleet, queue_of(QueueDepth(0, 0, 0))).collect():
        yield _as_written(read.name, getattr(read, "_labelnames", ())), read.type, read.documentation


def _as_written(name: str, labels: Iterable[str]) -> str:
    return name + (f"{{{','.join(labels)}}}" if labels else "")


def test_the_page_of_metrics_has_each_with_its_labels_type_and_meaning():
    rows = re.findall(r"^\| `(pd_[^`]+)` \| (\w+) \| ([^|]+) \| [^|]+ \|$", page("metrics"), re.MULTILINE)
    shown = [(name.replace("_total", "") if kind == "counter" else name, kind, text) for name, kind, text in rows]
    assert shown == list(our_metrics())
    assert all(("_total" in name) == (kind == "counter") for name, kind, _ in rows)


def names_of_metrics() -> set[str]:
    return {name.partition("{")[0] + ("_total" if kind == "counter" else "") for name, kind, _ in our_metrics()}


@documents
def test_metrics_that_are_named_exist(document: Path):
    named = set(re.findall(r"\bpd_[a-z_]+[a-z]\b", " ".join(code_spans(document)))) - {"pd_orchestrator"}
    assert sorted(named - names_of_metrics()) == []


def test_metrics_that_tests_read_exist():
    """One that there is not is 0, whatever happens."""
    texts = [file.read_text() for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'\.metric\(\s*"(pd_\w+)"', text)}
    read |= {f"{name}_total" for text in texts for name in re.findall(r'\bcounted\(\s*"(pd_\w+)"', text)}
    assert len(read) > 10
    assert sorted({re.sub(r"_(count|sum|bucket)$", "", name) for name in read} - names_of_metrics()) == []


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", line.lower())).strip("-") for line in lines}


@documents
def test_links_lead_somewhere(document: Path):
    """Also those of the documents at the root, which the site does not have."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        led_to = document.parent / path if path else document
        assert led_to.exists() and (not anchor or anchor in slugs(led_to.read_text())), target


@cache
def said() -> str:
    """Every text in our code, a line each, with \x00 for what is filled in."""
    texts = set()
    for file in (
        file for folder in ("orchestrator", "workers", "connectors") for file in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.add("".join(str(v.value) if isinstance(v, ast.Constant) else "\x00" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(re.sub(r"%[\d.]*[a-z]", "\x00", node.value))
    return "\n".join(texts)


def test_messages_that_troubleshooting_explains_are_said():
    chapters = re.split(r"^## ", page("troubleshooting"), flags=re.MULTILINE)
    tables = [text for text in chapters if "| message | means" in text]
    messages = [row for text in tables for row in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)]
    assert len(messages) > 30
    words = [".*".join(map(re.escape, message.split(" … "))) for message in messages]
    assert [message for message, word in zip(messages, words, strict=True) if not re.search(word, said())] == []


def test_troubleshooting_has_every_reason_of_another_attempt():
    code = "".join(file.read_text() for file in (ROOT / "orchestrator" / "router").glob("*.py"))
    calls = r"(?:\.retry\(active, |\.give_up\(active, |leave_queue\(|_retry_decoding\(worker_id, )"
    calls += r'"(\w+)"(?:.* else "(\w+)")?'
    whys = {why for found in re.findall(calls, code) for why in found if why} | {*GIVEN_UP.values()}
    whys |= {f"{role}_worker_{how}" for how in re.findall(r'_leave\("(\w+)"', code) for role in ("prefill", "decode")}
    assert len(whys) > 15
    chapter = page("troubleshooting").partition("## Why a request was tried again")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", chapter, re.MULTILINE)
    assert sorted(why for row in rows for why in re.findall(r"`(\w+)`", row)) == sorted(whys)


def test_arguments_of_vllm_that_are_named_exist():
    chapter = page("coming-from").partition("## `vllm serve`")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`--[^|]+) \|", chapter, re.MULTILINE)
    commands = re.findall(r"vllm\.entrypoints\.openai\.api_server ((?:.*\\\n)*.*)", "".join(map(page, PAGES)))
    named = {name.replace("-", "_") for text in cells + commands for name in re.findall(r"(?<!\w)--([a-z-]+)", text)}
    assert len(cells) > 10 and commands and named - _engine_names() - _server_names() == set()


def test_tests_that_are_named_exist():
    """A test that has another name by now is found by nobody."""
    chapters = re.split(r"^## ", page("kv-transfer"), flags=re.MULTILINE)
    tables = [text for text in chapters if "| test |" in text or "| deterministic |" in text]
    cells = [cell for text in tables for row in text.splitlines() for cell in row.split(" | ")[1:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+…|\w+_\w+_\w+)`", cell)}
    code = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    tests = "\n".join(re.findall(r"def test_(\w+)", code))
    assert len(named) > 50
    wanted = {name: re.escape(name).replace("…", r"\w*") for name in named}
    assert [name for name, pattern in wanted.items() if not re.search(rf"^{pattern}$", tests, re.MULTILINE)] == []


def test_every_example_is_told_of_and_run_by_a_test():
    told = (ROOT / "examples" / "README.md").read_text()
    tests = "".join(
        (ROOT / "tests" / name).read_text() for name in ("examples/test_examples.py", "e2e/test_telemetry.py")
    )
    programs = [file.name for file in (ROOT / "examples").glob("*.py")]
    assert [name for name in programs if f"`python examples/{name}`" not in told or f'"{name}"' not in tests] == []
