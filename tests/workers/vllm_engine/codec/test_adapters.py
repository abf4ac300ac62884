"""Adapters are checked and loaded before a request runs, without an engine."""

import asyncio
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.wire.adapters import adapter_number, unique_name
from workers.engine import (
    AdapterUnavailable,
    EngineDead,
    EngineLoad,
    EngineRequest,
    InvalidEngineRequest,
    Phase,
    submit,
)

pytestmark = pytest.mark.vllm


class Engine:
    def __init__(self, kept: int = 2, load_s: float = 0.0) -> None:
        from workers.vllm_engine.codec.adapters import Adapters

        self.loaded: list[str] = []
        self.load_s = load_s
        self.fails = ""
        self.adapters = Adapters(self._load)
        if kept:
            self.adapters.allow(kept, kept)
        self._keys = itertools.count()

    async def _load(self, adapter: Any) -> bool:
        await asyncio.sleep(self.load_s)
        if self.fails:
            raise RuntimeError(self.fails)
        assert not adapter.load_inplace
        self.loaded.append(adapter.lora_name)
        return True

    async def prepare(self, adapter: Any) -> str:
        key = f"r{next(self._keys)}"
        await self.adapters.prepare(key, adapter)
        return key

    async def request(self, name: str, path: Path, number: int = 0) -> Any:
        from vllm.lora.request import LoRARequest

        content = await self.adapters.fingerprint(name, str(path))
        return LoRARequest(name, number or adapter_number(name, str(path), content), str(path), load_inplace=True)


def written(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "README.md").write_text(folder.name)
    return folder


async def test_an_adapter_is_loaded_once_and_named_by_its_number(tmp_path: Path) -> None:
    engine, path = Engine(), written(tmp_path / "a")
    for _ in range(3):
        adapter = await engine.request("x", path)
        await engine.prepare(adapter)
        assert adapter.lora_name == unique_name("x", adapter.lora_int_id)
    assert engine.loaded == ["x"]
    engine.adapters.removed(adapter.lora_int_id)
    await engine.prepare(await engine.request("x", path))
    assert engine.loaded == ["x", "x"]


async def test_what_the_engine_has_let_go_is_loaded_and_checked_again(tmp_path: Path) -> None:
    engine = Engine(kept=2)
    paths = {name: written(tmp_path / name, name.encode()) for name in "abc"}
    asked = {name: await engine.request(name, path) for name, path in paths.items()}
    for name in "abac":  # b is used least
        await engine.prepare(await engine.request(name, paths[name]))
    assert engine.loaded == ["a", "b", "c"]
    written(paths["a"], b"other")
    written(paths["b"], b"other")
    still = asked["a"]
    await engine.prepare(still)  # it is loaded: its files are not read
    with pytest.raises(AdapterUnavailable, match="'b' at .* its files have changed"):
        await engine.prepare(asked["b"])


async def test_a_number_is_one_adapters(tmp_path: Path) -> None:
    engine, path, other = Engine(), written(tmp_path / "a"), written(tmp_path / "b", b"other")
    adapter = await engine.request("x", path)
    number = adapter.lora_int_id
    await engine.prepare(adapter)
    for wrong in (await engine.request("y", other, number), await engine.request("x", other, number)):
        with pytest.raises(InvalidEngineRequest, match=f"has number {number}, which is that of LoRA adapter 'x'"):
            await engine.prepare(wrong)
        with pytest.raises(InvalidEngineRequest):
            await engine.adapters.add(wrong)
    counted = await engine.request("z", other, 1)  # as vLLM would number it
    with pytest.raises(AdapterUnavailable, match="is not the one that was loaded"):
        await engine.prepare(counted)
    assert engine.loaded == ["x"]


