"""A pytest plugin: vLLM's tests get servers of ours, and what became of each test is written to a file.

`-p vllm_api.plugin`, with VLLM_API_KIND (plain or fleet) and VLLM_API_OUTCOMES (a file) in the environment.
"""

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tests.utils as theirs

from vllm_api import hub, selection
from vllm_api.servers import Pool, Wanted

_pool = Pool(os.environ["VLLM_API_KIND"])
_outcomes = Path(os.environ["VLLM_API_OUTCOMES"])
_module = ""  # of the test that runs


class SharedServer(theirs.RemoteOpenAIServer):
    """Their server's face; the pool starts and ends it."""

    def __init__(self, model: str, vllm_serve_args: list[str], **options: Any) -> None:
        if model not in hub.NAMES and not os.path.isdir(model):
            pytest.skip(f"needs {model}, whose weights are not at hand")
        self.show_hidden_metrics = any("show-hidden-metrics" in argument for argument in vllm_serve_args)
        alone = _module in selection.ALONE
        wanted = Wanted.of(model, vllm_serve_args, options.get("env_dict"), alone)
        self.host, self.uds = "127.0.0.1", None
        self.port = _pool.get(wanted, fresh=alone).port

    def _shutdown(self) -> None:
        """Other modules may share it."""


theirs.RemoteOpenAIServer = SharedServer
# Their top conftest asks for packages that only other tests need.
_conftest = types.ModuleType("tests.conftest")
_conftest.LocalAssetServer = object  # type: ignore[attr-defined]
sys.modules["tests.conftest"] = _conftest


@pytest.fixture
def local_asset_server() -> None:
    """Serves pictures to tests that none of our models can pass."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if reason := selection.left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _module
    _module = item.nodeid.partition("::")[0]
    _pool.revive()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when != "call" and report.outcome == "passed":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    line = {"test": item.nodeid, "when": report.when, "outcome": report.outcome, "reason": reason[-3000:]}
    with _outcomes.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        line = {"test": report.nodeid, "when": "collect", "outcome": "failed", "reason": str(report.longrepr)[-3000:]}
        with _outcomes.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_sessionfinish() -> None:
    _pool.stop()
    with _outcomes.open("a") as file:
        file.write(json.dumps({"placements": _pool.placements}) + "\n")
