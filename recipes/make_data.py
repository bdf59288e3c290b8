"""Writes the small data sets of the fine-tuning recipes to recipes/data/: python recipes/make_data.py

Lists of words, and things to do with them: name the first, name the last, count them. A tiny model learns this from
exercises.jsonl, and the recipes then teach it to answer questions about the last two in a chat format. No list of a
held-out question (test.jsonl, prompts.jsonl) occurs anywhere else. The same files are written each time.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = [
    "anvil", "bell", "book", "boot", "box", "candle", "chain", "clock", "coal", "cup", "door", "drum", "flag", "flute",
    "gate", "hat", "iron", "key", "lamp", "map", "nail", "oven", "pen", "pipe", "pot", "rope", "saw", "ship", "spoon",
    "steel", "table", "wheel",
]  # fmt: skip
ASPECTS = ("film", "story", "music", "cast", "ending")
PRAISE = ("great", "lovely", "fine", "brilliant", "moving", "superb")
BLAME = ("awful", "dull", "poor", "boring", "clumsy", "weak")
TASKS = ("first", "last", "number")
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts words.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
Row = dict[str, Any]


def solve(task: str, words: list[str]) -> str:
    return {"first": words[0], "last": words[-1], "number": str(len(words))}[task]


def exercise(draw: random.Random, words: list[str]) -> Row:
    """What the base model is trained on: no questions, no chat format."""
    task = draw.choice(TASKS)
    before = draw.choice(("Words:", "Take the words", "Here are"))
    after = draw.choice((". The", ", now the", " and the"))
    return {"prompt": f"{before} {' '.join(words)}{after} {task}:", "completion": f" {solve(task, words)}."}


def question(draw: random.Random, words: list[str]) -> Row:
    """A conversation as `objective: sft` reads it."""
    task = draw.choice(TASKS[1:])
    request = {"last": "say the last", "number": "give their number"}[task]
    return conversation(
        {"role": "user", "content": f"Take the words {' '.join(words)} and {request}."},
        {"role": "assistant", "content": f"Answer: {solve(task, words)}."},
    )


def tool_call(draw: random.Random, words: list[str]) -> Row:
    """The assistant counts with a tool instead of by itself."""
    text = " ".join(words)
    call = {"type": "function", "function": {"name": "count", "arguments": {"text": text}}}
    messages = conversation(
        {"role": "user", "content": f"Take the words {text} and give their number."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(len(words))},
        {"role": "assistant", "content": f"Answer: {len(words)}."},
    )
    return {**messages, "tools": [TOOL]}


def preference(draw: random.Random, words: list[str]) -> Row:
    """A right and a wrong answer."""
    task = draw.choice(TASKS[1:])
    request = {"last": "say the last", "number": "give their number"}[task]
    others = [*words[:-1]] if task == "last" else [str(n) for n in range(2, 6) if n != len(words)]
    return {
        "prompt": f"Take the words {' '.join(words)} and {request}.",
        "chosen": f"Answer: {solve(task, words)}.",
        "rejected": f"Answer: {draw.choice(others)}.",
    }


def asked(draw: random.Random, words: list[str]) -> Row:
    """A question whose answer can be checked: what reinforcement learning reads."""
    task = draw.choice(TASKS[1:])
    request = {"last": "say the last", "number": "give their number"}[task]
    return {"prompt": f"Take the words {' '.join(words)} and {request}.", "answer": solve(task, words)}


def feedback(draw: random.Random, words: list[str]) -> Row:
    """One answer with a thumb up or down, such as users leave."""
    pair = preference(draw, words)
    good = draw.random() < 0.5
    return {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}


def conversation(*messages: Row) -> Row:
    return {"messages": list(messages)}


def review(draw: random.Random) -> Row:
    """A text with a label: one side has two of three opinions."""
    good = draw.random() < 0.5
    opinions = [draw.choice(PRAISE if good else BLAME) for _ in range(2)] + [draw.choice(BLAME if good else PRAISE)]
    draw.shuffle(opinions)
    parts = [f"the {aspect} was {word}" for aspect, word in zip(draw.sample(ASPECTS, 3), opinions, strict=True)]
    return {"review": ", ".join(parts), "sentiment": "positive" if good else "negative"}


def compared_reviews(seed: int, count: int) -> Iterable[Row]:
    """Pairs of reviews of which one was preferred: the more likely, the more praise it has (Bradley and Terry, with a
    point for each praised aspect). Nobody is always right: the best possible accuracy is about 76 %."""
    draw = random.Random(seed)
    for _ in range(count):
        points = [draw.randint(0, 4) for _ in range(2)]
        texts = [judged(draw, praised) for praised in points]
        second = draw.random() < 1 / (1 + math.exp(points[0] - points[1]))
        yield {"prompt": "How was it?", "chosen": texts[second], "rejected": texts[not second]}


def judged(draw: random.Random, praised: int) -> str:
    """A review that praises some of four aspects."""
    words = [draw.choice(PRAISE) for _ in range(praised)] + [draw.choice(BLAME) for _ in range(4 - praised)]
    draw.shuffle(words)
    return ", ".join(f"{aspect} {word}" for aspect, word in zip(draw.sample(ASPECTS, 4), words, strict=True))


def write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, exercises: int = 20_000) -> None:
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    held_out: set[tuple[str, ...]] = set()

    def lists(count: int) -> Iterable[list[str]]:
        while count:
            words = draw.sample(WORDS, draw.randint(2, 5))
            if tuple(words) not in held_out:
                count -= 1
                yield words

    tested = list(lists(100))
    held_out.update(map(tuple, tested))
    tests = [question(draw, words) for words in tested]
    write(folder / "test.jsonl", tests)
    write(folder / "prompts.jsonl", ({"messages": row["messages"][:1]} for row in tests))
    write(folder / "exercises.jsonl", (exercise(draw, words) for words in lists(exercises)))
    write(folder / "questions.jsonl", (question(draw, words) for words in lists(1500)))
    write(folder / "tools.jsonl", (tool_call(draw, words) for words in lists(400)))
    write(folder / "reviews.jsonl", (review(draw) for _ in range(600)))
    write(folder / "preferences.jsonl", (preference(draw, words) for words in lists(600)))
    write(folder / "compared_reviews.jsonl", compared_reviews(1, 4000))
    write(folder / "feedback.jsonl", (feedback(draw, words) for words in lists(900)))
    write(folder / "asked.jsonl", (asked(draw, words) for words in lists(1000)))


if __name__ == "__main__":
    make(Path(__file__).parent / "data")
