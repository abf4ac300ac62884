"""Data-parallel, expert-parallel groups of vLLM engines on a CPU, with a tiny model of random experts.

Two ranks hold half of the experts each and step together. Whatever the sizes of the groups that prefill and decode,
greedy tokens are those of one engine, and of vLLM's own server with two such ranks; a rank that dies ends its group,
and no client notices. Slow: `make test-topology` runs it. PD_GROUP_REQUESTS=300 asks so many requests of each fleet.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support_client import FleetClient
from support_experts import EXPERTS, MOE_ON_CPU, experts
from support_fleet import START_TIMEOUT_S, RunningFleet, running_fleet, token_prompt
from support_plain_vllm import plain_vllm
from support_second_host import HERE, THERE, HandWorker, redis_between, running_second_host

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(900)]

ENGINE = (*EXPERTS, "workers.prefill.replicas=1", "workers.decode.replicas=1")
MODES = ("keep", "wait", "abort")  # of a pause
LENGTHS = [10, 33, 64, 100, 127, 128, 129, 200, 256, 300, 333, 480, 512, 700, 1000, 1500]
REQUESTS = int(os.environ.get("PD_GROUP_REQUESTS", len(LENGTHS)))
PROMPTS = [token_prompt(LENGTHS[i % len(LENGTHS)], seed=i) for i in range(REQUESTS)]
MAX_TOKENS, LONG = 16, 200  # of answers; none of the long ones ends before a pause comes
IDLE_CORES = 0.02


def grouped(role: str, size: int) -> Sequence[str]:
    arguments = f"workers.{role}.engine_args"
    return [f"{arguments}.data_parallel_size={size}", f"{arguments}.enable_expert_parallel=true"]


@pytest.fixture(scope="module", autouse=True)
def orders_of_vllms_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /pause
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return experts(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: str) -> list[list[int]]:
    """The answers of one engine that has all experts."""
    with running_fleet("demo-1p1d-cpu.yaml", *ENGINE, model, "workers.prefill.replicas=0") as fleet:
        return whole(fleet)


def whole(fleet: FleetClient) -> list[list[int]]:
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS))
    assert [answer.error for answer in answers if not answer.ok] == []
    return [answer.tokens for answer in answers]


def engines(fleet: RunningFleet) -> list[psutil.Process]:
    """The processes of engine cores and coordinators."""
    agents = (psutil.Process(worker["pid"]) for worker in fleet.workers())
    return [child for agent in agents for child in agent.children()]


def test_greedy_tokens_are_those_of_vllms_own_server(model: str, truth: list[list[int]], tmp_path: Path) -> None:
    """Its load balancer shares the requests among as many ranks with as many experts each."""
    arguments = "--data-parallel-size 2 --enable-expert-parallel --enforce-eager --dtype float32 --block-size 32"
    arguments += " --max-model-len 2048 --kv-cache-memory-bytes 67108864 --no-enable-prefix-caching"
    more = {"PYTHONPATH": str(MOE_ON_CPU), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with plain_vllm(model.removeprefix("model="), tmp_path / "log", *arguments.split(), **more) as server:
        assert whole(server) == truth


def most_cores(fleet: RunningFleet) -> float:
    """Of all engines the largest share of a core that one uses, over five seconds."""
    watched = engines(fleet)
    before = {process.pid: sum(process.cpu_times()[:2]) for process in watched}
    began = time.monotonic()
    time.sleep(5)  # a share of a core shows only over a time
    after = {process.pid: sum(process.cpu_times()[:2]) for process in watched}
    return max(after[pid] - before[pid] for pid in after) / (time.monotonic() - began)


def dummies(fleet: RunningFleet) -> float:
    return fleet.metric("pd_group_dummy_steps_total")


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 2)])
def test_greedy_tokens_are_those_of_one_engine(model: str, truth: list[list[int]], prefill: int, decode: int) -> None:
    sets = (*ENGINE, model, *grouped("prefill", prefill), *grouped("decode", decode))
    with running_fleet("demo-1p1d-cpu.yaml", *sets) as fleet:
        assert fleet.shape() == (prefill, decode)
        assert whole(fleet) == truth
        assert fleet.metric("pd_placements_total", decision="remote") > len(PROMPTS) // 2
        fleet.assert_no_leaks()


def test_prompts_that_a_decode_group_computes_give_the_tokens_of_one_engine(model: str, truth: list[list[int]]) -> None:
    """Its ranks cut them."""
    sets = (*ENGINE, model, *grouped("decode", 2), "workers.prefill.replicas=0")
    with running_fleet("demo-1p1d-cpu.yaml", *sets) as fleet:
        assert whole(fleet) == truth
        fleet.assert_no_leaks()


@pytest.fixture(scope="class")
def fleet(model: str) -> Iterator[RunningFleet]:
    with running_fleet("demo-1p1d-cpu.yaml", *ENGINE, model, *grouped("decode", 2)) as running:
        yield running


class TestDecodeGroup:
    def test_greedy_tokens_are_those_of_one_engine(self, fleet: RunningFleet, truth: list[list[int]]) -> None:
        assert fleet.shape() == (1, 2)
        assert whole(fleet) == truth
        fleet.until(lambda: fleet.metric("pd_group_most_tokens_total") > MAX_TOKENS, "the group's steps are counted")
        assert 0.5 <= fleet.metric("pd_group_mean_tokens_total") / fleet.metric("pd_group_most_tokens_total") <= 1
        assert fleet.metric("pd_placements_total", decision="remote") > len(PROMPTS) // 2
        fleet.assert_no_leaks()

    def test_one_busy_rank_keeps_the_others_in_step_and_an_idle_group_costs_nothing(self, fleet: RunningFleet) -> None:
        """A wave has ended when the last request has: no rank takes dummy steps."""
        fleet.assert_no_leaks()
        before = dummies(fleet)
        (answer,) = asyncio.run(fleet.ask_all(PROMPTS[:1], 1, LONG))
        assert len(answer.tokens) == LONG, answer.error
        fleet.until(lambda: dummies(fleet) > before + LONG // 2, "the other rank took dummy steps meanwhile")
        fleet.assert_no_leaks()

        def rests() -> bool:
            stood = dummies(fleet)
            return most_cores(fleet) < 2 * IDLE_CORES and dummies(fleet) == stood

        fleet.until(rests, "engines that have no requests use no core, and take no steps")

    @pytest.mark.parametrize("mode", MODES)
    async def test_paused_group_takes_no_steps_and_answers_as_before(
        self, fleet: RunningFleet, truth: list[list[int]], mode: str
    ) -> None:
        """Both ranks pause, and neither waits for the other's step."""
        async with fleet.client() as client:
            running = [asyncio.create_task(fleet.ask(client, prompt, LONG)) for prompt in PROMPTS[:8]]
            await fleet.soon(lambda: all(w["running"] for w in fleet.workers("decode")), "each rank decodes")
            assert (await client.post("/pause", params={"mode": mode})).json() == {"status": "paused"}
            held = asyncio.create_task(fleet.ask(client, PROMPTS[9], MAX_TOKENS))
            assert [task.done() for task in running] == [mode != "keep"] * len(running)
            await fleet.soon(lambda: most_cores(fleet) < 2 * IDLE_CORES, "no rank takes steps")
            assert not held.done() and (await client.get("/is_paused")).json() == {"is_paused": True}
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            assert (await held).tokens == truth[9]
            for answer, right in zip(await asyncio.gather(*running), truth, strict=False):
                assert answer.ok, answer.error
                assert len(answer.tokens) == LONG or mode == "abort"
                assert answer.tokens[:MAX_TOKENS] == right[: len(answer.tokens)]
        fleet.assert_no_leaks()

    async def test_operators_who_pause_and_resume_at_once_leave_it_serving(
        self, fleet: RunningFleet, truth: list[list[int]]
    ) -> None:
        """Neither rank waits in a pause, or in its end, for the other's."""
        asked = [("/pause", "keep"), ("/resume", ""), ("/pause", "abort"), ("/resume", ""), ("/pause", "keep")]
        async with fleet.client() as client:
            for _ in range(3):
                await asyncio.gather(*(client.post(path, params={"mode": mode}) for path, mode in asked))
                assert (await client.post("/resume")).json() == {"status": "resumed"}
                answers = await asyncio.gather(*(fleet.ask(client, prompt, MAX_TOKENS) for prompt in PROMPTS[:8]))
                assert [answer.tokens for answer in answers] == truth[:8]
        fleet.assert_no_leaks()

    @pytest.mark.parametrize(
        ("victim", "how"),
        [
            ("rank 1", signal.SIGKILL),
            ("engine 1", signal.SIGKILL),
            ("coordinator", signal.SIGKILL),
            ("rank 0", signal.SIGSTOP),
        ],
    )
    def test_group_ends_as_one_and_no_client_notices(
        self, fleet: RunningFleet, truth: list[list[int]], victim: str, how: signal.Signals
    ) -> None:
        asyncio.run(killed_under_load(fleet, truth, victim, how))


