"""Every check of vLLM that names vLLM's own connectors is known, and answered."""

import sysconfig
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support_connector_checks import connector_checks

CHECKS = Path(__file__).parents[2] / "vllm_contract" / "connector_checks.toml"
KNOWN: dict[str, dict[str, Any]] = tomllib.loads(CHECKS.read_text())


def test_every_kind_of_check_is_found(tmp_path: Path) -> None:
    files = {
        "distributed/kv_transfer/kv_connector/factory.py": """
            KVConnectorFactory.register_connector("AConnector", "vllm.a", "AConnector")
            KVConnectorFactory.register_connector(
                "BConnector",
                "vllm.b", "BConnector")
            """,
        "config/__init__.py": """
            class Config:
                def check(self):
                    "AConnector or another"
                    if self.kv_connector is not None and self.has_connector("AConnector"):
                        raise ValueError("not with AConnector")
            """,
        "b.py": """
            from vllm.a import AConnector
            __all__ = ["BConnector"]
            def find(one, config):
                for name in ("AConnector", "BConnector"):
                    def is_it():
                        return isinstance(one, (AConnector, str)) or config.kv_connector.kv_connector != name
            """,
        "c.py": "kv_connector = 'CConnector'",
    }
    for name, text in files.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    assert connector_checks(tmp_path) == {
        "vllm.b:find": ["AConnector", "BConnector"],
        "vllm.b:find.is_it": ["AConnector", "kv_connector"],
        "vllm.config:Config.check": ["AConnector"],
    }


@pytest.mark.slow
def test_every_check_of_the_installed_version_is_answered() -> None:
    known = {place: row["names"] for place, row in KNOWN.items() if "since" not in row}
    assert connector_checks(Path(sysconfig.get_paths()["purelib"])) == known


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_check_of_the_next_version_is_answered(unpacked: Path) -> None:
    assert connector_checks(unpacked) == {place: row["names"] for place, row in KNOWN.items()}


def test_every_row_has_an_answer() -> None:
    assert all(row["checks"] and (row.get("refused") or row.get("answer")) for row in KNOWN.values())
