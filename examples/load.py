"""Load with more and more users, and what they see of it, as a picture. A notebook: its cells begin with `# %%`.

Set PD_URL, PD_USERS (as 1,4,16), PD_REQUESTS (of each user) and PD_PICTURE, or change the first cell.
"""

# %% What is asked
from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")  # a file; leave this line out in a notebook
import matplotlib.pyplot as plt
from openai import AsyncOpenAI

URL = os.environ.get("PD_URL", "http://127.0.0.1:8000")
USERS = [int(users) for users in os.environ.get("PD_USERS", "1,4,16").split(",")]
REQUESTS = int(os.environ.get("PD_REQUESTS", "6"))
PICTURE = os.environ.get("PD_PICTURE", "load.png")
SHORT, LONG = 20, 600  # words; every third prompt is long
MAX_TOKENS = 32
WORDS = "the river runs past old stone houses where people trade grain salt and wool before winter comes".split()


@dataclass(frozen=True)
class Answer:
    long: bool
    ttft_ms: float
    itl_ms: float  # mean time between tokens


# %% One request, one user
async def ask(client: AsyncOpenAI, model: str, words: int, seed: int) -> Answer:
    text = " ".join(random.Random(seed).choices(WORDS, k=words))
    began, came = time.monotonic(), []
    stream = await client.completions.create(
        model=model, prompt=text, max_tokens=MAX_TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        came.append(time.monotonic())
    between = (came[-1] - came[0]) / max(1, MAX_TOKENS - 1)
    return Answer(words == LONG, 1000 * (came[0] - began), 1000 * between)


async def user(client: AsyncOpenAI, model: str, number: int) -> list[Answer]:
    """Sends the next request when the one before has been answered."""
    asked = [1000 * number + count for count in range(REQUESTS)]
    return [await ask(client, model, LONG if seed % 3 == 0 else SHORT, seed) for seed in asked]


async def measure() -> dict[int, list[Answer]]:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = (await client.models.list()).data[0].id
        found = {}
        for users in USERS:
            answers = await asyncio.gather(*(user(client, model, 100 * users + number) for number in range(users)))
            found[users] = [answer for one in answers for answer in one]
        return found


# %% Measure
found = asyncio.run(measure())  # in a notebook: found = await measure()


# %% Draw
def median(figures: list[float]) -> float:
    return sorted(figures)[len(figures) // 2]


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
for long, label in ((False, f"{SHORT} words"), (True, f"{LONG} words")):
    of = {users: [answer for answer in answers if answer.long == long] for users, answers in found.items()}
    left.plot(USERS, [median([answer.ttft_ms for answer in of[users]]) for users in USERS], "o-", label=label)
    right.plot(USERS, [median([answer.itl_ms for answer in of[users]]) for users in USERS], "o-", label=label)
left.set(xlabel="users", ylabel="ms", ylim=(0, None), title="Time to first token, median")
right.set(xlabel="users", ylabel="ms", ylim=(0, None), title="Time between tokens, median")
left.legend(title="prompt")
figure.tight_layout()
figure.savefig(PICTURE)
for users, answers in found.items():
    print(f"{users:4} users: TTFT {median([a.ttft_ms for a in answers]):7.1f} ms, {len(answers)} answers")
print(PICTURE)
