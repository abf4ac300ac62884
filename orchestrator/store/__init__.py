"""What the fleet shares in Redis: the prefill queue and the registry, each with its Lua functions."""

from __future__ import annotations

import sys

# redis-py imports OpenTelemetry where that is installed, for metrics of its own that nobody here asks for: a third of
# the time of its import, which every command that needs Redis waits for.
_UNUSED = [name for name in ("opentelemetry.metrics", "opentelemetry.sdk.metrics") if name not in sys.modules]
try:
    sys.modules.update(dict.fromkeys(_UNUSED))  # type: ignore[arg-type]  # who imports them learns they are not there
    import redis.asyncio  # noqa: F401
finally:
    for _name in _UNUSED:
        del sys.modules[_name]
