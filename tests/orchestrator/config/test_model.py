"""Names of models: what is loaded, what is refused, and that the demo model made here can talk."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from orchestrator.config.model import find_model, resolve_model
from orchestrator.config.settings import ConfigError

ROOT = Path(__file__).parents[3]


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


def test_unknown_model_is_refused_at_once():
    with pytest.raises(ConfigError, match="'no-org/no-model' is neither a folder nor in the Hugging Face cache"):
        find_model("no-org/no-model")


def test_a_conversion_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")  # of the converter, which is a program of its own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"could not be converted \(exit code 1\): ImportError: no torch today"):
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
        stored, model = model.dtype, model.float()  # in bfloat16 it babbles on CPUs that compute that natively
        question = [{"role": "user", "content": "What is the capital of France?"}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(question, **options)
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        print(stored, tokenizer.decode(output[0][prompt["input_ids"].shape[1]:], skip_special_tokens=True))
    """
    said: list[str] = []
    folder = resolve_model("demo", said.append)
    assert resolve_model("demo", said.append) == folder
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), folder], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "torch.bfloat16 The capital of France is Paris.", done.stderr[-2000:]
