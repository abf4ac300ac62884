"""A certificate of a test's own, made when it is needed, and a Redis that has one."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_servers import free_port
from support_tools import program


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


@contextlib.contextmanager
def running_tls_server(folder: Path) -> Iterator[str]:
    """A Redis that speaks TLS alone and wants a certificate of its clients too. Its URL, without a user."""
    binary = program("redis-server", "redis-server")
    folder.mkdir()
    certificate, key = make_certificate(folder, "IP:127.0.0.1")
    port = free_port()
    options = {
        "port": 0,
        "tls-port": port,
        "bind": "127.0.0.1",
        "tls-cert-file": certificate,
        "tls-key-file": key,
        "tls-ca-cert-file": certificate,
        "tls-auth-clients": "yes",
        "dir": folder,
        "save": "",
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen([binary, *arguments], stdout=log, stderr=log)
    try:
        files = f"ssl_ca_certs={certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"
        yield f"rediss://127.0.0.1:{port}?{files}"
    finally:
        server.terminate()
        server.wait(15)
