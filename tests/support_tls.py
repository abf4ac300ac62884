"""A certificate of a test's own, made when it is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """A self-signed certificate for `names` (as DNS:localhost, IP:127.0.0.1) and its key. Skips without openssl."""
    if not (openssl := shutil.which("openssl")):
        assert not os.environ.get("CI"), "install openssl: in CI this test must run"
        pytest.skip("openssl makes the certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext".split()
    options += [f"subjectAltName={','.join(names)}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *options], check=True, capture_output=True)
    return certificate, key
