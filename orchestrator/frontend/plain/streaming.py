"""The tokens of an answer become text, and the text reaches the client, with less work than in vLLM.

Its detokenizer starts with the last tokens of the prompt instead of all of them: to find the text that the first token
adds, the tokenizer would decode the prompt twice, a fifth of what a prompt of 1,024 tokens costs a frontend. How one
is decoded depends on a few tokens before it only: on the bytes of a character that spans several tokens, on a space
between words, and on whether it is the first.

The middle of a plain stream goes from there directly to the connection. vLLM's server makes the first and the last
events of a response, and every error. Once it has sent an event with a delta and waits for the next output, the
following events are made like that one (`EventTemplate`), and sent without a queue, pydantic or middleware. An output
that is more than a delta goes to vLLM's server. So does every output of a request that asks for more than text, or of a
server whose events have more than text. As in vLLM, deltas that arrive before the next turn of the loop are joined.
"""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import msgspec
import tokenizers
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import TokenizersBackend
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest, detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from orchestrator.config.settings import ConfigError
from orchestrator.frontend import edge

log = logging.getLogger("pd.frontend")

_LENGTHS = (8, 16, 32)  # tokens; at least 8, since a character has up to four bytes, and each may be a token
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Request fields that change which tokens are generated, and nothing in the events but their text and usage.
_PLAIN_FIELDS = frozenset(
    "model prompt messages n stream stream_options max_tokens max_completion_tokens min_tokens temperature top_p top_k "
    "min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias stop stop_token_ids ignore_eos "
    "include_stop_str_in_output skip_special_tokens spaces_between_special_tokens bad_words allowed_token_ids user "
    "request_id priority cache_salt session_id truncate_prompt_tokens add_special_tokens add_generation_prompt "
    "chat_template_kwargs".split()
)
# Modules whose middleware does not read the bodies of responses.
_PLAIN_MIDDLEWARE = ("vllm.", "starlette.middleware.cors", "prometheus_fastapi_instrumentator.", "model_hosting_")


def end_of_prompt(tokenizer: tokenizers.Tokenizer, prompt: list[int], skip_special_tokens: bool) -> list[int]:
    """The last tokens of a prompt such that tokens after them are decoded as after the whole prompt.

    The whole prompt if the last 8, 16 and 32 tokens each begin within a character, are byte tokens only, or have no
    text. (After tokens without text the next token would be decoded as the first one.)
    """
    for length in _LENGTHS:
        if length >= len(prompt):
            break
        end = prompt[-length:]
        text = tokenizer.decode(end, skip_special_tokens=skip_special_tokens)
        if text and _BROKEN not in text and not all(_is_byte(tokenizer, token) for token in end):
            return end
    return prompt


def _is_byte(tokenizer: tokenizers.Tokenizer, token: int) -> bool:
    """Whether it is a byte token. A run of them is decoded as a whole, and one invalid byte makes all unreadable."""
    return (tokenizer.id_to_token(token) or "").startswith("<0x")


class FleetDetokenizer(FastIncrementalDetokenizer):
    def __init__(self, tokenizer: TokenizersBackend, request: EngineCoreRequest) -> None:
        super().__init__(tokenizer, request)
        prompt = request.prompt_token_ids or []
        end = end_of_prompt(self.tokenizer, prompt, self.skip_special_tokens)
        if len(end) < len(prompt):
            self.stream = tokenizers.decoders.DecodeStream(ids=end, skip_special_tokens=self.skip_special_tokens)


def use_backend(name: str) -> None:
    """Set the library of the tokenizers that vLLM makes from now on (`frontend.tokenizer_backend`).

    Raises ConfigError if it is not installed."""
    if name != "fastokens":
        return
    if find_spec(name) is None:
        raise ConfigError("frontend.tokenizer_backend: fastokens is not installed here; `pip install fastokens`")
    os.environ["VLLM_USE_FASTOKENS"] = "1"


def install_detokenizer() -> None:
    """Make vLLM use `FleetDetokenizer`. It has no setting for this, so its own class is replaced."""
    detokenizer.FastIncrementalDetokenizer = FleetDetokenizer


# ---- the middle of a plain stream -----------------------------------------------------------------------------------


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
    """Makes the events that follow one of vLLM's in the same response, and only add text. The constant parts are vLLM's
    own bytes, so that the result equals what vLLM's server would have sent."""

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


