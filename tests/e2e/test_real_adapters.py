"""LoRA adapters behind several frontends, on real engines: answers are those of a plain engine with the adapter."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support_fleet import START_TIMEOUT_S, RunningFleet, descendants, running_fleet, token_prompt
from support_models import LORA_RANK, lora_adapter
from support_vllm import Driver

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT, LONG = token_prompt(20, seed=1), token_prompt(300, seed=2)  # prefilled where it decodes, and remotely
TOKENS = 12
ENGINE = {"enable_lora": True, "max_loras": 2, "max_lora_rank": LORA_RANK}
SETS = [
    "frontend.replicas=2",
    "frontend.max_replicas=2",
    "routing.remote_prefill_min_tokens=64",
    "workers.engine_args.block_size=32",
    "workers.engine_args.kv_cache_memory_bytes=402653184",
    *(f"workers.engine_args.{name}={str(value).lower()}" for name, value in ENGINE.items()),
]


class Frontends:
    """A client per frontend: which one a connection reaches is chance."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet, self._clients = fleet, dict[str, httpx.Client]()

    def both(self) -> list[httpx.Client]:
        self._fleet.until(self._found, "a connection to each of two frontends", timeout_s=START_TIMEOUT_S)
        return list(self._clients.values())

    def _found(self) -> bool:
        for name, client in list(self._clients.items()):
            if self._name(client) != name:
                self._clients.pop(name).close()
        for _ in range(20):
            if len(self._clients) == 2:
                return True
            client = httpx.Client(base_url=self._fleet.url, timeout=120)
            name = self._name(client)
            if name is None or name in self._clients:
                client.close()
            else:
                self._clients[name] = client
        return False

    def _name(self, client: httpx.Client) -> str | None:
        try:
            return client.get("/requests?latest=1").json()["frontend"]
        except httpx.HTTPError:
            return None


