"""Names of everything in Redis, and the Lua scripts that work on them. No I/O but reading the scripts' files."""

from __future__ import annotations

import hashlib
import re
from importlib import resources


class Keys:
    """Names of everything in Redis. The braces are the cluster hash tag: one namespace lives in one slot."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"pd:{{{namespace}}}:"
        self.queue = f"{self.prefix}queue"
        self.queued_tokens = f"{self.prefix}queued_tokens"
        self.leases = f"{self.prefix}leases"
        self.dropped = f"{self.prefix}dropped"
        self.workers = f"{self.prefix}workers"
        self.frontends = f"{self.prefix}frontends"
        self.desired = f"{self.prefix}desired"
        self.events = f"{self.prefix}events"

    def job(self, request_id: str) -> str:
        return f"{self.prefix}job:{request_id}"

    def claims(self, worker_id: str) -> str:
        return f"{self.prefix}claims:{worker_id}"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def frontend(self, frontend_id: str) -> str:
        return f"{self.prefix}frontend:{frontend_id}"

    def wake(self, waiter_id: str) -> str:
        return f"{self.prefix}wake:{waiter_id}"


class Script:
    """A Lua file of `orchestrator/store/lua` after `common.lua`, with what it includes. KEYS[1] is the key prefix."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = _lua("common") + _lua(name)
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()


def _lua(name: str) -> str:
    """The file, with others in place of its lines `-- include NAME`. A block is the scope of what it includes."""
    text = (resources.files("orchestrator.store") / "lua" / f"{name}.lua").read_text()
    return re.sub(r"^ *-- include (\w+)\n", lambda line: _lua(line[1]), text, flags=re.MULTILINE)
