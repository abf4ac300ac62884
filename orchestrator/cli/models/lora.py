"""`orchestrator lora`: list the LoRA adapters that a model's fleet serves, add one while it runs, remove one.

A frontend does it for all frontends and workers, as its `/v1/load_lora_adapter` does.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.handle import Named, Said, fleet_command, option
from orchestrator.cli.look.frontend import UNANSWERED, fetch, operator_key, with_frontend
from orchestrator.cli.look.views import plain_table
from orchestrator.config.access import OPERATOR_KEY
from orchestrator.config.settings import Refused

_TIMEOUT_S = 300.0  # in which every worker loads the adapter, or its repository's download ends
app = typer.Typer()
NameArgument = Annotated[str, typer.Argument(help="What clients name as `model`.")]


@fleet_command(app.command("list"), by_url=True)
def list_command(fleet: Named) -> Said:
    """Show the adapters, those of the configuration included."""
    listed = _asked(fleet, "/v1/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        raise Refused("/v1/models: lists no models; name a frontend of a running fleet by --url")
    adapters = [{"name": it["id"], "path": it["root"], "parent": it["parent"]} for it in cards if it.get("parent")]
    shown = plain_table(("name", "of", "path"), ((it["name"], it["parent"], it["path"]) for it in adapters))
    return {"adapters": adapters}, shown


@fleet_command(app.command("add"), by_url=True)
def add_command(
    fleet: Named,
    name: NameArgument,
    path: Annotated[str, typer.Argument(help="Its folder, as every worker reads it, or its repository.")],
    replace: Annotated[bool, option("--replace", "Take the place of the adapter of this name.")] = False,
) -> Said:
    """Load an adapter on all workers, then let all frontends serve it."""
    body = {"lora_name": name, "lora_path": path, "load_inplace": replace}
    _asked(fleet, "/v1/load_lora_adapter", body)
    return {"name": name, "path": path}, f"{name}: added"


@fleet_command(app.command("remove"), by_url=True)
def remove_command(fleet: Named, name: NameArgument) -> Said:
    """Let no frontend serve an adapter any more."""
    _asked(fleet, "/v1/unload_lora_adapter", {"lora_name": name})
    return {"name": name}, f"{name}: removed"


def _asked(fleet: Named, path: str, body: object = None) -> Any:
    """The JSON of a frontend's answer, or its text. Raises Refused."""
    handle = with_frontend(fleet.find())
    at = handle.url or ""
    try:
        status, answer = fetch(at, path, operator_key(handle, at), _TIMEOUT_S, body)
    except UNANSWERED as error:
        unknown = "whether it was done is not known: look with `orchestrator lora list`"
        mend = "name a frontend of a running fleet by --url" if body is None else unknown
        raise Refused(f"{at}: {str(error) or type(error).__name__}; {mend}") from None
    try:
        said = msgspec.json.decode(answer)
    except ValueError:
        said = answer.decode(errors="replace")
    if status == HTTPStatus.OK:
        return said
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise Refused(f"{at} wants the operator's key: set {OPERATOR_KEY}")
    why = said["error"]["message"] if isinstance(said, dict) and "error" in said else str(said)
    if status == HTTPStatus.NOT_FOUND and "Not Found" in why:
        raise Refused(
            f"{at}: takes no adapters while it runs: start the fleet with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and "
            "workers.engine_args.enable_lora"
        )
    raise Refused(f"{at}: {why}")
