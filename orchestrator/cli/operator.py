"""What an operator tells a running fleet to do (scale, change a role, drain), and how the fleet is.

Needs the registry and the queue alone, so it works from any machine that reaches the fleet's Redis.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from orchestrator.config.settings import Config, ConfigError, QueueConfig
from orchestrator.launch.host.run_folder import RunFolder, held_namespaces
from orchestrator.launch.reconcile import SeenWorker, is_last_decode, see
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry, UnknownWorker
from orchestrator.types import DesiredRatio, Role, WorkerStatus

_REDIS_TIMEOUT_S = 2.0
_HTTP_TIMEOUT_S = 2.0
_MAX_WORKERS = 10_000


class Refused(ConfigError):
    """A command that cannot be carried out. One line: what, why, the mend."""


class FleetHandle(msgspec.Struct, frozen=True):
    """Where a fleet is, according to the options or to the launcher that runs here."""

    namespace: str
    redis_url: str
    url: str | None  # of its endpoint; None unless a launcher on this machine runs it
    config: Config | None


def find_fleet(namespace: str | None, redis_url: str | None) -> FleetHandle:
    """Raises Refused when neither the options nor a running launcher say where it is."""
    if namespace is None:
        held = held_namespaces()
        if len(held) > 1:
            raise Refused(f"several fleets run here ({', '.join(held)}); name one with --namespace")
        namespace = held[0] if held else "default"
    folder = RunFolder(namespace)
    running = folder.is_held
    url = redis_url or (folder.redis_url() if running else None)
    if url is None:
        raise Refused(
            f"no fleet runs in namespace {namespace!r}; start one with `orchestrator up CONFIG`, or name its --redis"
        )
    if not running or url != folder.redis_url():
        return FleetHandle(namespace, url, None, None)  # a fleet elsewhere may have the same name
    ready = folder.ready()
    return FleetHandle(namespace, url, ready.url if ready else None, folder.config())


class FleetOperator:
    """An open connection to one fleet. Every method raises Refused or RedisAway."""

    def __init__(self, handle: FleetHandle, registry: Registry, queue: PrefillQueue) -> None:
        self.handle = handle
        self.queue = queue
        self._registry = registry

    async def scale(self, prefill: int | None, decode: int | None) -> DesiredRatio:
        """Set how many workers there should be; None leaves that role as it is. Returns the new ratio."""
        current = await self._desired()
        wanted = DesiredRatio(
            current.prefill if prefill is None else prefill, current.decode if decode is None else decode, "scale"
        )
        if wanted.decode < 1:
            raise Refused(f"decode={wanted.decode}: expected an integer >= 1 (decode workers answer requests)")
        for name, count in (("prefill", wanted.prefill), ("decode", wanted.decode)):
            if not 0 <= count <= _MAX_WORKERS:
                raise Refused(f"{name}={count}: expected an integer from 0 to {_MAX_WORKERS}")
        await self._registry.set_desired(wanted.prefill, wanted.decode, wanted.set_by)
        return wanted

    async def change_role(self, worker_id: str, role: Role, force: bool) -> bool:
        """Order a role, and move the desired ratio with it. False when it has, or was told to take, that role."""
        workers = await self._seen()
        worker = self._one(worker_id, workers)
        if worker.leaving:
            raise Refused(f"{worker_id}: is draining and takes no role any more; `orchestrator scale` starts another")
        if worker.role is role:
            return False
        if worker.fixed:
            raise Refused(f"{worker_id}: its engine has several pipeline stages and stays a {worker.role.value} worker")
        await self._guard(worker_id, workers, force, "role")
        current = await self._desired()
        step = 1 if role is Role.DECODE else -1
        # The order goes first: the launcher reads both together, and must not pick another worker for the new ratio.
        await self._registry.order_role(worker_id, role)
        decode = max(0 if force else 1, current.decode + step)
        await self._registry.set_desired(max(0, current.prefill - step), decode, "role")
        return True

    async def drain(self, worker_id: str, force: bool) -> bool:
        """Order a drain, and lower the desired ratio with it. False when it drains already."""
        workers = await self._seen()
        worker = self._one(worker_id, workers)
        if worker.leaving:
            return False
        await self._guard(worker_id, workers, force, "drain")
        current = await self._desired()
        await self._registry.order_drain(worker_id)
        prefill = current.prefill - (worker.role is Role.PREFILL)
        decode = current.decode - (worker.role is Role.DECODE)
        await self._registry.set_desired(max(0, prefill), max(0 if force else 1, decode), "drain")
        return True

    async def status(self) -> dict[str, Any]:
        """What a frontend's `/fleet` says; where none answers, the registry, which knows no loads (null)."""
        urls = [self.handle.url] if self.handle.url else []
        found = [frontend.url for frontend in (await self._registry.frontends()).values()]
        # The loopback address of another host is ours here, and whoever listens there is another fleet's.
        urls += [url for url in found if not _is_loopback(url) or _is_loopback(self.handle.redis_url)]
        # No secret is sent, and a frontend's certificate may be known to its clients only.
        async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False, verify=False) as client:
            for url in dict.fromkeys(urls):
                with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                    answer = await client.get(f"{url}/fleet")
                    if answer.status_code == httpx.codes.OK:
                        seen: dict[str, Any] = answer.json()
                        return seen
        return await self._status_from_registry()

    async def _status_from_registry(self) -> dict[str, Any]:
        workers = sorted((await self._registry.workers()).values(), key=lambda info: (info.role.value, info.id))
        depth, desired = await self.queue.depth(), await self._registry.desired()
        return {
            "model": workers[0].identity.model if workers else None,
            "workers": msgspec.to_builtins([WorkerStatus.of(info) for info in workers]),
            "queue": msgspec.to_builtins(depth),
            "desired": msgspec.to_builtins(desired),
        }

    async def _seen(self) -> list[SeenWorker]:
        orders = await self._registry.orders()
        seen = []
        for worker_id, info in (await self._registry.workers()).items():
            order = orders.get(worker_id)
            seen.append(see(info, order.role if order else None, bool(order and order.drain), owned=False))
        return seen

    async def _desired(self) -> DesiredRatio:
        """The ratio that was set; in a fleet without a launcher, the ratio that is there."""
        desired = await self._registry.desired()
        if desired is None:
            roles = [worker.role for worker in await self._seen() if not worker.leaving]
            desired = DesiredRatio(roles.count(Role.PREFILL), roles.count(Role.DECODE))
        return desired

    def _one(self, worker_id: str, workers: list[SeenWorker]) -> SeenWorker:
        for worker in workers:
            if worker.id == worker_id:
                return worker
        there = ", ".join(sorted(worker.id for worker in workers)) or "nobody"
        raise Refused(f"worker {worker_id!r} is not in the fleet; there: {there}")

    async def _guard(self, worker_id: str, workers: list[SeenWorker], force: bool, command: str) -> None:
        """Raises Refused for the last worker of a role while it is needed, unless forced."""
        if force:
            return
        if is_last_decode(worker_id, workers):
            raise Refused(
                f"{worker_id}: is the last decode worker that is ready; without it no request is answered. Start "
                f"another first (`orchestrator scale`), or repeat `orchestrator {command}` with --force"
            )
        prefill = [w.id for w in workers if w.role is Role.PREFILL and w.ready and not w.leaving]
        waiting = (await self.queue.depth()).requests
        if prefill == [worker_id] and waiting:
            raise Refused(
                f"{worker_id}: is the last prefill worker that is ready, and {waiting} prefills wait for it. Repeat "
                f"`orchestrator {command}` with --force to prefill them on decode workers"
            )


def _is_loopback(url: str) -> bool:
    """A unix socket counts: who reaches it is on its host."""
    host = urlsplit(url).hostname
    if host is None or host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


@contextlib.asynccontextmanager
async def open_fleet(handle: FleetHandle) -> AsyncIterator[FleetOperator]:
    """Raises Refused when its Redis cannot be used."""
    try:
        redis = await connect(handle.redis_url, _REDIS_TIMEOUT_S)
        try:
            config = handle.config.queue if handle.config else QueueConfig()
            queue = PrefillQueue(redis, handle.namespace, config)
            yield FleetOperator(handle, Registry(redis, handle.namespace), queue)
        finally:
            await redis.aclose()
    except (RedisAway, UnknownWorker) as error:
        raise Refused(str(error)) from None
