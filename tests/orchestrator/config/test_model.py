"""Names of models: what is loaded, what is refused, and that the demo model is what it was made from."""

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support_here import run_here

from orchestrator.config import model as model_module
from orchestrator.config.model import _gguf, find_model, name_in_fleet, read_model_config, resolve_model
from orchestrator.config.settings import ConfigError
from orchestrator.process import files

ROOT = Path(__file__).parents[3]


def test_folders_names_and_urls_are_taken_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("org/name-1.5") == "org/name-1.5"
    assert resolve_model("s3://bucket/model") == "s3://bucket/model"


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./models/mine", "~/nowhere", "~nobody-has-this-name/m", "a/b/c", "/" + "x" * 300]
)
def test_folders_that_do_not_exist_are_refused(name):
    with pytest.raises(ConfigError, match="does not exist for this user; name a folder"):
        resolve_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no config.json"):
        resolve_model(str(tmp_path))


def test_a_model_has_one_name_wherever_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "m-1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "models" / "m-1")
    monkeypatch.chdir(tmp_path)
    for name in ("models/m-1", "./link", str(tmp_path / "link"), "/elsewhere/m-1", "~/m-1", "/elsewhere/m-1/"):
        assert name_in_fleet(name) == "m-1"
    for name in ("org/m-1", "s3://bucket/m-1", "m-1"):
        assert name_in_fleet(name) == name


def test_demo_has_the_name_of_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A launcher tells its workers of the folder; who starts one by hand has the same file, which says `demo`."""
    monkeypatch.setattr(model_module, "_demo_name", lambda: "Small-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "pd-orchestrator" / "models" / "Small-1"
    made.mkdir(parents=True)
    folder = resolve_model("demo")
    assert folder == str(made) and name_in_fleet("demo") == name_in_fleet(folder) == "Small-1"


@pytest.mark.parametrize("name", ["a--b", "org/a..b", "a.git", "x" * 97, "x" * 300])
def test_a_name_that_no_hub_has_is_refused(name):
    """Its client raises what is no ConfigError."""
    with pytest.raises(ConfigError, match="is neither a folder nor in the Hugging Face cache"):
        find_model(name)
    assert read_model_config(name) == {}


def test_a_folder_that_is_not_open_to_this_user_is_refused(tmp_path):
    (inner := tmp_path / "model").mkdir()
    tmp_path.chmod(0)
    refused = f"from orchestrator.config.model import *\nread_model_config({str(inner)!r})\nfind_model({str(inner)!r})"
    as_nobody = f"import json, os\nimport orchestrator.config.model\nos.setuid(65534)\n{refused}"
    done = subprocess.run([sys.executable, "-c", as_nobody if os.geteuid() == 0 else refused], capture_output=True)
    tmp_path.chmod(0o700)
    assert b"ConfigError: model: folder" in done.stderr


def test_unknown_model_is_refused_at_once():
    with pytest.raises(ConfigError, match="'no-org/no-model' is neither a folder nor in the Hugging Face cache"):
        find_model("no-org/no-model")


def test_a_conversion_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "gguf.py").write_text("raise ImportError('no gguf today')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")  # of the converter, which is a program of its own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"could not be converted \(exit code 1\): ImportError: no gguf today"):
        resolve_model("demo", lambda stage: None)
    assert [path.name for path in (tmp_path / "pd-orchestrator" / "models").iterdir() if path.is_dir()] == []


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model's folder, made by a user whose group shares what has no other mode."""

    def convert(gguf: Path, target: Path, say: object) -> None:
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_text("weights")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_module, "_run_conversion", convert)
    monkeypatch.setattr(model_module, "_gguf", lambda: Path("none"))
    before = os.umask(0o002)
    try:
        folder = Path(resolve_model("demo", lambda stage: None))
    finally:
        os.umask(before)
    assert resolve_model("demo") == str(folder), "nobody else may write it, whatever the umask was"
    return folder


@pytest.mark.parametrize("which", ["weights", "folder", "models", "cache"])
def test_a_model_that_others_may_have_written_is_refused(made: Path, which: str):
    """Weights, and code where a model has some."""
    path = {"weights": made / "model.safetensors", "folder": made, "models": made.parent, "cache": made.parents[1]}[
        which
    ]
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(ConfigError, match=f"'demo': {path}: others than .* may write it .*, or set XDG_CACHE_HOME"):
        resolve_model("demo")


def test_another_users_model_is_refused_and_roots_is_not(made: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "own_uid", lambda: 54_321)
    monkeypatch.setattr(files, "_ROOT", os.geteuid())
    assert resolve_model("demo") == str(made), "an image may have it"
    monkeypatch.setattr(files, "_ROOT", 54_322)
    with pytest.raises(ConfigError, match="'demo': .*: belongs to .*, or set XDG_CACHE_HOME"):
        resolve_model("demo")


def test_a_cache_may_be_on_another_disk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "pd-orchestrator").symlink_to(made.parents[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "linked"))
    assert resolve_model("demo") == str(made)


def compare(folder: str, file: Path) -> None:
    import gguf
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # else each of these reads the file anew, for seconds
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    theirs = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    wanted = {name: each for name, each in theirs.state_dict().items() if name != "lm_head.weight"}
    with safe_open(f"{folder}/model.safetensors", "pt") as ours:
        assert set(ours.keys()) == set(wanted)
        for name, each in wanted.items():
            mine = ours.get_tensor(name)
            assert mine.dtype == each.dtype == torch.bfloat16 and torch.equal(mine, each), name
    mine, wanted = AutoConfig.from_pretrained(folder).to_dict(), theirs.config.to_dict()
    for name in ("_name_or_path", "_model_name_or_path", "quantization_config", "architectures"):
        mine.pop(name, None), wanted.pop(name, None)
    assert str(mine.pop("dtype")) == str(wanted.pop("dtype")) and mine == wanted, (mine, wanted)
    mine, wanted = GenerationConfig.from_pretrained(folder), theirs.generation_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(mine, name) == getattr(wanted, name), name
    mine, wanted = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(**source)
    assert mine.get_vocab() == wanted.get_vocab() and mine.chat_template == wanted.chat_template
    assert mine.special_tokens_map == wanted.special_tokens_map
    assert mine.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    for text in ("Two  words,\n\tnaïve 1234 東京 🙂", "<|im_start|>user\nWhat?<|im_end|>", ""):
        assert mine.encode(text) == wanted.encode(text) and mine.decode(mine.encode(text)) == text
    print("the same")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_is_what_transformers_makes_of_it():
    """Weights bit for bit; the same tokens, configuration and special tokens."""
    done = run_here(functools.partial(compare, resolve_model("demo"), _gguf()), timeout_s=540)
    assert done.stdout.endswith("the same\n"), done.stderr[-2000:]


@pytest.mark.slow
def test_the_demo_model_is_converted_without_torch(tmp_path: Path):
    code = """
        import sys
        from pathlib import Path
        from orchestrator.config.demo.convert import convert
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
        assert not {"torch", "transformers", "accelerate"} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(_gguf()), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
