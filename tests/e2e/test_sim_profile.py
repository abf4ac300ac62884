"""`orchestrator profile` on a fleet of simulated engines: what it writes is what these engines have."""

import json
from pathlib import Path

import pytest
from support_fleet import running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SIZES = {"block_size": 96, "max_num_seqs": 17, "max_num_batched_tokens": 1000, "max_model_len": 3000}
BLOCKS, LINK_GB_PER_S, REMOTE_FROM = 333, 3, 1000


async def test_a_profile_has_the_sizes_of_the_engines_and_the_rate_of_their_link(tmp_path: Path) -> None:
    sets = [f"workers.engine_args.{name}={value}" for name, value in SIZES.items()]
    sets += [f"workers.engine_args.num_gpu_blocks_override={BLOCKS}", f"sim.link_gb_per_s={LINK_GB_PER_S}"]
    sets += [f"routing.remote_prefill_min_tokens={REMOTE_FROM}", "workers.prefill.replicas=1"]
    out = tmp_path / "profile.json"
    with running_fleet("sim-2p2d.yaml", *sets, "workers.decode.replicas=1") as fleet:

        def link() -> float:
            return max(worker["link_bytes_per_s"] or 0.0 for worker in fleet.fleet()["workers"])

        async with fleet.client() as client:
            assert (await fleet.ask(client, token_prompt(2000), max_tokens=2)).ok
        await fleet.soon(lambda: link() > 0, "the report of a transfer")
        done = fleet.run("profile", "--url", fleet.url, "--out", str(out), "--lengths", "32,64")
        engine = fleet.workers("decode")[0]
    assert done.returncode == 0, done.stderr
    profile = json.loads(out.read_text())
    assert {name: profile[name] for name in SIZES} == SIZES
    assert (profile["blocks"], profile["kv_bytes_per_token"]) == (BLOCKS, engine["kv_bytes_per_token"])
    assert profile["link_bytes_per_s"] == LINK_GB_PER_S * 1e9
    assert "the link is measured" in done.stdout and "the link is measured" in profile["origin"]
