"""`bessemer generate`: text from a trained run, an import or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import typer


def generate(
    run: Path = typer.Argument(help="A run such as runs/demo, an import, or a Hugging Face folder."),
    prompt: str = typer.Option("", "--prompt", "-p", help="The text to continue; empty begins a new document."),
    max_tokens: int = typer.Option(200, min=1, help="Most new tokens."),
    temperature: float = typer.Option(0.8, help="0 always takes the likeliest token."),
    top_k: int = typer.Option(0, help="Draw from so many likeliest tokens; 0 for no limit."),
    top_p: float = typer.Option(0.95, help="Draw from the likeliest tokens that reach this share."),
    seed: int = typer.Option(0, help="The same seed gives the same text."),
    checkpoint: str = typer.Option("last", help="last, best, or a name such as step-00001000.a1."),
    parse_special: bool = typer.Option(
        False, "--parse-special", help="Read special tokens in the prompt, such as <|im_start|>, as themselves."
    ),
    device: str = typer.Option("auto", help="auto, cpu, cuda or mps."),
) -> None:
    """Continue a prompt with the model of a run.

    The prompt begins, and the answer ends, as the model was trained: a Hugging Face model has the begin and end tokens
    of its own tokenizer and generation_config.json.

    Example: bessemer generate runs/demo --prompt "def parse(self, line):" --temperature 0.7
    """
    from bessemer.model.generate import Sampling
    from bessemer.observe.progress import working
    from bessemer.train.trained import load_trained, prompt_format, stream_text

    with working("loading the model"):
        model, tokenizer = load_trained(run, checkpoint, device)
    sampling = Sampling(temperature, top_k, top_p, seed)
    print(prompt, end="", flush=True)
    written = prompt_format(run, tokenizer)
    ids = written.encode(tokenizer, prompt, parse_special)
    for piece in stream_text(model, tokenizer, ids, max_tokens, written.ends, sampling):
        print(piece, end="", flush=True)
    print()
