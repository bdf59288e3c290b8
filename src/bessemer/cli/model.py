"""`bessemer model show`, `generate`, `evaluate` and `export`: look at a model, or use a trained one."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, CommandGroup, print_json
from bessemer.errors import UserError

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Show a model: parameters, FLOPs, memory, a diagram.")


@app.callback()
def _group() -> None:
    """Makes `model` a group although it has one command."""


@app.command()
def show(
    target: str = typer.Argument(help="A spec file, a preset such as 1B, a run, or a Hugging Face folder."),
    batch: int = typer.Option(1, "--batch", min=1, help="Sequences in memory at a time."),
    context: int | None = typer.Option(
        None, "--context", min=1, help="Tokens per sequence (default: the spec's data.context, else 2048)."
    ),
    vocab: int | None = typer.Option(
        None, "--vocab", min=1, help="For a preset, or a tokenizer that is not trained yet."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Count a model's parameters, FLOPs and memory, and draw it. No weights are needed.

    Example: bessemer model show Mixtral-8x7B/ --batch 4 --context 4096
    """

    from bessemer.export.describe import describe, diagram, find_context, find_shape, table

    shape = find_shape(target, vocab)
    description = describe(shape, batch, context or find_context(target))
    if as_json:
        print_json({"shape": shape.to_dict(), **description})
    else:
        print("\n".join([*diagram(shape), "", *table(description)]))


def generate(
    run: Path = typer.Argument(help="A run such as runs/demo, an import, or a Hugging Face folder."),
    prompt: str = typer.Option("", "--prompt", "-p", help="The text to continue; empty begins a new document."),
    max_tokens: int = typer.Option(200, min=1, help="Maximum number of new tokens."),
    temperature: float = typer.Option(0.8, help="0 always takes the most likely token."),
    top_k: int = typer.Option(0, help="Sample from the k most likely tokens; 0 for no limit."),
    top_p: float = typer.Option(0.95, help="Sample from the most likely tokens that reach this probability."),
    seed: int = typer.Option(0, help="The same seed gives the same text."),
    checkpoint: str = CHECKPOINT,
    parse_special: bool = typer.Option(
        False, "--parse-special", help="Read special tokens in the prompt, such as <|im_start|>, as special tokens."
    ),
    device: str = DEVICE,
) -> None:
    """Continue a prompt with the model of a run.

    The prompt begins and the answer ends with the tokens that the model was trained with; a Hugging Face model uses
    those of its tokenizer and generation_config.json.

    Example: bessemer generate runs/demo --prompt "def parse(self, line):" --temperature 0.7
    """
    from bessemer.model.generate import Sampling
    from bessemer.observe.progress import working
    from bessemer.train.trained import load_trained, prompt_format, stream_text

    with working("loading the model"):
        model, tokenizer = load_trained(run, checkpoint, device)
    print(prompt, end="", flush=True)
    layout = prompt_format(run, tokenizer)
    ids = layout.encode(tokenizer, prompt, parse_special)
    sampling = Sampling(temperature, top_k, top_p, seed)
    for piece in stream_text(model, tokenizer, ids, max_tokens, layout.ends, sampling):
        print(piece, end="", flush=True)
    print()


