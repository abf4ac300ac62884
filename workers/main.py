"""Console scripts `prefill-worker` and `decode-worker`: one worker process that joins a fleet by itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

from orchestrator.config.engine_args import check_workers_environment, environment
from orchestrator.config.settings import ConfigError
from orchestrator.config.shared import differences
from orchestrator.process.command_line import CommandLine
from orchestrator.process.parent import (
    EXIT_AGAIN,
    die_with_parent,
    ending_signals,
    has_ended,
    own_identity,
    report_exit,
)
from orchestrator.process.tasks import cancelled
from orchestrator.process.telemetry.logs import set_up as set_up_logging
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.configuration import Version
from orchestrator.store.fields import Launcher
from orchestrator.store.planned import BY_HAND
from orchestrator.store.registry import IncompatibleWorker, Registry
from orchestrator.types import Role
from orchestrator.wire.addresses import Listening, hold_port
from workers.agent import Agent
from workers.arguments import WorkerSettings, listening_at, parse
from workers.engine import Engine, EngineStartFailed
from workers.peers import IdInUse, refuse_duplicate_id
from workers.unit.lifecycle import LifecycleState
from workers.unit.link import GroupLink

log = logging.getLogger("pd.worker")

EXIT_FAILED, EXIT_USAGE = 1, 2


def prefill_main() -> None:
    """The console script `prefill-worker`."""
    sys.exit(main(Role.PREFILL, sys.argv[1:]))


def decode_main() -> None:
    """The console script `decode-worker`."""
    sys.exit(main(Role.DECODE, sys.argv[1:]))


def main(role: Role, arguments: list[str]) -> int:
    """Returns the exit code: 0 left in order, 1 the engine failed, 2 the configuration cannot work, 75 start it again.

    A supervisor starts the worker again after every code but 0 and 2.
    """
    final = False
    try:
        parsed = parse(role, arguments)
        if parsed.die_with_parent:
            die_with_parent(parsed.config.launcher.stop_timeout_s)
        own = parsed.config
        if parsed.generation is None:
            parsed = _with_rolled_out_config(parsed, arguments)
        os.environ.update(environment(parsed.config, role))
        check_workers_environment(parsed.config, role)
        logging = parsed.config.logging
        set_up_logging(parsed.worker_id, logging.format, logging.level)
        if keys := ", ".join(differences(own, parsed.config)):
            log.warning(
                "configuration %d was rolled out: its values go before this worker's of %s", parsed.generation, keys
            )
        return uvloop.run(_run(parsed))
    except (ConfigError, IncompatibleWorker) as error:
        why, code, final = str(error), EXIT_USAGE, True
    except (RedisAway, IdInUse) as error:
        why, code = str(error), EXIT_AGAIN
    except OSError as error:
        mend = "; free it, or choose another --kv-port" if error.errno == errno.EADDRINUSE else ""
        why, code = f"{error}{mend}", EXIT_AGAIN
    except EngineStartFailed as error:
        why, code = str(error), EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    report_exit(f"{role.value}-worker", why, final)
    return code


def _with_rolled_out_config(own: WorkerSettings, arguments: list[str]) -> WorkerSettings:
    """The settings of a worker that was started by hand: the configuration of the last rollout overrides its file.

    Errors of its own configuration are raised first, whether Redis answers or not. Raises ConfigError, RedisAway.
    """
    check_workers_environment(own.config, own.role)
    _listen(own)[1].close()
    version = asyncio.run(_rolled_out(own))
    return own if version is None else parse(own.role, arguments, version)


async def _rolled_out(parsed: WorkerSettings) -> Version | None:
    """The configuration of the last rollout; None if there was none. Raises RedisAway."""
    async with await connect(parsed.redis_url, parsed.config.redis.timeout_s) as redis:
        rollout = await Registry(redis, parsed.config.namespace).rollout.read()
        return rollout.target if rollout is not None else None


def _listen(parsed: WorkerSettings) -> tuple[Listening, contextlib.ExitStack, int]:
    """Where this worker listens, and a free port there, reserved until the stack is closed. Raises ConfigError,
    RedisAway."""
    listening = listening_at(parsed)
    try:
        return listening, *hold_port(listening.bind, listening.ports)
    except OSError as error:
        raise ConfigError(
            f"--bind (workers.bind), workers.ports: cannot listen at {parsed.bind!r} ({error.strerror}); name an "
            "address of this host, or more ports"
        ) from None


async def _run(parsed: WorkerSettings) -> int:
    """Raises ConfigError, RedisAway, IncompatibleWorker, IdInUse, EngineStartFailed, OSError."""
    config = parsed.config
    listening, held, free_port = _listen(parsed)
    redis = await connect(parsed.redis_url, config.redis.timeout_s)
    holding: asyncio.Task[None] | None = None
    link: GroupLink | None = None
    try:
        # Before the id is claimed: nothing renews a claim while vLLM is imported, which may take two minutes.
        engine = _engine(parsed, listening, parsed.kv_port or free_port)
        if not parsed.id_claimed:
            await _claim_id(Registry(redis, config.namespace), parsed)
        await redis.aclose()  # connects again when needed; a forked engine process would inherit the connection
        generation = parsed.generation or 0
        link = GroupLink(config, redis, parsed.worker_id, parsed.ranks, listening, generation)
        agent = Agent(engine, redis, config, parsed.worker_id, parsed.role, listening, generation, link)
        loop = asyncio.get_running_loop()
        # A launcher kills after stop_timeout_s; a service manager waits until the worker has drained.
        supervised = parsed.die_with_parent
        leave_s = config.launcher.stop_timeout_s / 2 if supervised else config.workers.drain_timeout_s
        for number in ending_signals():
            loop.add_signal_handler(number, agent.request_stop, leave_s)
        if not parsed.id_claimed:
            holding = asyncio.create_task(_hold_id(agent, parsed), name="hold-id")
        async with _probes(
            listening.bind, parsed.health_port, lambda: agent.joined and agent.life.state is LifecycleState.READY
        ):
            return await agent.run()
    finally:
        await cancelled(holding)
        if holding is None and not parsed.id_claimed:  # it gives the id back at its own end
            await _give_id_back(parsed)
        if link is not None:
            await link.close()
        await redis.aclose()
        held.close()


@contextlib.asynccontextmanager
async def _probes(host: str, port: int | None, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """A port that tells whoever watches this process, such as Kubernetes, whether it lives and is ready, over HTTP.
    Answers while the context lasts; does nothing without a port. Raises OSError where it cannot be listened on.

    `/live` is 200 as long as the event loop turns, since that is what answers; `/ready` is 200 or 503.
    """
    if port is None:
        yield
        return
    from aiohttp import web  # whose import costs more than most processes' use of it

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def is_ready(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if ready() else web.Response(text="not ready\n", status=503)

    app = web.Application()
    app.add_routes([web.get("/live", live), web.get("/ready", is_ready)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise OSError(f"--health-port {port}: cannot be listened on ({error.strerror}); choose another") from None
        yield
    finally:
        await runner.cleanup()


async def _claim_id(registry: Registry, parsed: WorkerSettings) -> None:
    """Claim this worker's id before the model is loaded, which may take minutes. Raises IdInUse, RedisAway."""
    worker_id, ttl_s = parsed.worker_id, parsed.config.workers.timeout_s
    if await registry.claim_id(BY_HAND + own_identity(), parsed.role, ttl_s, worker_id):
        return
    other = await registry.worker(worker_id)
    await refuse_duplicate_id(other)
    # The entry, or the claim, of a dead predecessor expires after seconds.
    for holder, held in (await registry.launchers()).items():
        if worker_id in held.workers and has_ended(holder.removeprefix(BY_HAND)):
            await registry.leave_launcher(holder)
    if other is not None:
        await registry.leave(worker_id, other.kv.engine_id)
    if not await registry.claim_id(BY_HAND + own_identity(), parsed.role, ttl_s, worker_id):
        raise IdInUse(
            f"worker id {worker_id!r} is in use by a worker that is loading, or was when the entries of many ran out "
            "together, which may be back within seconds; choose another --id, or start it again"
        )


