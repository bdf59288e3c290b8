"""`bessemer generate`: text from a trained run."""

from __future__ import annotations

from pathlib import Path

import typer


def generate(
    run: Path = typer.Argument(help="The run's folder, such as runs/demo."),
    prompt: str = typer.Option("", "--prompt", "-p", help="The text to continue; empty begins a new document."),
    max_tokens: int = typer.Option(200, help="Most new tokens."),
    temperature: float = typer.Option(0.8, help="0 always takes the likeliest token."),
    top_k: int = typer.Option(0, help="Draw from so many likeliest tokens; 0 for no limit."),
    top_p: float = typer.Option(0.95, help="Draw from the likeliest tokens that reach this share."),
    seed: int = typer.Option(0, help="The same seed gives the same text."),
    checkpoint: str = typer.Option("last", help="last, best, or a name such as step-00001000.a1."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or mps."),
) -> None:
    """Continue a prompt with the model of a run.

    Example: bessemer generate runs/demo --prompt "def parse(self, line):" --temperature 0.7
    """
    from bessemer.model.generate import Sampling
    from bessemer.observe.activity import working
    from bessemer.train.restore import load_trained, stream_text

    with working("loading the model"):
        model, tokenizer = load_trained(run, checkpoint, device)
    sampling = Sampling(temperature, top_k, top_p, seed)
    print(prompt, end="", flush=True)
    for piece in stream_text(model, tokenizer, prompt, max_tokens, sampling):
        print(piece, end="", flush=True)
    print()
