"""The app of one model: what is read for it, and that its chat template is the one that vLLM takes."""

import json
import shutil
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry
from support_served import Scripted
from transformers import AutoTokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers.hf import resolve_chat_template
from vllm.usage.usage_lib import UsageContext
from vllm.v1.metrics.loggers import PrometheusStatLogger

from orchestrator.config.model import resolve_model
from orchestrator.config.settings import parse_config
from orchestrator.frontend.models import app
from orchestrator.frontend.models.app import build_model_app, build_vllm_config

pytestmark = pytest.mark.vllm

# A processor of sound, in the folder of a text model: one that transformers makes of these files.
PROCESSOR = {
    "preprocessor_config.json": {
        "processor_class": "CsmProcessor",
        "feature_extractor_type": "EncodecFeatureExtractor",
    },
    "chat_template.json": {"chat_template": "of the processor"},
}


def test_steps_are_as_large_as_those_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """By them vLLM refuses images before they reach an engine. Engines are made for this use; see `test_launch.py`."""
    use = UsageContext.OPENAI_API_SERVER
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", lambda *_: ({use: 1024}, {use: 64}))
    _, vllm_config = build_vllm_config(parse_config({"model": "demo", "engine": "sim"}))
    steps = vllm_config.scheduler_config
    assert (steps.max_num_batched_tokens, steps.max_num_seqs) == (1024, 64)


@pytest.mark.parametrize(
    ("processor", "reads", "template"), [({}, 1, "of the tokenizer"), (PROCESSOR, 2, "of the processor")]
)
async def test_a_tokenizer_is_read_twice_only_for_a_processor(
    processor: dict[str, object], reads: int, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Path(resolve_model("demo"))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo / name, tmp_path / name)
    of_tokenizer = json.loads((demo / "tokenizer_config.json").read_text()) | {"chat_template": "of the tokenizer"}
    for name, content in (processor | {"tokenizer_config.json": of_tokenizer}).items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # as other tests of this process have it
    read = Mock(wraps=AutoTokenizer.from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read)
    core = Scripted()
    monkeypatch.setattr(app, "FleetCore", lambda *_: core)
    config = parse_config({"model": str(tmp_path), "engine": "sim"})
    args, vllm_config = build_vllm_config(config)
    made = await build_model_app(args, vllm_config, config, MagicMock(), CollectorRegistry(), PrometheusStatLogger)
    engine = made.state.engine_client
    tokenizer = engine.renderer.tokenizer
    assert read.call_count == reads
    assert resolve_chat_template(tokenizer, None, None, model_config=vllm_config.model_config) == template
    engine.shutdown()
