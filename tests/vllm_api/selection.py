"""Which of vLLM's server tests run, in an order in which neighbours share a server, and which do not and why.

`unlisted` names the files that are in neither list, so that a test is never left out in silence.
"""

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = "tests/entrypoints"
# Here every module with tests that ask for a server of text generation lies.
FOLDERS = ("anthropic", "openai", "scale_out/token_in_token_out", "serve")
FILES = tuple(
    f"{ROOT}/{name}"
    for name in (
        "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_completion.py",
        "openai/chat_completion/test_batched_chat_completions.py",
        "openai/chat_completion/test_logprob_token_ids.py",
        "openai/chat_completion/test_chat_logit_bias_validation.py",
        "openai/chat_completion/test_chat_echo.py",
        "openai/chat_completion/test_root_path.py",
        "openai/chat_completion/test_enable_force_include_usage.py",
        "openai/chat_completion/test_completion_with_function_calling.py",
        "openai/completion/test_completion.py",
        "openai/completion/test_prompt_validation.py",
        "openai/models/test_models.py",
        "openai/test_chunked_prompt.py",
        "openai/test_return_token_ids.py",
        "openai/test_return_tokens_as_ids.py",
        "openai/responses/test_basic.py",
        "openai/responses/test_errors.py",
        "openai/responses/test_stateful.py",
        "openai/responses/test_structured_output.py",
        "openai/responses/test_function_call.py",
        "openai/responses/test_simple.py",
        "anthropic/test_messages.py",
        "serve/tokenize/test_tokenization.py",
        "serve/instrumentator/test_basic.py",
        "serve/instrumentator/test_orca_metrics.py",
        "serve/instrumentator/test_metrics.py",
        "serve/lora/test_lora_adapters.py",
        "serve/sagemaker/test_sagemaker_lora_adapters.py",
        "serve/sagemaker/test_sagemaker_stateful_sessions.py",
        "scale_out/token_in_token_out/test_serving_tokens.py",
    )
)
# They look at what a server has counted since its start, or at all of its models: they share none.
ALONE = (f"{ROOT}/serve/instrumentator/test_metrics.py", f"{ROOT}/openai/models/test_models.py")

# A test or module, by pattern, and why it says nothing about a fleet, or cannot run here.
LEFT_OUT = {
    "*/test_openai_schema.py*": "needs a vision model; tests/e2e/test_sim_fuzz.py does the same to a fleet",
    "*/test_chat_completion_with_prompt_embeds.py*": "needs the embeddings of a model of theirs (opt-125m)",
    "*/test_completion_with_prompt_embeds.py*": "needs the embeddings of a model of theirs (opt-125m)",
    "*/test_extra_content_fields.py*": "needs google/translategemma-4b-it, a gated vision model",
    "*/test_include_reasoning.py*": "needs a model that reasons (Qwen3-0.6B)",
    "*/test_thinking_token_budget.py*": "needs a model that reasons (Qwen3-0.6B, Qwen3.5-35B)",
    "*/test_chat_echo.py::test_top_logprobs": "answers with every logprob of the vocabulary; minutes on two cores",
    "*/test_collective_rpc.py*": "a fleet refuses it with 501: its arguments name the ranks of one engine",
    "*/test_token_in_token_out.py*": "downloads a model of theirs into a folder of its own",
    "*/test_tensorizer_entrypoint.py*": "needs tensorizer, which loads weights onto GPUs",
    "*/test_lmeval.py*": "needs data sets of lm_eval, and a model that can solve them",
    "*/test_harmony.py*": "needs openai/gpt-oss-20b",
    "*/test_mcp_tools.py*": "needs openai/gpt-oss-20b and a tool server",
    "*/test_parsable_context.py*": "needs a model that calls tools (Qwen3-8B)",
    "*/test_serving_chat.py*": "its server test needs openai/gpt-oss-20b; the others start no server",
    "*/test_uds.py*": "frontends listen on TCP: --uds is refused by name",
    "*/test_optional_middleware.py*": "needs a pooling model (multilingual-e5-small); a fleet generates text",
    "*/test_tokenization_vlm.py*": "needs a vision model (Qwen2.5-VL-3B)",
    "*/test_tokenize_then_chat_vlm.py*": "needs a vision model (Qwen2.5-VL-3B)",
    "*/test_sagemaker_handler_overrides.py*": "starts a server for each hook; none reaches an engine",
    "*/test_sagemaker_middleware_integration.py*": "starts a server for each hook; none reaches an engine",
    "*/test_serving_multimodal_tokens.py*": "needs a vision model",
    "*/test_metrics.py::test_metrics_exist[[]*": "asks how large one engine's KV cache is; a fleet has many",
    "*/test_metrics.py::*multimodal*": "needs a vision model (SmolVLM-256M)",
    "*/test_metrics.py::test_metrics_exist_run_batch*": "starts vLLM's batch runner, which has an engine of its own",
    "*/test_lora_adapters.py::test_load_lora_adapter_with_same_name_replaces_inplace*": "needs trained adapters",
}
_SERVER = re.compile(r"RemoteOpenAIServer|from \.conftest import")


def left_out(test: str) -> str | None:
    """Why a test, or a module, is left out."""
    return next((reason for pattern, reason in LEFT_OUT.items() if fnmatch(test, pattern)), None)


def unlisted(folder: Path) -> list[str]:
    """Modules under vLLM's tests that ask for a server, and are neither run nor left out."""
    files = [file for name in FOLDERS for file in sorted((folder / ROOT / name).rglob("test_*.py"))]
    asking = [str(file.relative_to(folder)) for file in files if _SERVER.search(file.read_text())]
    return [name for name in asking if name not in FILES and left_out(name) is None]
