"""The processes of several models, as those of one: who begins and ends first."""

import asyncio
from typing import Any

import pytest

from orchestrator.launch.fleet_processes import StartFailed
from orchestrator.launch.pools.model_list import ModelsProcesses


class OfOneModel:
    def __init__(self, name: str, seen: list[str], fails: bool = False) -> None:
        self.name, self.seen, self.fails = name, seen, fails
        self.frontends = self
        self.is_first = name == "a"
        self.watch = self

    def serve(self) -> None:
        self.seen.append(f"{self.name} is served")

    async def close(self) -> None:
        if self.is_first:
            self.seen.append(f"{self.name}: no frontends")

    async def start(self) -> None:
        self.seen.append(f"{self.name} starts")

    async def end(self) -> None:
        self.seen.append(f"{self.name} ends")

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def until_ready(self) -> None:
        if self.fails:
            raise StartFailed(f"{self.name} did not start")
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append(f"{self.name} is not waited for")


async def test_frontends_start_last_and_end_first() -> None:
    seen: list[str] = []
    models: Any = {name: OfOneModel(name, seen) for name in "ab"}
    fleet = ModelsProcesses(models)
    await fleet.start()
    await fleet.end()
    assert seen[:2] == ["a is served", "b is served"]
    assert seen[2:] == ["b starts", "a starts", "a: no frontends", "a ends", "b ends"]


async def test_a_model_that_does_not_start_ends_the_start() -> None:
    seen: list[str] = []
    models: Any = {"a": OfOneModel("a", seen), "b": OfOneModel("b", seen, fails=True)}
    with pytest.raises(StartFailed, match="b did not start"):
        await ModelsProcesses(models).until_ready()
    assert seen == ["a is not waited for"]