async def test_an_adapter_with_which_the_engine_dies_is_not_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Its request is a suspect then, and tried alone; else it would go to one engine after the other."""
    engine = Engine()

    async def dies(_: Any) -> bool:
        raise EngineDead("the engine has ended")

    engine.adapters._load = dies
    adapter = await engine.request("x", written(tmp_path / "a"))
    with pytest.raises(EngineDead):
        await engine.prepare(adapter)


async def test_an_adapter_that_cannot_be_loaded_fails_its_request_only(tmp_path: Path) -> None:
    from vllm.exceptions import LoRAAdapterNotFoundError

    engine, nowhere = Engine(), str(tmp_path / "nowhere")
    with pytest.raises(AdapterUnavailable) as missing:
        await engine.adapters.fingerprint("x", nowhere)
    assert str(LoRAAdapterNotFoundError("x", nowhere)) in str(missing.value)  # by which the frontend answers 404
    adapter = await engine.request("x", written(tmp_path / "a"))
    engine.fails = "rank 64 is greater than max_lora_rank 8"
    with pytest.raises(AdapterUnavailable, match="'x' at .* cannot be loaded: rank 64"):
        await engine.prepare(adapter)
    engine.fails = ""
    await engine.prepare(adapter)
    assert engine.loaded == ["x"]


async def test_an_adapter_that_is_late_is_told_from_one_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may be busy: the client is told to ask again, and not that something is wrong."""
    from workers.vllm_engine.codec import adapters as module

    monkeypatch.setattr(module, "LOAD_TIMEOUT_S", 0.05)
    engine, late = Engine(load_s=60.0), list[bool]()
    adapter = await engine.request("x", written(tmp_path / "a"))
    for fails in ("", "rank 64 is greater than max_lora_rank 8"):
        engine.fails, engine.load_s = fails, 0.0 if fails else 60.0
        taking: Any = SimpleNamespace(submit=lambda request: engine.prepare(adapter))
        refusal = await submit(taking, EngineRequest("r", Phase.DECODE, []))
        assert refusal is not None and not refusal.final
        late.append(refusal.late)
    assert late == [True, False]


async def test_a_fingerprint_is_of_the_weights_and_their_configuration(tmp_path: Path) -> None:
    engine, one, same = Engine(), written(tmp_path / "a"), written(tmp_path / "b")
    content = await engine.adapters.fingerprint("x", str(one))
    assert content == await engine.adapters.fingerprint("y", str(same)), "of nothing else"
    (one / "adapter_config.json").write_text('{"r": 8}')
    changed = await engine.adapters.fingerprint("x", str(one))
    assert changed != content
    weights = one / "adapter_model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"stHgiew")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert await engine.adapters.fingerprint("x", str(one)) != changed


async def test_an_engine_without_lora_refuses_adapters(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    engine, adapter = Engine(kept=0), LoRARequest("x", 70_000, str(written(tmp_path / "a")))
    for refused in (engine.prepare(adapter), engine.adapters.add(adapter), engine.adapters.fingerprint("x", "/x")):
        with pytest.raises(InvalidEngineRequest, match="enable_lora"):
            await refused


async def test_reports_say_which_adapters_are_there_and_how_many_requests_they_have(tmp_path: Path) -> None:
    engine, load = Engine(kept=2), EngineLoad(1, 0, 0, 0.0)
    paths = [written(tmp_path / name, name.encode()) for name in "abc"]
    asked = [await engine.request(path.name, path) for path in paths]
    a, b, c = (adapter.lora_int_id for adapter in asked)
    first, second = await engine.prepare(asked[0]), await engine.prepare(asked[1])
    again = await engine.prepare(await engine.request("a", paths[0]))
    assert engine.adapters.use.shown(load).adapters == {b: 1, a: 2}
    engine.adapters.use.ended(first, again, "unknown", first)
    third = await engine.prepare(asked[2])
    shown = engine.adapters.use.shown(load)
    assert shown.adapters == {b: 1, c: 1} and shown.adapter_load_s > 0
    engine.adapters.use.ended(second, third)
    engine.adapters.removed(c)
    assert engine.adapters.use.shown(load).adapters == {b: 0}


async def test_adapters_that_many_requests_bring_at_once_are_loaded_once_and_each_has_all_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm_engine.codec import adapters as module

    monkeypatch.setattr(module, "LOAD_TIMEOUT_S", 1.0)
    engine = Engine(kept=8, load_s=0.3)
    paths = {name: written(tmp_path / name, name.encode()) for name in "abcdef"}
    async with asyncio.TaskGroup() as asking:
        for name in "abcdef" * 3:
            asking.create_task(engine.prepare(await engine.request(name, paths[name])))
    assert sorted(engine.loaded) == [*"abcdef"]
