"""A tiny model of random experts for groups of real engines on a CPU, and what such a fleet is started with."""

from pathlib import Path

from support_fleet import DEMO_VOCABULARY, with_demo_tokenizer
from support_models import special_model

ROOT = Path(__file__).parents[1]
MOE_ON_CPU = ROOT / "tests" / "moe_on_cpu"  # what vLLM's CPU build lacks
EXPERTS = (
    "workers.engine_args.dtype=float32",
    "workers.engine_args.block_size=32",
    "workers.engine_args.max_model_len=2048",
    "workers.engine_args.kv_cache_memory_bytes=67108864",
    f"workers.env.PYTHONPATH={ROOT}:{MOE_ON_CPU}",
    "workers.timeout_s=4",
    "routing.remote_prefill_min_tokens=64",
    "workers.engine_args.enable_prefix_caching=false",
)


def experts(folder: Path) -> str:
    """Written once per folder. Returns the setting that names it."""
    return f"model={with_demo_tokenizer(special_model(folder / 'experts', 'experts', DEMO_VOCABULARY))}"
