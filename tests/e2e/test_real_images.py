"""Images through a whole fleet: fetched by the frontend, encoded by prefill, answered by decode, token by token the
same as where one engine does it all."""

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support_fleet import RunningFleet, running_fleet
from support_images import picture, vision_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def png(seed: int) -> bytes:
    data = io.BytesIO()
    picture(seed).save(data, "PNG")
    return data.getvalue()


def by_value(seed: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"


@pytest.fixture(scope="module")
def host():
    """A server of images on loopback, which only the frontends are permitted to ask."""

    class Images(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png(int(self.path.strip("/"))))

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Images) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    model = vision_model(tmp_path_factory.mktemp("model") / "vision")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /reset_prefix_cache
        with running_fleet(
            "demo-1p1d-cpu.yaml",
            f"model={model}",
            "workers.engine_args.block_size=32",
            "workers.engine_args.max_model_len=2048",
            "workers.engine_args.kv_cache_memory_bytes=16777216",
            "routing.remote_prefill_min_tokens=16",
            "kv.verify=true",
            'frontend.server_args.allowed_media_domains=["127.0.0.1"]',
        ) as running:
            yield running
            running.assert_no_leaks()


def asked(fleet: RunningFleet, *urls: str, words: str, stream: bool = False, local: bool = False, tokens: int = 12):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": fleet.model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": words}, *parts]}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        # Log-probabilities of the prompt are computed where the answer is.
        **({"prompt_logprobs": 0} if local else {}),
    }
    answer = fleet.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_one_engine(fleet: RunningFleet, host: str, stream: bool):
    cases = [[by_value(1)], [f"{host}/2"], [by_value(1), f"{host}/2", by_value(1)]]
    for number, urls in enumerate(cases):
        words = f"t{10 + number} t{20 + stream} t30"
        remote = fleet.metric("pd_placements_total", decision="remote")
        found = asked(fleet, *urls, words=words, stream=stream)
        assert fleet.metric("pd_placements_total", decision="remote") == remote + 1
        assert found == asked(fleet, *urls, words=words, local=True)
    assert asked(fleet, by_value(3), words="t9") != asked(fleet, by_value(4), words="t9")
    assert fleet.metric("pd_retries_total") == 0


def test_the_same_image_is_a_hit_and_another_is_not(fleet: RunningFleet):
    """The prefix index decides by it: a prompt that is cached where it decodes is not sent away."""
    cached = fleet.metric("pd_prefix_hit_tokens_total")
    asked(fleet, by_value(11), by_value(12), words="t77")

    def again(*seeds: int) -> float:
        nonlocal cached
        before = cached
        asked(fleet, *map(by_value, seeds), words="t77")
        cached = fleet.metric("pd_prefix_hit_tokens_total")
        return cached - before

    fleet.until(lambda: again(11, 12) >= 32, "a hit of the same images")
    assert again(13, 12) == 0


def test_an_answer_whose_kv_is_lost_goes_on_with_its_pixels(fleet: RunningFleet):
    answers: list[str] = []
    asking = threading.Thread(
        target=lambda: answers.append(asked(fleet, by_value(21), words="t88", stream=True, tokens=1500))
    )
    decoding = fleet.metric("pd_placements_total", decision="remote")
    asking.start()
    fleet.until(lambda: fleet.metric("pd_placements_total", decision="remote") > decoding, "its placement")
    while not answers and not fleet.metric("pd_retries_total"):
        fleet.http.post("/reset_prefix_cache", params={"reset_running_requests": True})
    asking.join()
    assert fleet.metric("pd_retries_total", why="engine_error") == 1
    assert answers[0] == asked(fleet, by_value(21), words="t88", local=True, tokens=1500)
