"""`bessemer model show` and `export`: look at a model, or convert a trained one."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, CommandGroup, print_json
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


def export(
    source: Path = typer.Argument(help="A run's folder; with --to bessemer a Hugging Face folder."),
    to: str = typer.Option(..., "--to", help="hf, peft (a run's adapter), or bessemer: a checkpoint for `start_from`."),
    out: Path | None = typer.Option(None, "--out", help="The folder to write (default: RUN/export/hf or peft)."),
    base: Path | None = typer.Option(
        None, "--base", help="With peft: the adapter's base, a Hugging Face folder (default: that of the run)."
    ),
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
    from bessemer.export.peft import held_in_nf4, to_peft
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import human_count

    if to not in ("hf", "peft", "bessemer"):
        raise UserError(f"--to {to}: write hf, peft or bessemer")
    if base is not None and to != "peft":
        raise UserError(f"--base {base}: only --to peft has a base")
    if check not in ("auto", "whole", "layers"):
        raise UserError(f"--check {check}: write auto, whole or layers")
    if dtype not in ("same", *DTYPES):
        raise UserError(f"--dtype {dtype}: write same, {', '.join(DTYPES)}")
    if to == "bessemer" and (out is None or dtype != "same" or family):
        raise UserError("--to bessemer needs --out FOLDER, and keeps family and dtype as they are")
    mode = "skip" if skip_check else check
    try:
        if to == "peft":
            place = out or source / "export" / "peft"
            native = open_native(source, checkpoint, merged=False)
            count, outcome = to_peft(native, place, base, overwrite)
            print(f"adapter  {count} tensors; {outcome}")
            if held_in_nf4(native):
                print("base     in nf4 while it trained: load it in 4 bits (nf4, double quantization) to use it")
            print(f"written  {place}")
            return
        if to == "hf":
            native = open_native(source, checkpoint)
            if held := held_in_nf4(native):
                print(f"base     {held} matrices with the nf4 values that the adapter trained with")
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
