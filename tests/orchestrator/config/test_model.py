"""Names of models: what is loaded, what is refused, and that the demo model made here can talk."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from orchestrator.config import model as demo_model
from orchestrator.config.model import find_model, resolve_model
from orchestrator.config.settings import ConfigError


def test_folders_names_and_urls_are_taken_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("org/name-1.5") == "org/name-1.5"
    assert resolve_model("s3://bucket/model") == "s3://bucket/model"


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/mine", "~/nowhere", "a/b/c"])
def test_folders_that_do_not_exist_are_refused(name):
    with pytest.raises(ConfigError, match="does not exist; name a folder"):
        resolve_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no config.json"):
        resolve_model(str(tmp_path))


def test_a_model_that_is_nowhere_is_refused_at_once():
    with pytest.raises(ConfigError, match="'no-org/no-model' is neither a folder nor in the Hugging Face cache"):
        find_model("no-org/no-model")


def test_a_conversion_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    monkeypatch.setattr(demo_model, "_gguf", lambda: broken)
    monkeypatch.setattr(demo_model, "_CONVERTER", "json.tool")  # a program that refuses these arguments
    with pytest.raises(ConfigError, match="could not be converted"):
        resolve_model("demo", lambda stage: None)
    assert [path.name for path in (tmp_path / "pd-orchestrator" / "models").iterdir() if path.is_dir()] == []


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_model_answers():
    """In a process of its own: this one stays without torch."""
    code = """
        import sys
        from transformers import AutoModelForCausalLM, AutoTokenizer
        folder = sys.argv[1]
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(question, **options)
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        print(model.dtype, tokenizer.decode(output[0][prompt["input_ids"].shape[1]:], skip_special_tokens=True))
    """
    said: list[str] = []
    folder = resolve_model("demo", said.append)
    assert resolve_model("demo", said.append) == folder
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), folder], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "torch.bfloat16 The capital of France is Paris.", done.stderr[-2000:]
