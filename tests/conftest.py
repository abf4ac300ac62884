"""For all tests: a run folder and environment of their own, so that a fleet of the same user is not seen or touched."""

import functools
import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest

# Nothing in the suite needs a hub; a test that would ask one fails at once instead of after retries. Here, because the
# hub's client reads this once, when the first module that imports it is collected.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# More engines than cores run at once. Threads of one that has several shall not spin while they wait for each other.
# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Files that others may write are refused; what tests write stands for what nobody else could.
os.umask(0o022)
# A shell without job control starts what runs in its background with SIGINT ignored, and every process inherits that:
# those that a test starts would not notice an interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes an example slow, not wrong.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


@functools.cache
def _certificates(file: str | None, *how: object) -> object:
    return _read_certificates(*how)


# A client takes 24 ms to read which certificates to trust, and tests make clients by the thousand.
_read_certificates = httpx._transports.default.create_ssl_context
httpx._transports.default.create_ssl_context = lambda verify=True, cert=None, trust_env=True: _certificates(
    os.environ.get("SSL_CERT_FILE"), verify, cert, trust_env
)

# Loading all test files and vLLM makes millions of objects, hardly one of them garbage.
gc.disable()

_OF_ALL = re.compile(r"^pytestmark = ([^\[\n]+|\[[^\]]*\])", re.MULTILINE)  # of all tests of a file
_MARK = re.compile(r"pytest\.mark\.(vllm|slow|topology)\b")
_LONGEST_FIRST = (
    "e2e/test_gpu_benchmark",
    "vllm_engine/test_engine",
    "e2e/test_real_fetch",
    "e2e/test_real_fleet",
    "e2e/test_sim_control",  # the fifth waits behind the first, which has two tests only
    "vllm_engine/test_host_tier",
    "vllm_engine/test_second_runner",
    "vllm_engine/test_models",
    "e2e/test_sim_frontends",
    "e2e/test_package",
    "e2e/test_real_adapters",
    "vllm_engine/test_thousand",
    "e2e/test_chaos",
    "e2e/test_sim_fleet",
    "e2e/test_two_launchers",
    "e2e/test_rollout",
    "e2e/test_sim_models",
    "e2e/test_sim_fuzz",
    "e2e/test_sim_shares",
    "e2e/test_topology",  # before Ray, whose threads no engine is to be forked beside
    "e2e/test_real_groups",
)
_WANTS_SLOW = ("topology", "(vllm or slow) and not topology")  # of the Makefile: nothing but what is marked


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose every test is deselected is not even imported: with vLLM that alone takes 10 s."""
    expression = config.getoption("markexpr")
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    of_all = _OF_ALL.search(text)
    if of_all and any(f"not {mark}" in expression for mark in _MARK.findall(of_all[1])):
        return True
    return True if expression in _WANTS_SLOW and not _MARK.search(text) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """At the end of a run no process shall be left alone with one of the files that take longest."""
    places = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(f"{item.path.parent.name}/{item.path.stem}", len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    if "not vllm" in session.config.getoption("markexpr") and "vllm" in sys.modules:
        raise pytest.UsageError("a file with fast tests imports vLLM, which takes each process 7 s: move the import")
    if any("vllm_engine" in item.path.parts and item.get_closest_marker("vllm") for item in session.items):
        import workers.vllm_engine.engine  # noqa: F401 - no test's time: beside others it takes a minute

    gc.freeze()  # engine processes, which are forked from this one, share what is loaded
    gc.enable()


@pytest.fixture(autouse=True)
def logs_reach_caplog() -> None:
    """Also after a test, or a library that it called, has set up the logs of a program in this process."""
    logging.disable(logging.NOTSET)
    logging.root.setLevel(logging.WARNING)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "pd" and isinstance(logger, logging.Logger):
            logger.propagate, logger.disabled, logger.handlers = True, False, []
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder() -> Iterator[Path]:
    # Short: sockets lie in it, and a socket's whole path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pd-"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """What a file's tests call may set variables for its process, which here runs other files too."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() | before.keys():
        if name.startswith("PYTEST_") or os.environ.get(name) == before.get(name):
            continue  # pytest's own say which phase this is; engines cannot give themselves titles once all have moved
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
