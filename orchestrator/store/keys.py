"""Names of everything in Redis: keys, and the function libraries that work on them. No I/O but reading Lua files."""

from __future__ import annotations

import hashlib
from functools import partialmethod
from importlib import resources

# As of lua/registry/begin.lua, for what is written without a function: how long it outlives the last member, seconds.
KEPT_S, LEVELS_S = 86_400, 60


class Keys:
    """Names of everything in Redis. The braces are the cluster hash tag: one namespace lives in one slot."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"pd:{{{namespace}}}:"
        self.queue = f"{self.prefix}queue"
        self.queued_tokens = f"{self.prefix}queued_tokens"
        self.leases = f"{self.prefix}leases"
        self.workers = f"{self.prefix}workers"
        self.frontends = f"{self.prefix}frontends"
        self.desired = f"{self.prefix}desired"
        self.events = f"{self.prefix}events"
        self.frontends_told = f"{self.prefix}frontends_told"  # a channel
        self.log_levels = f"{self.prefix}log_levels"

    def _named(self, kind: str, name: str) -> str:
        return f"{self.prefix}{kind}:{name}"

    job = partialmethod(_named, "job")  # by the request's id
    claims = partialmethod(_named, "claims")  # by the worker's
    worker = partialmethod(_named, "worker")
    rendezvous = partialmethod(_named, "rendezvous")  # by the unit's
    frontend = partialmethod(_named, "frontend")
    frontend_key = partialmethod(_named, "frontend_key")  # by its public key
    orders = partialmethod(_named, "orders")  # a channel, like `wake` and `events`
    wake = partialmethod(_named, "wake")  # by the waiter's


class Library:
    """A Redis function library: the files of a folder of `store/lua`, one after the other. Its functions are named by a
    hash of its text.

    So two releases that share a server call their own functions each, and so do two namespaces of one release, which
    differ in KEYS[1] only.
    """

    def __init__(self, name: str, *parts: str) -> None:
        """`parts`: its files without `.lua`. Each uses what those before it define."""
        folder = resources.files("orchestrator.store") / "lua" / name
        text = "\n".join((folder / f"{part}.lua").read_text() for part in parts)
        version = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]
        self.name = f"pd_{name}_{version}"
        self.text = text.replace("VERSION", version)

    def function(self, verb: str) -> str:
        """Its name on the server."""
        return f"{self.name}_{verb}"


QUEUE = Library("queue", "begin", "jobs", "waiters", "enqueue", "claim", "leases", "views", "verbs")
REGISTRY = Library("registry", "begin", "index", "compare", "members", "steering", "verbs")
