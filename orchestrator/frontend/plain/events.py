"""Server-sent events that only add text: recognizes vLLM's, and makes the next events of the response like them.

The constant parts of an event are vLLM's own bytes, so that the result equals what vLLM's server would have sent.
"""

from __future__ import annotations

import msgspec


class _Usage(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    content: str


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat
    logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None
    prompt_token_ids: None = None
    token_ids: None = None


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of an event if the events after it differ from it in text and usage only."""

    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: None = None
    prompt_text: None = None


_decoder = msgspec.json.Decoder(_Event)
_encode = msgspec.json.Encoder().encode
_BEGIN, _END = b"data: ", b"\n\n"


class EventTemplate:
    """Makes the events that follow one of vLLM's in the same response."""

    __slots__ = ("_after", "_before", "_rest", "_usage")

    def __init__(self, before: bytes, after: bytes, rest: bytes, usage: _Usage | None) -> None:
        self._before, self._after, self._rest, self._usage = before, after, rest, usage

    @classmethod
    def of(cls, event: bytes) -> EventTemplate | None:
        """A template from vLLM's event; None if that has other fields, or if it is more than one event."""
        try:
            read = _decoder.decode(event.removeprefix(_BEGIN))
            (choice,) = read.choices
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
            return None
        if choice.delta is None and choice.text is not None:
            key, text = b'"text":', choice.text
        elif choice.delta is not None and choice.text is None:
            key, text = b'"delta":{"content":', choice.delta.content
        else:
            return None
        before, _, after = event.partition(key + _encode(text))
        rest = b""
        if (usage := read.usage) is not None:
            after, _, rest = after.partition(_usage(usage.prompt_tokens, usage.completion_tokens))
        made = cls(before + key, after, rest, usage)
        whole = event.startswith(_BEGIN) and event.endswith(_END) and event.count(key) == 1
        return made if whole and made.event(text, 0) == event else None

    def event(self, text: str, tokens: int) -> bytes:
        """An event with `text`. `tokens`: how many there were since the template's event, those of `text` included.

        Raises UnicodeEncodeError if `text` has lone surrogates.
        """
        if self._usage is None:
            return b"".join((self._before, _encode(text), self._after))
        usage = _usage(self._usage.prompt_tokens, self._usage.completion_tokens + tokens)
        return b"".join((self._before, _encode(text), self._after, usage, self._rest))


def _usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    total = prompt_tokens + completion_tokens
    return b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (prompt_tokens, total, completion_tokens)