def evaluate(
    run: Path = typer.Argument(help="The run's folder, such as runs/long."),
    needle: bool = typer.Option(
        False, "--needle", help="Needle in a haystack: hide a fact in a long text and ask for it."
    ),
    lengths: str = typer.Option(
        "auto", "--lengths", help="Tokens of the text (default: 1/4 to 2 times the run's context)."
    ),
    kind: str = typer.Option(
        "auto", "--kind", help="key (a question in words), copy (random tokens) or auto (by size)."
    ),
    trials: int = typer.Option(10, "--trials", min=1, help="Questions per length and depth."),
    seed: int = typer.Option(0, "--seed", help="The same seed asks the same questions."),
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Measure how far back a model finds what it has read: the share of hits for each length and depth.

    Example: bessemer evaluate runs/long --needle --lengths 4Ki,16Ki,32Ki
    """
    import json

    from pydantic import TypeAdapter, ValidationError

    from bessemer.evaluate.needle import Kind, held_out_text
    from bessemer.evaluate.needle import needle as measure_needle
    from bessemer.observe.progress import working
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import Count
    from bessemer.train.trained import load_trained

    if not needle:
        raise UserError("evaluate: name what to measure: --needle")
    with working("loading the model"):
        model, tokenizer = load_trained(run, checkpoint, device)
    try:
        if lengths == "auto":
            context = json.loads((Run.existing(run).folder / "settings.json").read_text())["context"]
            tokens = [context // 4, context // 2, context, 2 * context]
        else:
            tokens = [TypeAdapter(Count).validate_python(length.strip()) for length in lengths.split(",")]
        needle_kind = None if kind == "auto" else TypeAdapter(Kind).validate_python(kind)
    except ValidationError:
        raise UserError(f"--lengths {lengths} --kind {kind}: write for example 512,4Ki; auto, key or copy") from None
    with working("measuring"):
        filler = held_out_text(run, max(tokens))
        grid = measure_needle(model, tokenizer, tokens, trials=trials, seed=seed, kind=needle_kind, filler=filler)
    if as_json:
        print_json(grid.to_dict())
    else:
        hits = "answers with the key" if grid.kind == "key" else "hidden tokens predicted"
        print("\n".join([f"share of {hits}, {trials} trials each; columns are tokens of text", *grid.lines()]))


def export(
    source: Path = typer.Argument(help="A run's folder; with --to bessemer a Hugging Face folder."),
    to: str = typer.Option(..., "--to", help="hf, or bessemer: a checkpoint for `start_from`."),
    out: Path | None = typer.Option(None, "--out", help="The folder to write (default: RUN/export/hf)."),
    checkpoint: str = CHECKPOINT,
    dtype: str = typer.Option("same", "--dtype", help="same as saved, bf16, fp16 or fp32."),
    family: str | None = typer.Option(None, "--family", help="llama, qwen3, ... (default: the first that fits)."),
    check: str = typer.Option("auto", "--check", help="whole, layers (one in memory at a time) or auto (by size)."),
    skip_check: bool = typer.Option(False, "--skip-check", help="Do not compare the result with its source."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing model."),
    verbose: bool = typer.Option(False, "--verbose", help="Print the difference of every layer."),
) -> None:
    """Convert a model, open the result with transformers, and compare both on real tokens.

    Example: bessemer export runs/demo --to hf --out my-model --dtype bf16
    """
    from bessemer.checkpoint.manifest import DamagedCheckpoint
    from bessemer.export.gate import Mismatch
    from bessemer.export.hf import DTYPES, open_native, to_hf, to_native
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import human_count

    if to not in ("hf", "bessemer"):
        raise UserError(f"--to {to}: write hf or bessemer")
    if check not in ("auto", "whole", "layers"):
        raise UserError(f"--check {check}: write auto, whole or layers")
    if dtype not in ("same", *DTYPES):
        raise UserError(f"--dtype {dtype}: write same, {', '.join(DTYPES)}")
    if to == "bessemer" and (out is None or dtype != "same" or family):
        raise UserError("--to bessemer needs --out FOLDER, and keeps family and dtype as they are")
    mode = "skip" if skip_check else check
    try:
        if to == "hf":
            native = open_native(source, checkpoint)
            with working("opening the checkpoint") as report:
                result = to_hf(native, out or source / "export" / "hf", dtype, family, mode, overwrite, report)
        else:
            assert out is not None
            with working("opening the folder") as report:
                result = to_native(source, out, mode, overwrite, report)
    except (Mismatch, DamagedCheckpoint, OSError) as error:  # not the user's mistake, and nothing worth keeping
        print(f"{error}\nnothing was written", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{result.family}  {result.tensors} tensors, {human_count(result.parameters)} parameters, {result.dtype}")
    if result.comparison is None:
        print("not checked")
    else:
        for part, gap in result.comparison.parts.items() if verbose else ():
            print(f"  {part:<12} {gap:.1e}")
        print(f"checked on {result.tokens}: {result.comparison}")
    print(f"written  {result.folder}")
