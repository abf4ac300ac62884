"""Explains what is wrong with a configuration, in one line that names the key, the value and the fix."""

from __future__ import annotations

import ast
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from orchestrator.config.access import SECRETS
from orchestrator.config.values import PATTERNS, masked

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 120
_KINDS = {
    "int": "an integer",
    "str": "text",
    "float": "a number",
    "bool": "true or false",
    "object": "a section",
    "array": "a list",
}
_UNQUOTED = [f", got `{kind}`" for kind in ("int", "float", "bool", "object")]  # what text may be read as
# As `a.b`: of an environment variable, or of an argument of vLLM.
_SECRET = re.compile(r"(^|\.)env\.|_args\..*(_token|password|secret|api_key)$")


def shown(key: str, value: Any) -> Any:
    """The value without what lets somebody in: a key, a password, an environment variable."""
    if isinstance(value, Mapping):
        return {name: shown(f"{key}.{name}", part) for name, part in value.items()}
    if value and (key in SECRETS or _SECRET.search(key)):
        return ["***"] * len(value) if isinstance(value, list) else "***"
    return masked(value) if isinstance(value, str) else value


def kind_of(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "a section or list"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write the longest ones
        return f"an integer of {value.bit_length()} bits"
    return "nothing" if value is None else _BRIEF.repr(value)


def find_unserializable(value: Any, key: str = "the file", depth: int = 0) -> str | None:
    """The first value that cannot be sent to the fleet's processes as JSON, and what it should be; None: all can."""
    if depth > _MAX_DEPTH:
        return f"{key}: expected at most {_MAX_DEPTH} sections in each other"
    if isinstance(value, dict):
        parts = ((part, str(name) if depth == 0 else f"{key}.{name}") for name, part in value.items())
        names = ((name, f"{key}: a name in it") for name in value)
        return next(filter(None, (find_unserializable(part, name, depth + 1) for part, name in (*names, *parts))), None)
    if isinstance(value, list):
        return next(filter(None, (find_unserializable(part, key, depth + 1) for part in value)), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key}: expected a finite number, got {value}"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return f"{key}: expected an integer of 64 bits, got one of {value.bit_length()}"
    if isinstance(value, str) and (odd := _NO_TEXT.search(value)):
        return f"{key}: expected text, got {odd[0]!r} in it"
    return None


_MAX_DEPTH = 30
_NO_TEXT = re.compile("[\\0\ud800-\udfff]")  # NUL, which ends a string in C, and lone surrogates
_SIZES = {
    "blocks": "num_gpu_blocks_override",
    "prefix_caching": "enable_prefix_caching",
    **{name: name for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")},
}
_INSTEAD = {
    "models": "one model is expected here, so name a file with `model:`",  # config/models.py takes several apart
    "workers.host": "it is workers.bind now, and workers.advertise where others reach the workers by another address",
    "workers.claim_batches": "remove it: it is 2",
    "launcher.restart_backoff_s": "remove it: it is 0.5 s; launcher.restart_backoff_max_s bounds what it grows to",
    "routing.prefix_index": "remove it, or set workers.engine_args.enable_prefix_caching to false",
    "routing.max_attempts": "remove it: it is 4",
    "routing.max_waiting_per_worker": "remove it: it is 128",
    "routing.max_queued_prefill_tokens": "use routing.claim_timeout_s, which bounds the queue by its wait",
    "routing.stall_timeout_s": "remove it: it is 600 s",
    **{f"sim.{old}": f"use workers.engine_args.{new}, as with vLLM" for old, new in _SIZES.items()},
    "sim.kv_bytes_per_token": "remove it: it is 131072; sim.link_gb_per_s says how long KV takes",
    "workers.heartbeat_s": "remove it: it is a quarter of workers.timeout_s",
    "slo.admission_slack": "remove it, and set slo.ttft_s to what is tolerated",
    "queue": "remove it: jobs go by arrival and predicted time; claims hold 2.5 x workers.timeout_s",
    **dict.fromkeys(
        ("ratio.interval_s", "ratio.window_s", "ratio.cool_down_s", "ratio.busy", "ratio.gain", "ratio.backlog_s"),
        "remove it: docs/policies.md has the numbers by which the split changes",
    ),
    "routing.placement": "remove it: by length is routing.remote_prefill_min_tokens, without it by predicted times",
}


def missing(what: str, package: str, extra: str) -> str:
    """Who needs a package that is not installed, and the extra of this project that it comes with."""
    return f"{what} needs {package}, which is not installed: pip install 'pd-orchestrator[{extra}]'"


def explain(error: str, tree: dict[str, Any], root: Any) -> str:
    """Turn msgspec's error about a tree that does not fit `root` into `a.b.c: expected ..., got ...`."""
    message, _, at = error.partition(" - at `")
    path = at.removeprefix("key` in `").removeprefix("$").rstrip("`").lstrip(".")
    there, inside = tree, path  # where the value is
    section, within, rest = path.partition("[...]")
    if within and (rest or message.startswith("Object")):  # else all values of a mapping are to be of one kind
        name = _wrong_name(section, error, tree, root)
        there, inside, path = _at(tree, section)[name], rest, f"{section}.{name}{rest}"
    expected = re.match(r"Expected `([^`]+)`(.*?)(, got .*)?$", message)
    bound = _in_words(expected[2]) if expected else ""
    if at.startswith("key"):
        return f"{path or 'the file'}: expected a name{bound or ', as text'}, before each ':'"
    if unknown := re.match(r"Object contains unknown field `(.*)`", message):
        key = _join(path, unknown[1])
        return f"{key}: unknown key; {_INSTEAD.get(key, '`orchestrator config keys` lists the known ones')}"
    if missing := re.match(r"Object missing required field `(.+)`", message):
        return f"{_join(path, missing[1])}: required, but not given"
    value = _at(there, inside)
    got = "***" if value and path.startswith(SECRETS) else kind_of(masked(value) if isinstance(value, str) else value)
    if message.startswith("Invalid enum value"):
        return f"{path}: expected one of {', '.join(_choices(root, path))}, got {got}"
    if expected:
        kind = " or ".join(_KINDS.get(k.strip(), k.strip()) for k in expected[1].split("|"))
        unquoted = expected[1] in ("str", "str | null") and expected[3] in _UNQUOTED
        quoted = "; in quotes it is text, after --set as 'KEY=\"VALUE\"'" if unquoted else ""
        if path.endswith("[...]"):
            return f"{path.removesuffix('[...]')}: expected {kind}{bound} for each name in it{quoted}"
        return f"{path or 'the file'}: expected {kind}{bound}, got {got}{quoted}"
    return f"{path or 'the file'}: {message[0].lower()}{message[1:]}, got {got}"


def _at(tree: Any, path: str) -> Any:
    """The value at `a.b[0]`; None where there is none."""
    for part in re.findall(r"[^.\[\]]+", path):
        tree = tree[int(part)] if isinstance(tree, list) else tree.get(part) if isinstance(tree, dict) else None
    return tree


def _wrong_name(section: str, error: str, tree: Any, root: Any) -> Any:
    """Under which name of a mapping msgspec met the error, which it does not say: of `slo.classes`, for example."""
    for name, part in _at(tree, section).items():
        alone: dict[str, Any] = {name: part}
        for outer in reversed(section.split(".")):
            alone = {outer: alone}
        try:
            msgspec.convert(alone, root)
        except msgspec.ValidationError as again:
            if str(again) == error:
                return name
    raise AssertionError(f"{section}: no name in it has the error {error}")


def _in_words(bound: str) -> str:
    """What msgspec says that a value must be, as ` matching regex '^a'`, without the pattern."""
    if matching := re.match(r" matching regex (.*)", bound):
        return f" {PATTERNS[ast.literal_eval(matching[1])]}"
    return bound


def _choices(root: Any, path: str) -> tuple[str, ...]:
    kind = root
    for name in path.split("."):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
    return tuple(choice for part in get_args(kind) for choice in (get_args(part) or (part,)) if isinstance(choice, str))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