def load(client: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def said(client: httpx.Client, model: str, prompt: list[int]) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def listed(client: httpx.Client) -> set[str]:
    return {model["id"] for model in client.get("/v1/models").json()["data"][1:]}


async def plain(model: str, adapters: list[Path | None]) -> list[list[list[int]]]:
    """What one engine without a fleet answers with each adapter and with none, to the short and the long prompt."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    driver, answers = await Driver.start(Path(model), **ENGINE), []
    for number, path in enumerate(adapters, 1):
        given = []
        for at, prompt in enumerate((SHORT, LONG)):
            key, lora = f"{number}-{at}", LoRARequest(f"plain-{number}", number, str(path)) if path else None
            params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            await driver.engine.give(EngineCoreRequest(key, prompt, None, params, None, 0.0, lora, None, None))
            given.append(await driver.done(key, 60))
        answers.append(given)
    await driver.stop()
    return answers


@pytest.fixture(scope="module")
def paths(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of four adapters, by their names."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: lora_adapter(Path(model), folder / name, seed) for seed, name in enumerate("xyzw", 1)}


@pytest.fixture(scope="module")
def truth(model: str, paths: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What one engine answers with each adapter, and by the model's name without; they say different things."""
    names: dict[str, Path | None] = {**paths, model: None}
    truth = dict(zip(names, asyncio.run(plain(model, list(names.values()))), strict=True))
    assert all(one != other for one, other in itertools.combinations(truth.values(), 2))
    return truth


@pytest.fixture(scope="module", autouse=True)
def allowed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        yield


def test_two_decode_workers_with_one_slot_each_keep_an_adapter_each(
    model: str, paths: dict[str, Path], truth: dict[str, list[list[int]]]
) -> None:
    """The first here: a fleet at a time has the cores."""
    sets = [one for one in SETS if not one.startswith("frontend.") and "max_loras" not in one]
    split = ["workers.prefill.replicas=0", "workers.decode.replicas=2", "workers.engine_args.max_loras=1"]
    with (
        running_fleet("demo-1p1d-cpu.yaml", f"model={model}", *sets, *split) as fleet,
        httpx.Client(base_url=fleet.url, timeout=120) as client,
    ):
        where: dict[str, list[str]] = {"x": [], "y": []}
        for name in where:
            assert load(client, name, paths[name]).status_code == 200
        for name in "xyxxyyxyyyxxxyxy":
            assert said(client, name, SHORT) == truth[name][0]
            where[name].append(client.get("/requests?latest=1").json()["requests"][0]["decode_worker"])
        assert {len(set(workers)) for workers in where.values()} == {1}, where
        assert where["x"][0] != where["y"][0]
        fleet.assert_no_leaks()


@pytest.fixture(scope="module")
def fleet(model: str, truth: dict[str, list[list[int]]]) -> Iterator[RunningFleet]:
    """After `truth`: an engine at a time needs a core. Every test leaves it without adapters."""
    with running_fleet("demo-1p1d-cpu.yaml", f"model={model}", *SETS) as running:
        yield running


def test_adapters_of_several_frontends_answer_as_one_engine_does(
    fleet: RunningFleet, model: str, paths: dict[str, Path], truth: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    first, second = Frontends(fleet).both()

    def answers(name: str) -> list[list[list[int]]]:
        return [[said(client, name, prompt) for prompt in (SHORT, LONG)] for client in (first, second)]

    # Each by another frontend: both know both at once, and nobody is given the other's weights.
    one = lora_adapter(Path(model), tmp_path / "one", seed=1)
    assert (load(first, "x", one).status_code, load(second, "y", paths["y"]).status_code) == (200, 200)
    assert listed(first) == listed(second) == {"x", "y"}
    assert answers("x") == [truth["x"]] * 2
    assert answers("y") == [truth["y"]] * 2

    again = load(second, "x", paths["z"])
    assert again.status_code == 400 and "load_inplace" in again.text
    missing = load(first, "z", tmp_path / "nowhere")
    assert missing.status_code == 404 and "worker" in missing.text and listed(second) == {"x", "y"}
    for client in (first, second):
        assert load(client, "z", paths["z"], load_inplace=True).status_code == 200
    assert answers("z") == [truth["z"]] * 2
    assert answers("x") == [truth["x"]] * 2

    # Other weights under a known name and path: no weights and no KV of the old ones are used.
    lora_adapter(Path(model), one, seed=3)
    assert load(first, "x", one, load_inplace=True).status_code == 200
    assert answers("x") == [truth["z"]] * 2

    for gone, left in (("x", {"y", "z"}), ("z", {"y"}), ("y", set())):
        assert second.post("/v1/unload_lora_adapter", json={"lora_name": gone}).status_code == 200
        for client in (first, second):
            assert listed(client) == left
            unknown = client.post("/v1/completions", json={"model": gone, "prompt": "a", "max_tokens": 1})
            assert unknown.status_code == 404
        assert [answers(name) == [truth[name]] * 2 for name in left] == [True] * len(left)
    fleet.assert_no_leaks()


def frontend_pids(fleet: RunningFleet) -> list[int]:
    return [pid for pid in descendants(fleet.process.pid) if "frontend.server" in " ".join(_command(pid))]


class Load:
    """Asks for adapters over and over, each time by a new connection, and compares each answer."""

    def __init__(self, url: str, truth: dict[str, list[list[int]]]) -> None:
        self._url, self._truth, self._over = url, truth, threading.Event()
        self.answered, self.lost = 0, 0
        self.wrong: list[object] = []

    @contextlib.contextmanager
    def running(self, threads: int) -> Iterator[None]:
        with ThreadPoolExecutor(threads) as pool:
            asking = [pool.submit(self._ask, number) for number in range(threads)]
            try:
                yield
            finally:
                self._over.set()
                for one in asking:
                    one.result()

    def _ask(self, first: int) -> None:
        for turn in itertools.count(first):
            if self._over.wait(0.2):  # leaves the cores to processes that start
                return
            name, at = list(self._truth)[turn % len(self._truth)], turn // len(self._truth) % 2
            try:
                with httpx.Client(base_url=self._url, timeout=120) as client:
                    tokens = said(client, name, (SHORT, LONG)[at])
            except httpx.TransportError:
                self.lost += 1  # its frontend was killed
                continue
            except AssertionError as error:
                self.wrong.append((name, str(error)))
                continue
            self.answered += 1
            if tokens != self._truth[name][at]:
                self.wrong.append((name, at, tokens))


def test_four_adapters_under_load_while_one_comes_and_goes_and_processes_are_killed(
    fleet: RunningFleet, model: str, paths: dict[str, Path], truth: dict[str, list[list[int]]]
) -> None:
    frontends = Frontends(fleet)
    for name in "xyz":
        fleet.cli("lora", "add", name, str(paths[name]))
    shown = json.loads(fleet.cli("lora", "list", "--json").stdout)["adapters"]
    assert {one["name"]: one["path"] for one in shown} == {name: str(paths[name]) for name in "xyz"}
    refused = fleet.cli("lora", "add", "x", str(paths["w"]), check=False)
    assert refused.returncode == 2 and "load_inplace" in refused.stderr

    def comes_and_goes() -> None:
        for which in (0, 1):
            client = frontends.both()[which]  # a look for both closes those to a frontend that has ended
            assert load(client, "w", paths["w"]).status_code == 200
            for other in frontends.both():
                assert [said(other, "w", prompt) for prompt in (SHORT, LONG)] == truth["w"]
            unloaded = frontends.both()[which].post("/v1/unload_lora_adapter", json={"lora_name": "w"})
            assert unloaded.status_code == 200, unloaded.text
            for other in frontends.both():
                assert listed(other) == {"x", "y", "z"}
                gone = other.post("/v1/completions", json={"model": "w", "prompt": "a", "max_tokens": 1})
                assert gone.status_code == 404

    asked = Load(fleet.url, {name: truth[name] for name in ("x", model, "y", "z")})
    with asked.running(threads=3):
        comes_and_goes()
        # A frontend that starts again knows them, and numbers the next one as no other.
        os.kill(frontend_pids(fleet)[0], signal.SIGKILL)
        comes_and_goes()
        for role in ("prefill", "decode"):
            (killed,) = fleet.workers(role)
            os.kill(killed["pid"], signal.SIGKILL)
            fleet.until(
                lambda role=role, killed=killed: [w for w in fleet.workers(role) if w["pid"] != killed["pid"]],
                f"another {role} worker takes its place",
                timeout_s=START_TIMEOUT_S,
            )
            comes_and_goes()
    assert asked.wrong == [] and asked.answered > 30
    for name, left in (("z", {"x", "y"}), ("x", {"y"}), ("y", set())):
        fleet.cli("lora", "remove", name)
        assert [listed(client) for client in frontends.both()] == [left] * 2
    fleet.assert_no_leaks()


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []
