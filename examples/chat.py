"""A conversation, printed word by word: `python examples/chat.py [--url URL] [MESSAGE]`.

Without a message it asks for one after the other until an empty line. After each answer: time to the first token, and
tokens per second after it.
"""

from __future__ import annotations

import argparse
import os
import time

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def answer(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam], max_tokens: int) -> str:
    """Print the answer as it comes, and what it took. Returns it."""
    asked = time.monotonic()
    first, text, tokens = 0.0, "", 0
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:  # the last chunk, which has no choices
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.monotonic()
                text += choice.delta.content
                print(choice.delta.content, end="", flush=True)
    ended = time.monotonic()
    rate = (tokens - 1) / (ended - first) if tokens > 1 else 0
    print(f"\n({1000 * (first - asked):.0f} ms to the first token, then {rate:.0f} tokens/s)")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("message", nargs="?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=200)
    asked = parser.parse_args()
    # A fleet without keys takes any; the client wants one.
    client = OpenAI(base_url=f"{asked.url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = []
    while message := asked.message or input("> "):
        messages.append({"role": "user", "content": message})
        messages.append({"role": "assistant", "content": answer(client, model, messages, asked.max_tokens)})
        if asked.message:
            return


if __name__ == "__main__":
    main()
