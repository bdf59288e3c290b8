"""`bessemer export`: a trained model for other programs, or theirs for us; compared before it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def export(
    source: Path = typer.Argument(help="A run's folder; with --to bessemer a Hugging Face folder."),
    to: str = typer.Option(..., "--to", help="hf, or bessemer: a checkpoint for `start_from`."),
    out: Path | None = typer.Option(None, "--out", help="The folder to write (default: RUN/export/hf)."),
    checkpoint: str = typer.Option("last", "--checkpoint", help="last, best, a tag or a name."),
    dtype: str = typer.Option("same", "--dtype", help="same as saved, bf16, fp16 or fp32."),
    family: str | None = typer.Option(None, "--family", help="llama, qwen3, ... (default: the first that fits)."),
    check: str = typer.Option("auto", "--check", help="whole, layers (one in memory at a time) or auto (by size)."),
    skip_check: bool = typer.Option(False, "--skip-check", help="Do not compare the result with its source."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a model that is there."),
    verbose: bool = typer.Option(False, "--verbose", help="Print the difference of every layer."),
) -> None:
    """Convert a model, open the result with transformers, and compare both on real tokens.

    Example: bessemer export runs/demo --to hf --out my-model --dtype bf16
    """
    from bessemer.checkpoint.manifest import DamagedCheckpoint
    from bessemer.errors import UserError
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
                done = to_hf(native, out or source / "export" / "hf", dtype, family, mode, overwrite, report)
        else:
            assert out is not None
            with working("opening the folder") as report:
                done = to_native(source, out, mode, overwrite, report)
    except (Mismatch, DamagedCheckpoint, OSError) as error:  # neither the user's mistake nor anything to keep
        print(f"{error}\nnothing was written", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{done.family}  {done.tensors} tensors, {human_count(done.parameters)} parameters, {done.dtype}")
    if done.comparison is None:
        print("not checked")
    else:
        for part, gap in done.comparison.parts.items() if verbose else ():
            print(f"  {part:<12} {gap:.1e}")
        print(f"checked on {done.tokens}: {done.comparison}")
    print(f"written  {done.folder}")
