"""An agent that reads the files of a folder, a turn each: `python examples/agent.py [--url URL] [FOLDER]`.

Each turn repeats the conversation so far and adds a file. The fleet sends it to the worker that has the conversation's
KV, and computes what is new: the table shows how many tokens of each prompt were found in a prefix cache. The server
tells that where `frontend.server_args.enable_prompt_tokens_details` is set, as in the demo.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

INSTRUCTIONS = """You help somebody who is new to a project to find their way. You are shown its files, one in each
message, with the name in the first line. Say in one sentence what the file is for. Name what a reader may want to
change in it, if there is such a thing. Do not repeat what you have said of another file."""
CHARACTERS = 1200  # of each file, so that the conversation stays within a small model's length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("configs"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=60)
    asked = parser.parse_args()
    client = OpenAI(base_url=f"{asked.url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": INSTRUCTIONS}]
    print(f"{'file':24} {'prompt':>8} {'cached':>8} {'ms':>8}  answer")
    for file in sorted(path for path in asked.folder.iterdir() if path.is_file())[:5]:
        shown = f"{file.name}\n{file.read_text(errors='replace')[:CHARACTERS]}"
        messages.append({"role": "user", "content": shown})
        began = time.monotonic()
        done = client.chat.completions.create(
            model=model, messages=messages, max_tokens=asked.max_tokens, temperature=0
        )
        took_ms = 1000 * (time.monotonic() - began)
        said = done.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        assert done.usage is not None
        details = done.usage.prompt_tokens_details
        cached = details.cached_tokens or 0 if details else 0
        print(f"{file.name:24} {done.usage.prompt_tokens:8} {cached:8} {took_ms:8.0f}  {' '.join(said.split())[:60]}")


if __name__ == "__main__":
    main()
