"""Rich tables of a fleet, a queue and the configuration keys, from plain data. No I/O."""

from __future__ import annotations

import datetime
import enum
import types
import typing
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.types import IDLE, WAKE

STATE_STYLE = {"ready": "green", "draining": "yellow", "unreachable": "red"}
_BAR_CELLS = 6


def plain_table(columns: Sequence[str], rows: Iterable[Iterable[str | Text]], right: Container[str] = ()) -> Table:
    """A plain table, whose cells wrap where the terminal is narrow. Columns of numbers are `right`."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for name in columns:
        made.add_column(name, overflow="fold", justify="right" if name in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


def model_name(served: str, name: str) -> str:
    """A model by the name that commands take, where the fleet's file gives it one, and by the one that clients use."""
    return f"{name}, {served} for clients" if name and served and name != served else served or name or "unknown"


def fleet_view(seen: dict[str, Any], model: str = "") -> RenderableType:
    """`/fleet` as a table and two lines. A dash stands for an unknown load. `model`: its name in the fleet's file."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    # Commands take a worker's whole name: where the terminal is narrow, other columns are cut.
    table.add_column(
        "worker", no_wrap=True, min_width=max((len(worker["id"]) for worker in seen["workers"]), default=0)
    )
    grouped = any(worker.get("ranks", 1) > 1 for worker in seen["workers"])
    for name in (*(["rank"] if grouped else []), "role", "state", "engine", "KV blocks used"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "step", "pid"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host")  # wraps where the terminal is narrow
    if labelled := any(worker.get("labels") for worker in seen["workers"]):
        table.add_column("labels")
    for worker in seen["workers"]:
        step_ms = worker["step_ms"]
        table.add_row(
            worker["id"],
            *([f"{worker['rank']} of {worker['ranks']}"] if grouped else []),
            worker["role"],
            Text(worker["state"], style=STATE_STYLE.get(worker["state"], "")),
            worker["engine"],
            _blocks(worker["blocks_total"], worker["blocks_free"]),
            _count(worker["running"]),
            _count(worker["waiting"]),
            "-" if step_ms is None else f"{step_ms:.1f} ms",
            str(worker["pid"]),
            worker["host"],
            *([" ".join(worker["labels"])] if labelled else []),
        )
    queue, desired = seen["queue"], seen["desired"]
    lines: list[RenderableType] = [Text(f"model {model_name(seen['model'], model)}", style="bold"), table]
    if not seen["workers"]:
        lines.append(Text(at_rest(seen) or "no worker is registered", style="yellow"))
    if seen.get("no_frontend"):
        lines.append(Text("no frontend answers: loads are not known", style="yellow"))
    lines.append(Text(_queue_line(queue)))
    if shares := seen.get("in_time"):
        lines.append(Text(in_time_line(shares)))
    lines += map(Text, balance_lines(seen["workers"]))
    if desired:
        lines.append(Text(f"desired: {desired['prefill']} prefill, {desired['decode']} decode, {set_by(desired)}"))
    if rollout := seen.get("rollout"):
        if rollout["phase"] != "done" and not (rollout["restart"] and rollout["phase"] == "undone"):
            lines.append(Text(_rollout_line(rollout, seen["workers"]), style="yellow"))
        lines += [Text(restart_line(url), style="yellow") for url in rollout["to_restart"]]
    return Group(*lines)


def in_time_line(shares: dict[str, float]) -> str:
    """The share of requests that met their objectives, by class; the nameless class last."""
    named = [f"{name} {share:.1%}" for name, share in shares.items() if name]
    rest = [f"no class {shares['']:.1%}" if named else f"{shares['']:.1%}"] if "" in shares else []
    return f"within objectives in the last minute: {', '.join([*named, *rest])}"


def balance_lines(workers: list[dict[str, Any]]) -> list[str]:
    """A line for each group whose ranks step together."""
    groups = ((worker["unit"], steps) for worker in workers if (steps := worker.get("group")))
    return [
        f"{unit}: balance {steps['recent']:.0%} lately, {steps['lost_s']:.1f} s lost to imbalance in {steps['steps']} "
        f"steps; {steps['dummies']} dummy batches, {steps['waves']} waves"
        for unit, steps in groups
    ]


def _rollout_line(rollout: dict[str, Any], workers: list[dict[str, Any]]) -> str:
    # Phases by their text: `store.configuration`, which names them, would load redis, which makes the command slower.
    if rollout["restart"]:
        return f"restart {rollout['phase']}: of {', '.join(rollout['restart'])}"
    forward = rollout["phase"] == "forward"
    begun, target = (rollout["old"], rollout["new"]) if forward else (rollout["new"], rollout["old"])
    there = sum(worker["generation"] == target for worker in workers)
    line = f"rollout {rollout['phase']}: configuration {begun} to {target}, {there} of {len(workers)} workers run it"
    return f"{line} ({rollout['why']})" if rollout["why"] else line


def restart_line(url: str) -> str:
    """The line for a frontend that a rollout did not replace."""
    return f"{url}: this frontend was started by hand and has the configuration from before the rollout: restart it"


def queue_view(rows: list[dict[str, Any]], depth: dict[str, int]) -> RenderableType:
    names = ("request", "tokens", "uncached", "waiting", "attempt", "frontend")
    cells = (
        (it["id"], str(it["tokens"]), str(it["uncached"]), f"{it['age_s']:.2f} s", str(it["attempt"]), it["reply_to"])
        for it in rows
    )
    return Group(Text(_queue_line(depth)), *([plain_table(names, cells, right=names[1:-1])] if rows else []))


# How often people need a key: most fleets set some of the first ones. Keys that are named nowhere are of the second
# group, but for sections that few need.
OFTEN, SOMETIMES, SELDOM = "set by most fleets", "set by some fleets", "seldom needed"
_OFTEN = (
    "model served_model_name engine redis.url frontend.host frontend.port frontend.replicas frontend.server_args "
    "workers.prefill.replicas workers.prefill.engine_args workers.decode.replicas workers.decode.engine_args "
    "workers.engine_args workers.env workers.bind slo.ttft_s slo.tpot_s ratio.mode scale.min_workers scale.max_workers "
    "launcher.kind security.api_keys_file"
).split()
_SELDOM = ("sim.", "routing.", "kv.", "ratio.", "scale.attainment", "launcher.restart")


def how_often(key: str) -> str:
    if key in _OFTEN:
        return OFTEN
    return SELDOM if key.startswith(_SELDOM) or key.endswith(("timeout_s", "after_s")) else SOMETIMES


def keys_view(struct: type[msgspec.Struct]) -> RenderableType:
    """Every configuration key with its type and default, those that most people need first."""
    rows: list[tuple[Text, ...]] = []
    for group in (OFTEN, SOMETIMES, SELDOM):
        rows.append((Text(group, style="bold"),))
        rows += [tuple(map(Text, (f"  {key}", *more))) for key, *more in config_keys(struct) if how_often(key) == group]
    return plain_table(("key", "type", "default"), rows)


def config_keys(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every key, those of sections included, as (a.b.c, type, its default in YAML or "required")."""
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        key, kind = prefix + field.name, hints[field.name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from config_keys(kind, key + ".")
        else:
            yield key, _kind(kind), _default(field)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return plain(field.default_factory())
    return "required" if field.default is msgspec.NODEFAULT else plain(field.default)


def plain(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or value == "":
        return "none" if value is None else '""'
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none", Any: "anything"}


def _kind(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        base, *metas = typing.get_args(kind)
        return " ".join([_kind(base), *(_bounds(meta) for meta in metas if isinstance(meta, msgspec.Meta))]).strip()
    if origin is Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(kind))
    if origin is dict:
        return "section of any keys"
    if origin in (list, tuple):
        return f"list of {_kind(typing.get_args(kind)[0])}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _bounds(meta: msgspec.Meta) -> str:
    signs = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
    return " ".join(f"{sign} {_short(bound)}" for sign, bound in signs if bound is not None)


def _short(bound: float) -> str:
    """1e6 instead of 1000000."""
    return f"{bound:g}".replace("e+0", "e").replace("e+", "e")


def _blocks(total: int, free: int | None) -> Text:
    if free is None:
        return Text(f"- / {total}")
    used = total - free
    return Text(f"{blocks_bar(used / total if total else 0.0)} {used} / {total}")


def blocks_bar(share: float) -> str:
    full = round(_BAR_CELLS * share)
    return "█" * full + "░" * (_BAR_CELLS - full)


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def at_rest(seen: dict[str, Any]) -> str:
    """That the model is idle, or wakes; empty text for one that does neither."""
    by = (seen["desired"] or {}).get("set_by")
    if by == IDLE:
        return "idle: the next request brings its workers back"
    decodes = any(worker["role"] == "decode" and worker["state"] == "ready" for worker in seen["workers"])
    return "waking: requests wait for its workers" if by == WAKE and not decodes else ""


def set_by(desired: dict[str, Any]) -> str:
    """Who set the desired ratio, when, by the clock of Redis as events have it (this host's may differ), and why."""
    at = datetime.datetime.fromtimestamp(desired["set_at"])
    why = f": {desired['why']}" if desired.get("why") else ""
    return f"by {desired['set_by']} at {at:%Y-%m-%d %H:%M:%S}{why}"


def _queue_line(queue: dict[str, int] | None) -> str:
    if queue is None:
        return "queue: unknown, Redis cannot be used now"
    wait = "prefill waits" if queue["requests"] == 1 else "prefills wait"
    return f"queue: {queue['requests']} {wait} ({queue['tokens']} tokens), {queue['claimed']} claimed"
