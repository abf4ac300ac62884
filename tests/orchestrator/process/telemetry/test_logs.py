"""The two formats of a log line, and what is read back from them."""

import io
import json
import logging
import logging.config
import re
import subprocess
import sys
import threading

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


DEEP = '{"new":' + "[" * 2000  # deeper than a reader goes
BEGINS = "2026-01-31 10:00:00.123 INFO frontend-0"  # as a line does


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("begins", ["", *(f"x{end}{BEGINS}" for end in ("\n", "\r\n", "\r"))])
@pytest.mark.parametrize("sent", [" pd.request: " + msgspec.json.encode(LINE).decode(), " pd.request: " + DEEP, DEEP])
def test_what_a_client_has_sent_is_no_ended_request(form, begins, sent):
    """Errors quote it. A reader of the log that it ended would read no line after it."""
    told = record("vllm.serving", "no model %s", begins + sent)
    told.exc_text = begins + sent
    for line in (sent, *io.StringIO(logs.formatter(form, "frontend-0").format(told), newline=None)):
        assert logs.request_in(line) is None
        assert logs.request_in(logs.common_log_line("text", "frontend-0", line)) is None


def test_in_a_json_file_every_line_is_an_object():
    ours = logs.formatter("json", "decode-0").format(record("pd.worker", "ready"))
    assert logs.common_log_line("json", "decode-0", ours) == ours
    foreign = json.loads(logs.common_log_line("json", "decode-0", 'Segmentation "fault"'))
    assert foreign["process"] == "decode-0" and foreign["message"] == 'Segmentation "fault"'


@pytest.mark.parametrize("form", ["text", "json"])
def test_vllm_logs_in_the_same_format_and_nothing_below_a_warning(form):
    """As vLLM does it: by the file that VLLM_LOGGING_CONFIG_PATH names, in a process of its own. That a stream is
    refused is an answer, of which there are hundreds a second under overload."""
    program = (
        "import json, logging, logging.config, os\n"
        "logging.config.dictConfig(json.load(open(os.environ['VLLM_LOGGING_CONFIG_PATH'])))\n"
        "logging.getLogger('vllm.engine').info('chatter')\n"
        "logging.getLogger('vllm.engine').warning('full')\n"
        "Refused = type('Refused', (Exception,), {'http_status': 429})\n"  # as vLLM's GracefulHTTPError
        "for error in (Refused('later'), ValueError('a defect')):\n"
        "    logging.getLogger('vllm.serving').error('Error in stream generator.', exc_info=error)\n"
    )
    env = {**logs.environment("decode-0", form), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    line, defect, *traceback = done.stderr.splitlines()
    assert "later" not in done.stderr and "a defect" in [defect, *traceback][-1]
    if form == "json":
        assert {"level": "WARNING", "process": "decode-0", "message": "full"}.items() <= json.loads(line).items()
    else:
        assert line.endswith("WARNING decode-0 vllm.engine: full")


def test_logs_are_set_up_without_all_loggers_forgetting_once_for_each(monkeypatch: pytest.MonkeyPatch):
    """And afterwards none remembers which levels it had."""
    children = [logging.getLogger(f"test_quick.{number}") for number in range(5)]
    assert not children[0].isEnabledFor(logging.INFO)
    forget, times = logging.Manager._clear_cache, list[int]()
    monkeypatch.setattr(logging.Manager, "_clear_cache", lambda manager: (times.append(1), forget(manager)))
    config = {"version": 1, "disable_existing_loggers": False, "loggers": {"test_quick": {"level": "INFO"}}}
    logging.config.dictConfig(config)
    assert children[0].isEnabledFor(logging.INFO)
    assert len(times) == 1
    with pytest.raises(ValueError, match="test_quick"):
        logging.config.dictConfig(config | {"loggers": {"test_quick": {"level": "no such"}}})
    logging.getLogger("test_quick").setLevel(logging.ERROR)
    assert not children[0].isEnabledFor(logging.INFO), "what follows is as Python has it, also after a mistake"


def test_two_threads_that_set_logs_up_leave_pythons_loggers_as_they_were(monkeypatch: pytest.MonkeyPatch):
    forget = logging.Manager._clear_cache
    monkeypatch.setattr(logging.Manager, "_clear_cache", forget)  # also where this fails
    other = threading.Thread(target=logging.config.dictConfig, args=[{"version": 1, "incremental": True}])

    def handler() -> logging.Handler:
        other.start()
        other.join(0.2)  # it waits for this thread
        return logging.NullHandler()

    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "handlers": {"h": {"()": handler}}})
    other.join()
    assert logging.Manager._clear_cache is forget
