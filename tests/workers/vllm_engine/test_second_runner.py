"""vLLM's second model runner, which it has on GPUs, passes tests of the first one. Its kernels are interpreted here."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support_vllm import Driver, frames
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from workers.engine import InvalidEngineRequest

# Of the inner runs, which take minutes beside others.
INNER_S = 1500.0
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(INNER_S + 600)]

ROOT = Path(__file__).parents[3]
TRITON = "triton==3.9.0"
SECOND = "VLLM_USE_V2_MODEL_RUNNER"
HERE = "tests/workers/vllm_engine"
# In one run, of which each loads vLLM. Tests have their whole names: one that is not found is an error.
CHOSEN = (
    "test_second_runner.py::test_a_request_that_it_would_die_of_is_refused_and_it_goes_on",
    "test_first_token.py",
    "test_engine.py::test_remote_prefill_gives_the_tokens_of_a_local_one",
    "test_engine.py::test_prefix_hits_on_either_side_are_used_and_counted",
    "test_engine.py::test_a_preempted_prefill_pushes_the_right_kv",
    "test_continued.py::test_an_answer_ends_as_that_of_one_engine[penalties-seeded]",  # it counts, and draws, itself
)


def triton() -> Path:
    """The folder with it, made once."""
    folder = ROOT / "build" / TRITON.replace("==", "-")
    if not folder.exists():
        beside = folder.with_name(f"{folder.name}.{os.getpid()}")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", beside, TRITON]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(beside, ignore_errors=True)
            if not os.environ.get("CI"):
                pytest.skip(f"{TRITON} cannot be installed: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
        shutil.rmtree(beside / "triton/backends/nvidia")  # compilers, a third of a GB each
        shutil.rmtree(beside / "triton/backends/amd")
        for entry_points in beside.glob("triton-*/entry_points.txt"):
            entry_points.unlink()
        with contextlib.suppress(OSError):  # another run has made it meanwhile
            beside.rename(folder)
    return folder


@pytest.mark.skipif(SECOND in os.environ, reason="this is the inner run")
def test_the_second_model_runner_passes() -> None:
    ours = f"{triton()}:{ROOT / 'tests/triton_on_cpu'}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": ours, "TRITON_INTERPRET": "1", SECOND: "1"}
    inner = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=0"]
    inner += [f"{HERE}/{name}" for name in CHOSEN]
    run = subprocess.Popen(
        inner,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = run.communicate(timeout=INNER_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, said[-20_000:]


@pytest.mark.skipif(SECOND not in os.environ, reason="of the inner run")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_it_would_die_of_is_refused_and_it_goes_on(model: Path) -> None:
    core = MsgpackDecoder(EngineCoreRequest).decode(frames([1, 2, 3], 4))
    core.sampling_params._bad_words_token_ids = [[3]] * 129
    engine = await Driver.start(model)
    with pytest.raises(InvalidEngineRequest, match="expected at most 128 bad_words, got 129"):
        await engine.decode("too many", [bytes(frame) for frame in MsgpackEncoder().encode(core)])
    core.sampling_params._bad_words_token_ids = [[3]] * 128
    await engine.decode("most", [bytes(frame) for frame in MsgpackEncoder().encode(core)])
    assert len(await engine.done("most")) == 4
    await engine.stop()
