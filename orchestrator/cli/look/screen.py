"""The screen of `orchestrator top`: a frontend's event stream, live, and keys that change roles and drain."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Grid, Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, Sparkline, Static

from orchestrator.cli.look.frontend import UNANSWERED, fetch, fleet_stream
from orchestrator.cli.look.views import (
    STATE_STYLE,
    at_rest,
    balance_lines,
    blocks_bar,
    in_time_line,
    model_name,
    set_by,
)

_AGAIN_S = 1.0  # between two attempts to reach a frontend
_SPARK_POINTS = 60
_SLOWEST = 4
# Sparklines: the point's field, its label, its unit.
_SPARKS = (
    ("queue_requests", "queue", ""),
    ("ttft_p99", "TTFT P99", " ms"),
    ("output_tokens", "tokens/s", ""),
    ("itl_p99", "ITL P99", " ms"),
)
_COLUMNS = ("worker", "role", "state", "KV blocks", "run", "wait", "step", "host")
# Sort orders of the worker table. Load is sorted with the highest first.
_SORTS: dict[str, Any] = {
    "role": lambda worker: (worker["role"], worker["id"]),
    "KV": lambda worker: (-_used(worker), worker["id"]),
    "run": lambda worker: (-(worker["running"] or 0), worker["id"]),
    "wait": lambda worker: (-(worker["waiting"] or 0), worker["id"]),
    "step": lambda worker: (-(worker["step_ms"] or 0.0), worker["id"]),
}


class Confirm(ModalScreen[bool]):
    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "answer(True)", "yes"),
        ("n", "answer(False)", "no"),
        ("escape", "answer(False)", "no"),
    ]
    CSS = "Confirm { align: center middle; } Confirm > Label { padding: 1 3; border: round $warning; }"

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Label(f"{self._question}  (y/n)", markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Top(App[None]):
    """Listens to a frontend's `/fleet/stream`; orders go to its `/operator/` paths."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("s", "sort", "sort"),
        ("slash", "filter", "filter"),
        ("r", "role", "role"),
        ("d", "drain", "drain"),
        ("q", "quit", "quit"),
    ]
    CSS = """
    #sparks { grid-size: 2; grid-columns: 1fr 1fr; grid-rows: 1; height: 2; grid-gutter: 0 2; }
    #sparks Static { width: 21; }
    .spark { layout: horizontal; height: 1; }
    Sparkline { width: 1fr; height: 1; }
    DataTable { height: 1fr; }
    #filter { display: none; height: 1; border: none; }
    #filter.on { display: block; }
    #slowest { height: auto; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, url: str, key: str | None = None, model: str = "") -> None:
        """`key`: the operator's, where one is needed. `model`: its name in the fleet's file."""
        super().__init__()
        self._url, self._key, self._model = url, key, model
        self._sample: dict[str, Any] = {}
        self._points: list[dict[str, Any]] = []
        self._sort = "role"
        self._filter = ""
        # Kept, since a query searches the screen in front, which may be a dialog.
        self._head = Static("connecting ...", id="head")
        self._values = {field: Static() for field, _, _ in _SPARKS}
        self._sparks = {field: Sparkline([]) for field, _, _ in _SPARKS}
        self._in_time = Static(id="in-time")
        self._table: DataTable[Text] = DataTable(cursor_type="row")
        self._slowest = Static(id="slowest")

    def compose(self) -> ComposeResult:
        yield self._head
        with Grid(id="sparks"):
            for field, _, _ in _SPARKS:
                with Vertical(classes="spark"):
                    yield self._values[field]
                    yield self._sparks[field]
        yield self._in_time
        yield self._table
        yield self._slowest
        yield Input(placeholder="show workers whose line contains ...", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        for name in _COLUMNS:
            self._table.add_column(name, key=name)
        self._table.focus()
        self.listen()

    @work(exclusive=True)
    async def listen(self) -> None:
        while True:
            why = "the frontend ended the stream"
            try:
                async for event, told in fleet_stream(self._url, self._key):
                    self._hear(event, told)
            except (*UNANSWERED, KeyError) as error:
                why = str(error) or type(error).__name__
            self._head.update(Text(f"{self._url}: {why}; trying again", style="red"))
            await asyncio.sleep(_AGAIN_S)

    def _hear(self, event: str, told: dict[str, Any]) -> None:
        if event == "history":
            columns = {name: column[-_SPARK_POINTS:] for name, column in told.items()}
            rows = zip(*columns.values(), strict=True)
            self._points = [dict(zip(columns, row, strict=True)) for row in rows]
        elif event == "sample":
            self._take(told)

    def _take(self, sample: dict[str, Any]) -> None:
        self._sample = sample
        point = sample["point"]
        if point and (not self._points or point["at"] != self._points[-1]["at"]):
            self._points = [*self._points, point][-_SPARK_POINTS:]
        self._show()

    def _show(self) -> None:
        if not self._sample:
            return
        self._head.update(self._summary())
        for field, label, unit in _SPARKS:
            values = [point[field] for point in self._points]
            last = values[-1] if values else None
            said = "-" if last is None else f"{last:,.0f}{unit}"
            self._values[field].update(Text.assemble((f"{label:<9}", "bold"), f"{said:>11} "))
            self._sparks[field].data = [value or 0.0 for value in values]
        shares = self._points[-1]["in_time"] if self._points else {}
        lines = [*([in_time_line(shares)] if shares else []), *balance_lines(self._sample["workers"])]
        self._in_time.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        self._in_time.display = bool(lines)
        self._show_workers()
        slowest = self._sample["slowest"][:_SLOWEST]
        self._slowest.update(Text("\n".join(map(_slow_line, slowest)), no_wrap=True))

    def _summary(self) -> Text:
        sample, queue, desired = self._sample, self._sample["queue"], self._sample["desired"]
        said = Text(model_name(sample["model"], self._model), style="bold", no_wrap=True, overflow="ellipsis")
        said.append(f"  {len(sample['workers'])} workers", "default")
        queued = (f"  {queue['tokens']} tokens queued", "default") if queue else ("  Redis cannot be used", "red")
        said.append(*queued)
        if silent := sample["silent_frontends"]:
            said.append(f"  without {', '.join(silent)}, which did not answer", "red")
        if resting := at_rest(sample):
            said.append(f"  {resting.partition(':')[0]}", "yellow")
        said.append(f"  by {self._sort}" + (f"  /{self._filter}" if self._filter else ""), "dim")
        if desired:  # last: it may be longer than the terminal
            said.append(f"  desired {desired['prefill']}P{desired['decode']}D {set_by(desired)}", "default")
        return said

    def _show_workers(self) -> None:
        table = self._table
        rows = [_row(worker) for worker in sorted(self._sample["workers"], key=_SORTS[self._sort])]
        rows = [row for row in rows if self._filter.lower() in " ".join(map(str, row)).lower()]
        if [str(row[0]) for row in rows] == [str(key.value) for key in table.rows]:
            for row in rows:
                for name, cell in zip(_COLUMNS, row, strict=True):
                    table.update_cell(str(row[0]), name, cell, update_width=True)
            return
        chosen = self._chosen()
        table.clear()
        for row in rows:
            table.add_row(*row, key=str(row[0]))
        if chosen and (at := next((i for i, row in enumerate(rows) if str(row[0]) == chosen["id"]), None)) is not None:
            table.move_cursor(row=at)

    # ---- keys ----------------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        names = list(_SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._show()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("on")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value
        self._show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.remove_class("on")
        self._table.focus()

    def action_role(self) -> None:
        if worker := self._chosen():
            other = "decode" if worker["role"] == "prefill" else "prefill"
            body = {"worker": worker["unit"], "role": other}
            self.order("role", body, f"{worker['unit']} becomes a {other} worker?")

    def action_drain(self) -> None:
        if worker := self._chosen():
            self.order("drain", {"worker": worker["unit"]}, f"{worker['unit']} finishes what it has, and ends?")

    @work
    async def order(self, path: str, body: dict[str, Any], question: str) -> None:
        if not await self.push_screen_wait(Confirm(question)):
            return
        try:
            status, answer = await asyncio.to_thread(fetch, self._url, f"/operator/{path}", self._key, body=body)
            refused = msgspec.json.decode(answer).get("error") if status != HTTPStatus.OK else None
            if isinstance(refused, dict):  # not an order's refusal, but that of its key
                refused = refused.get("message")
        except UNANSWERED as error:
            refused = str(error) or type(error).__name__
        said = str(refused) if refused else "ordered"
        self.notify(said, severity="error" if refused else "information", markup=False)

    def _chosen(self) -> dict[str, Any] | None:
        """The worker under the cursor."""
        table = self._table
        if not table.row_count or not 0 <= table.cursor_row < table.row_count:
            return None
        worker_id = str(table.get_row_at(table.cursor_row)[0])
        return next((worker for worker in self._sample["workers"] if worker["id"] == worker_id), None)


def _used(worker: dict[str, Any]) -> float:
    free, total = worker["blocks_free"], worker["blocks_total"]
    return 1 - free / total if total and free is not None else 0.0


def _row(worker: dict[str, Any]) -> list[Text]:
    known = worker["blocks_free"] is not None
    return [
        Text(worker["id"], style="bold"),
        Text(worker["role"], style="blue" if worker["role"] == "prefill" else "green"),
        Text(worker["state"], style=STATE_STYLE.get(worker["state"], "")),
        Text(f"{blocks_bar(_used(worker))} {_used(worker):4.0%}" if known else "-"),
        Text(str(worker["running"]) if known else "-", justify="right"),
        Text(str(worker["waiting"]) if known else "-", justify="right"),
        Text(f"{worker['step_ms']:.1f} ms" if known else "-", justify="right"),
        Text(worker["host"]),
    ]


def _slow_line(request: dict[str, Any]) -> str:
    took_ms = {stage["name"]: stage["end_ms"] - stage["begin_ms"] for stage in request["stages"]}
    stages = ", ".join(f"{name} {ms:.0f}" for name, ms in took_ms.items() if ms >= 1)
    return f"{request['stages'][-1]['end_ms']:>7.0f} ms {request['id'][:8]}  {stages} ms"
