"""Asks for known vulnerabilities of what the locks name, by pip-audit: `.venv/bin/python THIS LOCK...`.

Exit code 1 with what was found, less what known-findings.txt lists with a reason. Where no service answers (it needs a
network) it says so, and ends with 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

KNOWN = Path(__file__).with_name("known-findings.txt")
SERVICES = ("pypi", "osv")  # the second is asked where the first does not answer
_CONNECT_TIMEOUT_S = 5
_DEADLINE_S = 300
_NETWORK = re.compile(r"connect|timed? ?out|HTTPError|SSLError|ServiceError|Max retries", re.IGNORECASE)


class Finding(NamedTuple):
    package: str
    version: str
    ids: tuple[str, ...]  # its id, then other names of the same
    mended_in: tuple[str, ...]

    def __str__(self) -> str:
        mend = f"mended in {', '.join(self.mended_in)}" if self.mended_in else "no version mends it yet"
        return f"{self.package} {self.version}: {' = '.join(self.ids)}; {mend}"


class Report(NamedTuple):
    asked: int
    found: list[Finding]
    unknown: list[str]  # packages of which the service knows nothing


class NoAnswer(Exception):
    """No service could be asked."""


def read(report: dict[str, Any]) -> Report:
    """pip-audit's JSON. Raises NoAnswer where the service knows none of the packages: a mirror without this part of
    PyPI answers so."""
    each = report["dependencies"]
    asked = [package for package in each if "vulns" in package]
    if not asked:
        raise NoAnswer(f"it knows none of {len(each)} packages")
    found = [
        Finding(
            package["name"],
            package["version"],
            (one["id"], *(name for name in one.get("aliases", []) if name != one["id"])),
            tuple(one.get("fix_versions", [])),
        )
        for package in asked
        for one in package["vulns"]
    ]
    return Report(len(asked), found, [package["name"] for package in each if "vulns" not in package])


def known_findings(text: str) -> dict[str, str]:
    """Reasons by id. Raises SystemExit for a line without a reason."""
    known = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.strip().partition(" ")
            if not reason.strip():
                raise SystemExit(f"audit: {KNOWN.name}: {name}: add why it does no harm here")
            known[name] = reason.strip()
    return known


def pinned(locks: Iterable[Path]) -> str:
    """The lines of all locks, as a service knows the packages: `+cpu` names a build of the same release."""
    lines = {line for lock in locks for line in lock.read_text().splitlines() if line and line[0] not in "#-"}
    return "".join(re.sub(r"\+\w+", "", line, count=1) + "\n" for line in sorted(lines))


def ask(service: str, requirements: Path) -> Report:
    """Raises NoAnswer; SystemExit with pip-audit's words where it fails for another reason."""
    command = [Path(sys.executable).with_name("pip-audit"), "-r", requirements, "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--vulnerability-service", service]
    command += ["--timeout", str(_CONNECT_TIMEOUT_S)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
        return read(msgspec.json.decode(done.stdout))
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {_DEADLINE_S} s") from None
    except msgspec.DecodeError:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if _NETWORK.search(why):
            raise NoAnswer(why) from None
        raise SystemExit(f"audit: pip-audit failed: {why}") from None


def audit(locks: list[Path]) -> int:
    """Returns an exit code: 1 if there is something that is not known."""
    known = known_findings(KNOWN.read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pinned(locks))
        file.flush()
        for service in SERVICES:
            try:
                report = ask(service, Path(file.name))
                break
            except NoAnswer as error:
                say(f"{service} cannot be asked: {error}")
        else:
            say("NOT AUDITED: no vulnerability service can be reached from here")
            return 0
    new = [finding for finding in report.found if known.keys().isdisjoint(finding.ids)]
    for finding in new:
        say(str(finding))
    if report.unknown:
        say(f"{len(report.unknown)} packages that {service} does not know: {', '.join(sorted(report.unknown))}")
    for name in known.keys() - {name for finding in report.found for name in finding.ids}:
        say(f"{KNOWN.name}: {name} is found no more: take it out")
    say(f"{report.asked} packages asked of {service}: {len(new)} findings, {len(report.found) - len(new)} known ones")
    return 1 if new else 0


def say(line: str) -> None:
    print(f"audit: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(audit([Path(name) for name in sys.argv[1:]]))
