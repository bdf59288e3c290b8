"""`bessemer generate`: continue a prompt, answer a file of prompts, or talk to a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from bessemer.cli.console import CHECKPOINT, DEVICE
from bessemer.errors import UserError


def generate(
    model: Path = typer.Argument(
        help="A run such as runs/demo, one of its checkpoints, an import or export, a Hugging Face or LoRA folder."
    ),
    prompt: str = typer.Option("", "--prompt", "-p", help="The text to continue; empty begins a new document."),
    prompts: Path | None = typer.Option(
        None, "--prompts", help='Many prompts: one per line, or .jsonl with "prompt" or "messages".'
    ),
    chat: bool = typer.Option(
        False, "--chat", help="Talk to the model: one line a turn (first --prompt), Ctrl-D ends, /reset forgets."
    ),
    system: str = typer.Option("", "--system", help="With --chat: the system message."),
    template: str | None = typer.Option(
        None, "--template", help="Chat template if the model has none: chatml, llama3, plain, none or a Jinja file."
    ),
    max_tokens: int = typer.Option(200, min=1, help="Maximum number of new tokens."),
    n: int = typer.Option(1, "--n", min=1, max=100_000, help="Answers to each prompt."),
    temperature: float = typer.Option(0.8, help="0 always takes the most likely token."),
    top_k: int = typer.Option(0, help="Sample from the k most likely tokens; 0 for no limit."),
    top_p: float = typer.Option(0.95, help="Sample from the most likely tokens that reach this probability."),
    min_p: float = typer.Option(0.0, help="Leave out tokens less likely than this share of the most likely one."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1, tokens that occurred before become less likely."),
    stop: list[str] = typer.Option([], "--stop", help="End an answer before this text (repeatable)."),
    seed: int = typer.Option(0, help="The same seed gives the same text."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per prompt, with all samples."),
    write: Path | None = typer.Option(
        None, "--write", help="Write the finished answers to this .jsonl, as rows to train on (objective: sft)."
    ),
    checkpoint: str = CHECKPOINT,
    parse_special: bool = typer.Option(
        False, "--parse-special", help="Read special tokens in the prompt, such as <|im_start|>, as special tokens."
    ),
    device: str = DEVICE,
) -> None:
    """Generate text: continue a prompt, answer a file of prompts, or chat.

    The prompt begins and the answer ends with the tokens that the model was trained with: those of its tokenizer and
    generation_config.json, and the end of a turn of its chat template.

    Example: bessemer generate runs/demo --prompt "def parse(self, line):" --temperature 0.7
    """
    from dataclasses import replace

    from bessemer.model.generate import Sampling
    from bessemer.observe.progress import working
    from bessemer.train.answers import AnswerSettings, answer_all, check_rows_file, converse, read_prompts
    from bessemer.train.trained import load_model

    if chat and (prompts is not None or as_json or n > 1):
        raise UserError("--chat reads its prompts from the terminal: leave out --prompts, --n and --json")
    if write is not None:
        check_rows_file(write, prompts)
    if prompts is not None and prompt:
        raise UserError("--prompt and --prompts: give one of them")
    if system and not chat:
        raise UserError('--system goes with --chat: leave it out, or write it into the "messages" of --prompts')
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
    settings = AnswerSettings(max_tokens, n, sampling, tuple(stop), parse_special)
    texts = [prompt] if prompts is None else read_prompts(prompts)
    with working("loading the model"):
        loaded = load_model(model, checkpoint, device)
    if template is not None:
        loaded = replace(loaded, template=template)
    if chat:
        converse(loaded, settings, system, _lines_after(prompt), lambda piece: print(piece, end="", flush=True))
    elif prompts is None and n == 1 and not as_json:
        pieces = loaded.stream(loaded.prompt(prompt, parse_special), max_tokens, sampling, stop)
        print(prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    elif write is not None:
        _write_rows(write, answer_all(loaded, texts, settings), str(model), len(texts) * n)
    else:
        for number, answer in enumerate(answer_all(loaded, texts, settings), 1):
            print(json.dumps(answer, ensure_ascii=False) if as_json else _show(number, answer), flush=True)


def _write_rows(path: Path, answers: Iterable[dict[str, Any]], model: str, samples: int) -> None:
    from bessemer.train.answers import training_rows

    count = 0
    with path.open("x", encoding="utf-8", buffering=1) as file:  # whole rows: those of a killed command can be used
        for answer in answers:
            for row in training_rows(answer, model):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    left_out = f", {samples - count:,} left out: empty, or not ended within --max-tokens" if samples > count else ""
    print(f"written  {path}  {count:,} rows{left_out}")


def _lines_after(prompt: str) -> Callable[[], str | None]:
    """The first turn, if the command has it, and then the terminal's lines."""
    turns = [prompt] if prompt else []

    def read() -> str | None:
        if not turns:
            return _read_line()
        print(f"> {turns[0]}")
        return turns.pop()

    return read


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        print()
        raise UserError(f"the line is not valid UTF-8 at byte {error.start + 1}: correct its encoding") from None


def _show(number: int, answer: dict[str, Any]) -> str:
    title = answer.get("prompt") or (answer["messages"][-1]["content"] if "messages" in answer else "")
    samples = answer["samples"]
    lines = [f"{number}. {title}"]
    for i, sample in enumerate(samples, 1):
        lines += [f"   [{i} of {len(samples)}]"] * (len(samples) > 1) + [sample["text"], ""]
    return "\n".join(lines)
