"""A port that tells whoever watches this process, such as Kubernetes, whether it lives and is ready, over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable


@contextlib.asynccontextmanager
async def probes(host: str, port: int | None, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Answers while the context lasts; does nothing without a port. Raises OSError where it cannot be listened on.

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
