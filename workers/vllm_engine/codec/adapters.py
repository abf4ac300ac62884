"""The LoRA adapters of one engine: each is checked, and loaded, before a request runs with it.

vLLM loads an adapter in the step of its first request, where an error ends the engine, and takes whatever it has loaded
by the request's number for it (vllm/lora/worker_manager.py, 0.32.0). So the adapter is loaded ahead by a call, which
only fails; and a number is taken only if it follows from the files that would be loaded.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from xxhash import xxh3_128

from orchestrator.wire.adapters import adapter_number, unique_name
from workers.engine import AdapterLate, AdapterUnavailable, AdapterUse, EngineDead, InvalidEngineRequest

LOAD_TIMEOUT_S = 20.0  # of one that a request brings; those that are loaded before it do not count
_FILES = "adapter_*"  # its configuration and weights
_PIECE_BYTES = 1 << 22

Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, size, time of change, inode


class Adapters:
    """`load` gives an adapter to the engine, which takes none until it is known to have LoRA."""

    def __init__(self, load: Callable[[LoRARequest], Awaitable[bool]]) -> None:
        self._load, self._kept, self.slots, self.use = load, 0, 0, AdapterUse(0)
        self._known: dict[int, tuple[str, str]] = {}  # name and path of each number that was ever loaded
        self._loaded: OrderedDict[int, None] = OrderedDict()  # last used last
        self._read: dict[Path, tuple[Stamp, str]] = {}
        self._loading = asyncio.Lock()

    def allow(self, kept: int, slots: int) -> None:
        """The engine keeps the `kept` adapters that were used last, and a step has at most as many as `slots`."""
        self._kept, self.slots, self.use = kept, slots, AdapterUse(slots)

    async def prepare(self, key: str, adapter: LoRARequest) -> None:
        """Load the adapter of the request of this key unless it is loaded, and give it the name by which caches tell
        it. Raises InvalidEngineRequest if its number is another adapter's or there is no LoRA, AdapterUnavailable if it
        cannot be loaded, EngineDead."""
        number = adapter.lora_int_id
        self._check_known(adapter)
        if number not in self._loaded:
            async with self._loading:
                if number not in self._loaded:  # else another request has brought it meanwhile
                    await self._load_for_request(adapter)
        self._loaded.move_to_end(number)
        self.use.began(key, number)
        # In one step, vLLM takes adapters of one name for one adapter.
        adapter.lora_name = unique_name(adapter.lora_name, number)

    async def _load_for_request(self, adapter: LoRARequest) -> None:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._add(adapter)
        except TimeoutError:
            raise AdapterLate(f"{_described(adapter)} was not loaded in {LOAD_TIMEOUT_S:g} s") from None
        except RuntimeError as error:
            if isinstance(error, AdapterUnavailable | EngineDead):
                raise
            raise AdapterUnavailable(f"{_described(adapter)} cannot be loaded: {error}") from error

    async def add(self, adapter: LoRARequest) -> bool:
        """Load an adapter. Raises as `prepare`, and RuntimeError if the engine cannot load it."""
        self._check_known(adapter)
        async with self._loading:
            return await self._add(adapter)

    async def _add(self, adapter: LoRARequest) -> bool:
        number, name, path = adapter.lora_int_id, adapter.lora_name, adapter.lora_path
        if adapter_number(name, path, await self.fingerprint(name, path)) != number:
            raise AdapterUnavailable(
                f"{_described(adapter)} is not the one that was loaded: its files have changed, or differ between "
                "hosts; load it anew with load_inplace, best from a path of its own"
            )
        began = time.monotonic()
        added = await self._load(msgspec.structs.replace(adapter, load_inplace=False))
        self.use.loaded(number, time.monotonic() - began)
        self._known[number] = name, path
        self._loaded[number] = None
        self._loaded.move_to_end(number)
        while len(self._loaded) > self._kept:
            self._loaded.popitem(last=False)
        return added

    def removed(self, number: int) -> None:
        self._loaded.pop(number, None)
        self.use.removed(number)

    async def fingerprint(self, name: str, path: str) -> str:
        """What the adapter's files are: a hash. A repository's are downloaded. Raises AdapterUnavailable, and
        InvalidEngineRequest without LoRA."""
        self._check_allowed()
        try:
            return await asyncio.to_thread(self._fingerprint, path)
        except (OSError, ValueError) as error:
            raise AdapterUnavailable(f"{LoRAAdapterNotFoundError(name, path)}: {error}") from error

    def _fingerprint(self, path: str) -> str:
        folder = Path(get_adapter_absolute_path(path))
        files = sorted(file for file in folder.glob(_FILES) if file.is_file())
        if not files:
            raise FileNotFoundError(f"{folder} has no file {_FILES}")
        stats = [(file.name, os.stat(file)) for file in files]
        stamp = tuple((name, found.st_size, found.st_mtime_ns, found.st_ino) for name, found in stats)
        read_before, known = self._read.get(folder, ((), ""))
        if stamp == read_before:
            return known
        digest = xxh3_128()
        for file, (name, _, _, _) in zip(files, stamp, strict=True):
            digest.update(f"{name}\0{file.stat().st_size}\0".encode(errors="surrogatepass"))
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    digest.update(piece)
        self._read[folder] = stamp, digest.hexdigest()
        return digest.hexdigest()

    def _check_allowed(self) -> None:
        if not self.slots:
            raise InvalidEngineRequest("the engine has no LoRA: set workers.engine_args.enable_lora")

    def _check_known(self, adapter: LoRARequest) -> None:
        self._check_allowed()
        known = self._known.get(adapter.lora_int_id)
        if known is not None and known != (adapter.lora_name, adapter.lora_path):
            raise InvalidEngineRequest(
                f"{_described(adapter)} has number {adapter.lora_int_id}, which is that of LoRA adapter {known[0]!r} "
                f"at {known[1]} here"
            )


def _described(adapter: LoRARequest) -> str:
    return f"LoRA adapter {adapter.lora_name!r} at {adapter.lora_path}"
