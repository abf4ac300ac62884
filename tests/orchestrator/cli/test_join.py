"""What travels to another host: the token, the configuration without secrets, the units that run it."""

import configparser
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli.join import Token
from orchestrator.config.settings import Refused, parse_config
from orchestrator.config.shared import shared

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"


def test_a_token_is_read_back_and_a_damaged_one_is_one_line():
    token = Token("rediss://user:p%40ss@[fd00::1]:6379/2", "fleet-1")
    assert Token.decode(token.encode()) == token
    for text in (token.encode()[:-5], "", "%%%", "bm90IGpzb24"):
        with pytest.raises(Refused, match="expected what `orchestrator join` prints"):
            Token.decode(text)


def test_workers_get_the_configuration_without_redis_and_frontends():
    config = parse_config(
        {
            "model": "m",
            "redis": {"url": "redis://:a-secret@h:1", "timeout_s": 2},
            "frontend": {"server_args": {"ssl_keyfile": "k-secret"}},
            "security": {"api_keys": ["client-secret"], "operator_key": "operator-secret", "mesh": "curve"},
            "workers": {"bind": "10.0.0.1", "advertise": "first-host", "ports": "20000-20999"},
            "kv": {"transfer": "layer"},
        }
    )
    tree = shared(config)
    text = msgspec.json.encode(tree)
    assert b"secret" not in text and b"first-host" not in text
    read = parse_config(msgspec.json.decode(text))
    assert (read.kv, read.workers.ports, read.redis.timeout_s) == (config.kv, "20000-20999", 2)
    assert read.security.mesh == config.security.mesh


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda path: path.name)
def test_systemd_units_restart_except_after_drain_and_usage_error(unit: Path):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    service = parser["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    program, command, *options = service["ExecStart"].split()
    assert program.endswith("/orchestrator") and command in ("worker", "up")
    if command == "worker":
        role = unit.name.split("-")[1]
        assert options == ["--role", role, "--id", f"{role}-%H-%i"]
        assert "join.env" in service["EnvironmentFile"], "no secret in a command line"
