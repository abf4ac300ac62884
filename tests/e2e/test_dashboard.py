"""The dashboard in a real browser, over a fleet of simulated engines: it loads, follows the fleet, and steers it."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support_fleet import RunningFleet, running_fleet, token_prompt
from support_tools import program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FOLLOWS_WITHIN = 3  # samples, one each second: a change is heard within a second, and told with the sample after it
SETTLES_WITHIN_MS = 60_000


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    classes = "slo.classes={chat: {ttft_s: 20, tpot_s: 10}, hasty: {ttft_s: 0.0001}}"
    with running_fleet("sim-2p2d.yaml", "routing.remote_prefill_min_tokens=100", classes) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, as `.ci/run` installs it."""
    chromium = program("chromium", "chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


class Looking:
    """A page, and what it complained of or asked of others."""

    def __init__(self, browser: Any, fleet: RunningFleet, width: int = 1400, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(httpx.URL(request.url).host))
        self.page.goto(f"{fleet.url}/dashboard")
        self.page.wait_for_selector('#live.on:text("live")', timeout=SETTLES_WITHIN_MS)
        self.page.wait_for_selector("article.worker", timeout=SETTLES_WITHIN_MS)

    def _said(self, message: Any) -> None:
        refused = "/operator/" in message.location["url"]  # Chromium itself notes each answer above 399
        if message.type in ("error", "warning") and not refused:
            self.wrong.append(message.text)

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []
        assert self.asked <= {"127.0.0.1", ""}, "an outside address was asked"


@pytest.fixture
def look(browser: Any, fleet: RunningFleet) -> Iterator[Any]:
    opened: list[Looking] = []

    def open_page(**options: Any) -> Any:
        opened.append(Looking(browser, fleet, **options))
        return opened[-1].page

    yield open_page
    for page in opened:
        page.close()


def ask(fleet: RunningFleet, prompts: list[Any], max_tokens: int) -> None:
    """In a thread of its own: the browser's driver has this one's event loop."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(fleet.ask_all(prompts, 4, max_tokens))).result()


def until(page: Any, condition: str) -> None:
    """Waits for a JavaScript condition. The page's own security policy refuses what `wait_for_function` would do."""
    deadline = time.monotonic() + SETTLES_WITHIN_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {SETTLES_WITHIN_MS} ms: {condition}"
        page.wait_for_timeout(100)


def samples(page: Any) -> int:
    return int(page.evaluate("document.body.dataset.samples"))


def test_the_fleet_and_its_requests_are_shown(fleet: RunningFleet, look: Any, tmp_path: Path):
    page = look()
    assert page.locator("#prefill-pool article").count() == page.locator("#decode-pool article").count() == 2
    prompts = [token_prompt(1500, seed=seed) for seed in range(24)]
    ask(fleet, prompts, 60)
    page.wait_for_selector('#slowest td.how:has-text("remote (long_prompt)")', timeout=SETTLES_WITHIN_MS)
    assert {"prefill", "transfer", "decode"} <= set(
        page.locator("#slowest .stagebar i").evaluate_all("parts => parts.map(part => part.className)")
    )
    # Each plot has a line with points.
    until(page, "document.querySelectorAll('.plot .js-line').length >= 8")
    page.screenshot(path=tmp_path / "dashboard.png", full_page=True)


def test_shares_within_objectives_are_shown_by_class(fleet: RunningFleet, look: Any, tmp_path: Path):
    page = look()
    for name in ("chat", "hasty"):
        body = {"model": fleet.model, "prompt": token_prompt(500, seed=7), "max_tokens": 20}
        fleet.http.post("/v1/completions", json=body, headers={"x-slo-class": name}).raise_for_status()
    until(page, "document.getElementById('plots').innerText.includes('hasty')")
    plot = page.locator('.plot:has-text("Within objectives")')
    assert {"chat", "hasty"} <= set(plot.locator(".legendtext").all_text_contents())
    said = fleet.cli("status").stdout
    assert "within objectives in the last minute: chat 100.0%, hasty 0.0%" in said, said
    page.screenshot(path=tmp_path / "classes.png", full_page=True)


def test_transfers_are_drawn_while_they_happen(fleet: RunningFleet, look: Any):
    page = look()
    page.evaluate(
        "window.seen = new Set(); new MutationObserver(() => document.querySelectorAll('#flows path')"
        ".forEach(path => seen.add(path.dataset.flow))).observe(document.getElementById('flows'), {childList: true})"
    )
    prompts = [token_prompt(1000, seed=100 + seed) for seed in range(30)]
    ask(fleet, prompts, 40)
    until(page, "seen.size > 0")
    ids = {worker["id"] for worker in fleet.workers()}
    flows = page.evaluate("[...seen]")
    assert all(set(flow.split()) <= ids for flow in flows), flows


def test_orders_are_confirmed_carried_out_and_followed(fleet: RunningFleet, look: Any):
    page = look()
    page.fill("#scale [name=prefill]", "1")
    page.fill("#scale [name=decode]", "3")
    page.click("#scale button")
    assert "1 prefill and 3 decode workers?" in page.inner_text("#question")
    assert fleet.fleet()["desired"]["prefill"] == 2, "nothing happens before it is confirmed"
    with page.expect_response("**/operator/scale"):
        page.click("#do")
    before = samples(page)  # of a busy machine the order may take seconds
    shown = page.locator("#desired:has-text('1 prefill, 3 decode (scale')")
    shown.wait_for(timeout=SETTLES_WITHIN_MS)
    assert samples(page) - before <= FOLLOWS_WITHIN
    fleet.until(lambda: fleet.shape() == (1, 3), "1P3D")
    until(page, "document.querySelectorAll('#decode-pool article:not(.not-ready)').length === 3")
    worker = fleet.workers("decode")[-1]["id"]
    page.click(f'[data-worker="{worker}"] button.role')
    assert f"{worker} becomes a prefill worker?" in page.inner_text("#question")
    page.click("#do")
    fleet.until(lambda: fleet.shape() == (2, 2), "2P2D again")
    page.wait_for_selector(f'#prefill-pool [data-worker="{worker}"]', timeout=SETTLES_WITHIN_MS)


def test_refusal_is_shown_in_dialog(fleet: RunningFleet, look: Any):
    page, before = look(), fleet.fleet()["desired"]["decode"]
    page.evaluate("document.querySelector('#scale [name=decode]').min = 0")
    page.fill("#scale [name=decode]", "0")
    page.click("#scale button")
    page.click("#do")
    page.wait_for_selector('#refused:has-text("decode=0: expected an integer >= 1")', timeout=SETTLES_WITHIN_MS)
    page.click("#confirm [value=no]")
    assert fleet.fleet()["desired"]["decode"] == before


def test_it_fits_a_phone_in_the_dark(fleet: RunningFleet, look: Any):
    page = look(width=390, dark=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"


def test_the_stream_begins_with_the_last_hour(fleet: RunningFleet):
    with httpx.stream("GET", f"{fleet.url}/fleet/stream", timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: history"
        columns = json.loads(next(lines).removeprefix("data: "))
        assert len({len(column) for column in columns.values()}) == 1
        assert next(line for line in lines if line) == "event: sample"
        assert json.loads(next(lines).removeprefix("data: "))["model"] == fleet.model