async def _hold_id(agent: Agent, parsed: WorkerSettings) -> None:
    """Renew the claim of the id until the worker is registered. Gives the id back at the end, also if cancelled."""
    workers, me, held = parsed.config.workers, BY_HAND + own_identity(), Launcher({parsed.worker_id: parsed.role})
    try:
        while not agent.joined:
            await _call_registry(parsed, lambda registry: registry.refresh_launcher(me, held, workers.timeout_s))
            await asyncio.sleep(workers.heartbeat_s)
    finally:
        await _give_id_back(parsed)


async def _give_id_back(parsed: WorkerSettings) -> None:
    await _call_registry(parsed, lambda registry: registry.leave_launcher(BY_HAND + own_identity()))


async def _call_registry(parsed: WorkerSettings, what: Callable[[Registry], Awaitable[None]]) -> None:
    """Make one call to the registry on a connection of its own. Ignores RedisAway: the next call repeats it."""
    with contextlib.suppress(RedisAway):
        async with await connect(parsed.redis_url, parsed.config.redis.timeout_s) as redis:
            await what(Registry(redis, parsed.config.namespace))


def _engine(parsed: WorkerSettings, listening: Listening, kv_port: int) -> Engine:
    config = parsed.config
    # Unique per process start, so that a restarted worker is never taken for its predecessor.
    engine_id = f"{parsed.worker_id}-{uuid.uuid4().hex[:8]}"
    common: dict[str, Any] = {
        "engine_id": engine_id,
        "kv_host": listening.bind,
        "kv_advertise": listening.reached_at,
        "kv_port": kv_port,
        "kv": config.kv,
        "tpot_s": config.slo.tpot_s,
    }
    if config.engine == "sim":
        from orchestrator.config.simulated import simulated
        from workers.sim.engine import SimEngine

        if parsed.cores:
            os.sched_setaffinity(0, parsed.cores)
        log.info("simulated engine: times and tokens are made up")
        return SimEngine(simulated(config.sim, parsed.engine_args), config.model, **common)
    from orchestrator.config.model import resolve_model

    gc.disable()  # loading vLLM makes a million objects, hardly one of them garbage
    from workers.vllm_engine.engine import VllmEngine
    from workers.vllm_engine.interfaces import interfaces_here, ucx_settings
    from workers.vllm_engine.launch import Setup

    gc.freeze()  # an engine process that is forked shares them
    gc.enable()
    settings = ucx_settings((listening.reached_at, listening.bind), interfaces_here(), config.workers.ports)
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    common |= {"cores": parsed.cores or None, "encrypted": config.security.mesh == "curve"}
    return VllmEngine(Setup(model=resolve_model(config.model), engine_args=parsed.engine_args, **common))


if __name__ == "__main__":
    # The same without the console scripts.
    command_line = CommandLine(prog="workers.main", description="Run one worker of this role; see ROLE --help.")
    command_line.add_argument("role", choices=[role.value for role in Role])
    sys.exit(main(Role(command_line.parse_args(sys.argv[1:2]).role), sys.argv[2:]))
