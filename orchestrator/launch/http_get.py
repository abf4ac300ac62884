"""One GET to a server of this fleet: no proxies, a deadline, and None instead of an error."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float) -> bytes | None:
    """The body of a 200, else None."""
    try:
        with _direct.open(url, timeout=timeout_s) as response:
            body: bytes = response.read()
            return body if response.status == 200 else None
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return None