def ranks(fleet: RunningFleet) -> list[int]:
    """Process ids of the group's workers. Its role may have changed: while it is away the other worker stands in."""
    return [worker["pid"] for worker in sorted(fleet.workers(), key=lambda w: w["rank"]) if worker["ranks"] == 2]


def find(fleet: RunningFleet, victim: str) -> int:
    kind, _, rank = victim.partition(" ")
    agent = ranks(fleet)[int(rank or 0)]
    if kind == "rank":
        return agent
    named = "DPCoordinator" if kind == "coordinator" else "EngineCore"
    return next(child.pid for child in psutil.Process(agent).children() if named in " ".join(child.cmdline()))


async def killed_under_load(fleet: RunningFleet, truth: list[list[int]], victim: str, how: signal.Signals) -> None:
    group = set(ranks(fleet))
    assert len(group) == 2
    async with fleet.under_load(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS) as answers:
        await fleet.soon(lambda: len(answers) > 8, "answers")
        os.kill(find(fleet, victim), how)
        await fleet.soon(lambda: not group & {w["pid"] for w in fleet.workers()}, "all of its ranks are gone")
        seen = len(answers)
        await fleet.soon(lambda: len(answers) > seen + 8, "answers go on")
        await fleet.soon(lambda: len(ranks(fleet)) == 2 and sum(fleet.shape()) == 3, "the group is back", 180)
    assert [(a.status, a.error) for a in answers if not a.ok] == []
    assert all(answer.tokens == truth[PROMPTS.index(answer.prompt)] for answer in answers), (
        "an answer is another, or not whole"
    )
    fleet.assert_no_leaks()


