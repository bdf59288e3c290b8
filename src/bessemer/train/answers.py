"""Answers of a loaded model: many prompts at once, or a conversation in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bessemer.data.tokenizer.chat import Message, find_problems
from bessemer.errors import UserError
from bessemer.model.generate import Request, Sampling
from bessemer.train.trained import LoadedModel

SLOTS = 16  # prompts that are answered at the same time


@dataclass(frozen=True)
class AnswerSettings:
    """How to answer each prompt."""

    max_tokens: int = 200
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    parse_special: bool = False


Prompt = str | Sequence[Message]  # a text to continue, or a conversation to answer


@dataclass(frozen=True)
class PromptRow:
    """A prompt, its place (file:row), and the columns of its row, if it has any."""

    prompt: Prompt
    place: str
    columns: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: one per line, or one JSON object per line with `prompt` or `messages` (.jsonl)."""
    return [row.prompt for row in read_prompt_rows(path)]


def read_prompt_rows(path: Path) -> list[PromptRow]:
    """The same with their places and columns."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); correct the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text (byte {error.start}); convert it") from None
    rows: list[PromptRow] = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also cut at U+2028 inside JSON strings
        if not line.strip():
            continue
        place = f"{path}:{number}"
        rows.append(_parse_row(line, place) if path.suffix == ".jsonl" else PromptRow(line, place))
    if not rows:
        raise UserError(f"{path}: has no prompts")
    return rows


def _parse_row(line: str, place: str) -> PromptRow:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: is not JSON ({error})") from None
    columns = value if isinstance(value, dict) else {}
    prompt = columns.get("prompt") if isinstance(value, dict) else value
    if isinstance(prompt, str):
        return PromptRow(prompt, place, columns)
    messages = columns.get("messages") or (prompt if isinstance(prompt, list) else None)
    if not messages:
        raise UserError(f'{place}: has neither "prompt" (a text) nor "messages" (a list)')
    if problems := find_problems(
        [*messages, {"role": "assistant", "content": "x"}] if isinstance(messages, list) else messages
    ):
        raise UserError(f"{place}: {problems[0]}")
    return PromptRow(messages, place, columns)


def answer_all(loaded: LoadedModel, prompts: Sequence[Prompt], settings: AnswerSettings) -> Iterator[dict[str, Any]]:
    """For each prompt, in order and as soon as it is answered: the prompt and its samples with text, tokens and the
    reason of their end."""
    ids = [
        loaded.prompt(prompt, settings.parse_special) if isinstance(prompt, str) else loaded.chat_prompt(prompt)
        for prompt in prompts
    ]
    for number, prompt_tokens in enumerate(ids, 1):
        loaded.check_length(prompt_tokens, f"prompt {number}")
    slots = min(SLOTS, len(prompts) * settings.samples)
    generator = loaded.generator(slots, max(map(len, ids)) + settings.max_tokens)
    queued = [
        generator.submit(
            Request(tokens, settings.max_tokens, settings.sampling, loaded.stop_ids, settings.stop, settings.samples)
        )
        for tokens in ids
    ]
    for prompt, completions in zip(prompts, queued, strict=True):
        while any(completion.reason is None for completion in completions):
            generator.step()
        yield {
            ("prompt" if isinstance(prompt, str) else "messages"): prompt,
            "samples": [
                {"text": completion.text, "tokens": len(completion.tokens), "finish_reason": completion.reason}
                for completion in completions
            ],
        }


def check_rows_file(path: Path, prompts: Path | None) -> None:
    """Refuses a file for `training_rows` that exists, before answers are made for it."""
    if path.suffix != ".jsonl":
        raise UserError(f"--write {path}: the rows are JSON lines: write a name that ends in .jsonl")
    if prompts is None:
        raise UserError("--write: the rows are the answers to a file of prompts: add --prompts FILE")
    if path.exists():
        raise UserError(f"--write {path}: exists already: remove it or write another name")


def training_rows(answer: dict[str, Any], model: str) -> Iterator[dict[str, Any]]:
    """The finished samples of an answer as rows that `objective: sft` reads, each with its model and sample number. An
    answer without an end or a word would teach the same: there is no row for it."""
    for number, sample in enumerate(answer["samples"]):
        if sample["finish_reason"] == "length" or not sample["text"].strip():
            continue
        origin = {"model": model, "sample": number}
        if "messages" in answer:
            yield {"messages": [*answer["messages"], {"role": "assistant", "content": sample["text"]}], **origin}
        else:
            yield {"prompt": answer["prompt"], "completion": sample["text"], **origin}


def converse(
    loaded: LoadedModel, settings: AnswerSettings, system: str, read: Callable[[], str | None],
    write: Callable[[str], None],
) -> None:  # fmt: skip
    """Answer one line after another until `read` returns None. `/reset` forgets the conversation. The slot keeps its
    contents, so only the new words of a turn are read."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    generator = loaded.generator(1, loaded.context or 32768)
    loaded.chat_prompt([*start, {"role": "user", "content": "x"}])  # the template must work before the first question
    turn = 0
    while (line := read()) is not None:
        if line.strip() == "/reset":
            messages = list(start)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        seed = settings.sampling.seed + turn
        sampling, prompt = replace(settings.sampling, seed=seed), loaded.chat_prompt(messages)
        if len(prompt) >= generator.max_length:
            write(f"The conversation has {len(prompt):,} tokens and {generator.max_length:,} fit: write /reset.\n")
            messages.pop()
            continue
        answer = ""
        for piece in generator.stream(Request(prompt, settings.max_tokens, sampling, loaded.stop_ids, settings.stop)):
            write(piece)
            answer += piece
        write("\n")
        messages.append({"role": "assistant", "content": answer})
        turn += 1
