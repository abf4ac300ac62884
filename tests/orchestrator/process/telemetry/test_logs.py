"""The two formats of a log line, and what is read back from them."""

import json
import logging
import re
import subprocess
import sys

import msgspec
import pytest

from orchestrator.process.telemetry import logs
from orchestrator.process.telemetry.requests import RequestLine

LINE = RequestLine("r1", "finished", "local", "short_prompt", 9, 2, 1, "decode-0", None, 12.5)


def record(name: str, message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error else None
    return logging.LogRecord(name, logging.WARNING, "file.py", 1, message, args, exc_info)


def test_a_line_of_text_has_a_date_and_names_its_process():
    line = logs.formatter("text", "decode-0").format(record("pd.worker", "lost %s", "frontend-1"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING decode-0 pd\.worker: lost frontend-1", line)


def test_a_json_line_is_one_line_whatever_is_logged():
    line = logs.formatter("json", "decode-0").format(record("pd.worker", "two\nlines", error=ValueError("no")))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "WARNING",
        "process": "decode-0",
        "logger": "pd.worker",
        "message": "two\nlines",
        "exception": "ValueError: no",
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_ended_request_is_read_from_either_format(form):
    written = logs.formatter(form, "frontend-0").format(record(logs.REQUESTS, "%s", msgspec.json.encode(LINE).decode()))
    encoded = logs.request_in(logs.common_log_line(form, "frontend-0", written))
    assert encoded is not None and msgspec.json.decode(encoded, type=RequestLine) == LINE


@pytest.mark.parametrize("line", ["", "{", "{}", '{"time": 1}', "[decode-0] INFO pd.worker: ready", '{"message": "x"}'])
def test_other_lines_hold_no_request(line):
    assert logs.request_in(line) is None


def test_in_a_json_file_every_line_is_an_object():
    ours = logs.formatter("json", "decode-0").format(record("pd.worker", "ready"))
    assert logs.common_log_line("json", "decode-0", ours) == ours
    foreign = json.loads(logs.common_log_line("json", "decode-0", 'Segmentation "fault"'))
    assert foreign["process"] == "decode-0" and foreign["message"] == 'Segmentation "fault"'


@pytest.mark.parametrize("form", ["text", "json"])
def test_vllm_logs_in_the_same_format_and_nothing_below_a_warning(form):
    """As vLLM does it: by the file that VLLM_LOGGING_CONFIG_PATH names, in a process of its own."""
    program = (
        "import json, logging, logging.config, os\n"
        "logging.config.dictConfig(json.load(open(os.environ['VLLM_LOGGING_CONFIG_PATH'])))\n"
        "logging.getLogger('vllm.engine').info('chatter')\n"
        "logging.getLogger('vllm.engine').warning('full')\n"
    )
    env = {**logs.environment("decode-0", form), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    if form == "json":
        assert {"level": "WARNING", "process": "decode-0", "message": "full"}.items() <= json.loads(line).items()
    else:
        assert line.endswith("WARNING decode-0 vllm.engine: full")
