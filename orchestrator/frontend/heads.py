"""HTTP as uvicorn reads it, with an end to what a client may send that is no body: its head, or what follows a body.

That is kept until it is complete, before anybody has asked for a key or counted a body's bytes.
"""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 18  # a request's line and headers, and headers after a body
_REFUSAL = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class BoundedHttp(HttpToolsProtocol):
    _unfinished = 0  # bytes since a head, a piece of a body or a request was complete

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                said = f"the head of a request may have {MAX_HEAD_BYTES} bytes".encode()
                head = f"HTTP/1.1 {_REFUSAL.value} {_REFUSAL.phrase}\r\ncontent-type: text/plain\r\n"
                self.transport.write(
                    head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(said) + said
                )
            self.transport.close()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unfinished = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unfinished = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unfinished = 0