class PlainStream:
    """One response. After its first tokens went to vLLM's server, outputs wait until that has sent its event."""

    __slots__ = ("_came", "_event", "_idle", "_later", "_listed", "_reply", "_state", "_tokens", "_unseen", "_unsent")

    def __init__(self, reply: edge.Reply, state: _PlainState, later: Callable[[PlainStream], None]) -> None:
        self._reply, self._later = reply, later
        self._state: _PlainState | None = state
        self._event: EventTemplate | None = None
        self._idle = False  # whether vLLM's server has sent all that it was given, and waits
        self._came = self._listed = False  # whether outputs are not sent yet; whether `flush` will be called
        self._unseen: list[int] = []  # tokens that vLLM's server did not get
        self._tokens = 0  # tokens that it got since the event from which `_event` was made
        self._unsent = b""  # an event that waits until the client reads

    def begin(self) -> None:
        """Called when vLLM's server waits for the next output."""
        if self._state is None or not self._state.begun:
            return
        if self._event is None:
            self._event, self._tokens = EventTemplate.of(self._reply.latest), 0
            if self._event is None:
                self._give_up(self._state)
                return
        self._idle = True
        if self._came:
            self.flush()

    def add(self, token_ids: list[int]) -> None:
        """Take an output that is a delta. Its text stays in vLLM's detokenizer until it is sent."""
        self._unseen.extend(token_ids)
        self._came = True
        if self._idle and not self._listed:
            self._listed = True
            self._later(self)

    def leave(self, token_ids: list[int], finished: bool) -> list[int]:
        """Return the tokens for vLLM's server, which gets this output: the new ones, and those it was not given."""
        if finished:
            self._state = None  # it refers to this object: break the cycle
        tokens = [*self._unseen, *token_ids] if self._unseen else token_ids
        self._tokens += len(tokens)
        self._idle, self._came, self._unseen = False, False, []
        return tokens

    def flush(self) -> None:
        """Send the new text as one event. While the client does not read, text is collected for the next one."""
        self._listed = False
        if not self._idle or self._state is None or self._event is None:
            return
        if self._unsent and not self._reply.send_now(self._unsent):
            return
        self._unsent = b""
        if self._came:
            self._came = False
            text = self._state.detokenizer.get_next_output_text(False, True)
            event = self._event.event(text, self._tokens + len(self._unseen))
            if not self._reply.send_now(event):
                self._unsent = event

    def take(self) -> bytes:
        """The event that waits: it goes before vLLM's next one."""
        event, self._unsent = self._unsent, b""
        return event

    def _give_up(self, state: _PlainState) -> None:
        """Give all outputs to vLLM's server, whose events have more than deltas."""
        self._state = None
        state.__class__ = RequestState
        if self._came:
            state.queue.put(state.make_request_output(self._unseen, None, None, None))


class _PlainState(RequestState):
    """A request's state in vLLM's output processor, for a request whose deltas are sent directly."""

    plain: PlainStream
    begun = False  # whether vLLM's server has got the first tokens

    def make_request_output(
        self, new_token_ids: list[int], pooling_output: Any, finish_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.begun and finish_reason is None:
            self.plain.add(new_token_ids)
            return None
        self.begun = self.begun or bool(new_token_ids)
        token_ids = self.plain.leave(new_token_ids, finish_reason is not None)
        return super().make_request_output(token_ids, pooling_output, finish_reason, *args, **kwargs)


class _Turn:
    """Flushes the streams that have something to send, at the next turn of the event loop."""

    def __init__(self) -> None:
        self._streams: list[PlainStream] = []

    def add(self, stream: PlainStream) -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            try:
                stream.flush()
            except Exception:  # an error of one connection must not stop the others
                log.exception("could not send to a client")


_turn = _Turn()


def attach(processor: OutputProcessor, request_id: str) -> None:
    """Send the middle of this request's response directly, if `watch` found it plain."""
    context, state = edge.current.get(), processor.request_states.get(request_id)
    if context is None or not context.plain or context.reply is None or state is None:
        return
    if state.parent_req is None and state.output_kind is RequestOutputKind.DELTA and state.stream_interval == 1:
        state.__class__ = _PlainState  # vLLM has no setting for the class that it makes here
        state.plain = context.stream = PlainStream(context.reply, state, _turn.add)


def watch(app: FastAPI, args: Namespace) -> None:
    """Record for each streamed request whether it is plain, when vLLM's server begins to make its events."""
    if args.sse_keep_alive_interval or not all(
        middleware.cls.__module__.startswith(_PLAIN_MIDDLEWARE) for middleware in app.user_middleware
    ):
        return
    chat = getattr(app.state, "openai_serving_chat", None)
    completion = getattr(app.state, "openai_serving_completion", None)
    if chat is not None and chat.parser_cls is None and not chat.enable_log_outputs:
        chat.chat_completion_stream_generator = _watched(chat.chat_completion_stream_generator)
    if completion is not None:
        completion.completion_stream_generator = _watched(completion.completion_stream_generator)


def _watched(generator: Callable[..., Any]) -> Callable[..., Any]:
    def watched(request: BaseModel, *args: Any, **kwargs: Any) -> Any:
        if (context := edge.current.get()) is not None:
            context.plain = kwargs.get("num_prompts", 1) == 1 and _is_plain(request)
        return generator(request, *args, **kwargs)

    return watched


def _is_plain(request: BaseModel) -> bool:
    unusual = request.model_fields_set - _PLAIN_FIELDS
    several = getattr(request, "n", None) not in (None, 1)
    return not (several or request.model_extra) and all(getattr(request, name) is None for name in unusual)
