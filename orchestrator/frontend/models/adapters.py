"""vLLM's list of models with the fleet's LoRA adapters: loading or unloading one by HTTP reaches every frontend.

Adapters of `lora_modules` are this frontend's, since another generation of the configuration may have others. Those
that were loaded, or that a resolver of vLLM's found, are the fleet's (`fleet/adapters.py`), and go before them. See
vllm/entrypoints/openai/models/serving.py, 0.32.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from vllm.entrypoints.launchers.api_server import app_state
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest

from orchestrator.fleet.adapters import AdapterFailed, AdapterRefused, AdapterView
from orchestrator.fleet.control_calls import CallFailed
from orchestrator.frontend import edge
from orchestrator.frontend.engine import FleetRefused, unavailable
from orchestrator.store.configuration import Adapter, AdapterList

log = logging.getLogger("pd.frontend")


@contextlib.contextmanager
def fleet_models() -> Iterator[None]:
    """Inside this context vLLM's app gets `FleetModels`."""
    original = app_state.OpenAIServingModels
    app_state.OpenAIServingModels = FleetModels
    try:
        yield
    finally:
        app_state.OpenAIServingModels = original


def numbered(adapter: Adapter) -> LoRARequest:
    made = LoRARequest(adapter.name, adapter.number, adapter.path, is_3d_lora_weight=adapter.is_3d)
    made.base_model_name = adapter.base_model
    return made


class Locks(WeakValueDictionary[str, asyncio.Lock]):
    """By name, while somebody holds one or waits for it: clients ask for any name, and vLLM keeps the lock of each."""

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self.setdefault(name, asyncio.Lock())


class FleetModels(OpenAIServingModels):
    """`engine_client` is a FleetLLM, whose `add_lora` numbers an adapter and loads it on all workers."""

    def __init__(self, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(engine_client, *args, **kwargs)
        self.lora_resolver_lock = Locks()
        self._fleet: AdapterView = engine_client.adapters
        self._static: dict[str, LoRARequest] | None = None  # None: they are being loaded

    async def init_static_loras(self) -> None:
        await super().init_static_loras()
        self._static = self.lora_requests
        self._fleet.on_change = self._follow
        self._follow(self._fleet.known)

    def _follow(self, known: AdapterList) -> None:
        listed = {name: numbered(adapter) for name, adapter in known.adapters.items()}
        self.lora_requests = {**(self._static or {}), **listed}

    async def load_lora_adapter(
        self, request: LoadLoRAAdapterRequest, base_model_name: str | None = None
    ) -> ErrorResponse | str:
        async with self.lora_resolver_lock[request.lora_name]:
            if (refused := await self._check_load_lora_adapter_request(request)) is not None:
                return refused
            wanted = LoRARequest(request.lora_name, 1, request.lora_path, is_3d_lora_weight=request.is_3d_lora_weight)
            if base_model_name is not None and self.is_base_model(base_model_name):
                wanted.base_model_name = base_model_name
            try:
                await self.engine_client.add_lora(wanted)
                if self._static is None:
                    self.lora_requests[request.lora_name] = wanted
                else:
                    await self._fleet.load(_listed(wanted), replacing=request.load_inplace)
            except Exception as error:
                return _failed(error, request.lora_name, request.lora_path)
            log.info("loaded LoRA adapter %r of %s as %d", wanted.lora_name, wanted.lora_path, wanted.lora_int_id)
            return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    async def unload_lora_adapter(self, request: UnloadLoRAAdapterRequest) -> ErrorResponse | str:
        name = request.lora_name
        async with self.lora_resolver_lock[name]:
            try:
                was_there = await self._fleet.unload(name)
            except Exception as error:
                return _failed(error, name)
            if not was_there and (refused := await self._check_unload_lora_adapter_request(request)) is not None:
                return refused
            if not was_there:
                why = f"the LoRA adapter {name!r} is one of frontend.server_args.lora_modules: take it out there"
                return create_error_response(why, "InvalidUserInput", HTTPStatus.BAD_REQUEST)
            log.info("unloaded LoRA adapter %r", name)
            return f"Success: LoRA adapter '{name}' removed successfully."

    async def resolve_lora(self, lora_name: str) -> LoRARequest | ErrorResponse:
        known, context = self.lora_requests.get(lora_name), edge.current.get()
        before = context.refusal if context is not None else None
        found = await super().resolve_lora(lora_name)
        if context is not None and isinstance(found, LoRARequest):
            context.refusal = before  # what one resolver found could not be loaded, what the next one found could
        elif context is not None and (refusal := context.refusal) is not None:
            # It is there, but could not be loaded now: vLLM answers with 400, whatever was raised.
            return create_error_response(refusal.message, "ServiceUnavailableError", HTTPStatus(refusal.status))
        if isinstance(found, LoRARequest) and found is not known:
            try:
                await self._fleet.put(lora_name, _listed(found), patience_s=0.0)  # its client waits
            except (AdapterRefused, AdapterFailed) as error:  # others resolve it themselves, to the same number
                log.warning("LoRA adapter %r was resolved, but is not in the fleet's list: %s", lora_name, error)
        return found


def _listed(numbered: LoRARequest) -> Adapter:
    return Adapter(
        numbered.lora_name,
        numbered.lora_path,
        numbered.lora_int_id,
        numbered.base_model_name,
        numbered.is_3d_lora_weight,
    )


def _failed(error: Exception, name: str, path: str = "") -> ErrorResponse:
    missing = LoRAAdapterNotFoundError(name, path)
    if str(missing) in str(error):
        return create_error_response(str(error), "NotFoundError", HTTPStatus.NOT_FOUND)
    if isinstance(error, AdapterRefused):
        return create_error_response(str(error), "InvalidUserInput", HTTPStatus.BAD_REQUEST)
    if isinstance(error, AdapterFailed | FleetRefused):
        return create_error_response(error if isinstance(error, FleetRefused) else unavailable(str(error)))
    if isinstance(error, CallFailed):  # as vLLM says what an engine says
        return create_error_response(str(error), "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
    raise error