def test_group_over_two_hosts_prefills_and_comes_back(
    model: str, truth: list[list[int]], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank here and one in a network namespace, started by hand; KV goes from both to a decode engine here."""
    monkeypatch.setenv("PYTHONPATH", str(MOE_ON_CPU))  # of those started by hand; workers.env is the launcher's
    sets = [*ENGINE, model, *grouped("prefill", 2), *grouped("decode", 1), "workers.prefill.replicas=0"]
    sets += ["workers.bind=auto", "security.trust_network=true"]
    with running_second_host() as there, redis_between(tmp_path_factory.mktemp("redis")) as url:
        with running_fleet("demo-1p1d-cpu.yaml", *sets, f"redis.url={url}") as fleet:
            hosts = {"p": [], "p.1": there}
            ranks = [HandWorker(fleet, name, hosts[name], "--ranks=p,p.1", role="prefill") for name in hosts]
            try:
                for _ in range(2):
                    for rank in ranks:
                        rank.until_joined(fleet, START_TIMEOUT_S)
                    assert {w["id"]: w["host"] for w in fleet.workers("prefill")} == {"p": HERE, "p.1": THERE}
                    before = fleet.metric("pd_placements_total", decision="remote")
                    assert whole(fleet) == truth
                    assert fleet.metric("pd_placements_total", decision="remote") - before > len(PROMPTS) // 2
                    fleet.assert_no_leaks()
                    (engine,) = (
                        child
                        for child in psutil.Process(ranks[1].process.pid).children(recursive=True)
                        if "EngineCore" in " ".join(child.cmdline())
                    )
                    engine.kill()
                    assert [rank.exit_code() for rank in ranks] == [1, 1]
                    for rank in ranks:
                        rank.start()
            finally:
                ranks[0].stop(*ranks[1:])
