"""`bessemer compress`: a model with weights of 4 or 8 bits, and what that costs in quality."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, print_json, print_rows
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.export.compress import CompressedModel


def compress(
    model: Path = typer.Argument(help="A run, a checkpoint, an import, a Hugging Face folder or a LoRA folder."),
    to: str = typer.Option(..., "--to", help="int4 or int8 (weights only), or fp8 (weights, and inputs per token)."),
    text: list[Path] = typer.Option(
        ..., "--text", help="Text like what the model will read, to calibrate and measure on. Repeatable."
    ),
    out: Path | None = typer.Option(None, "--out", help="The folder to write (default for runs: RUN/export/FORMAT)."),
    method: str = typer.Option("auto", "--method", help="gptq, awq, auto (per layer the better of both) or rtn."),
    group: int = typer.Option(128, "--group", min=0, help="Inputs that share a scale; 0 for one scale per output."),
    limit: str = typer.Option(
        "auto", "--limit", help="Largest rise of perplexity, such as 5% (default: 8% for int4, else 2%)."
    ),
    rows: int = typer.Option(128, "--rows", min=8, help="Rows of text: a quarter to measure, the others to calibrate."),
    length: int = typer.Option(1024, "--length", min=16, help="Tokens of a row, at most the model's context."),
    text_field: str = typer.Option("text", "--text-field", help="The field or column that holds the text."),
    dtype: str = typer.Option("auto", "--dtype", help="Type of what is not quantized: bf16, fp16, fp32 or auto."),
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    skip_check: bool = typer.Option(False, "--skip-check", help="Do not open the result with transformers."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing model."),
    verbose: bool = typer.Option(False, "--verbose", help="Print the method and the errors of every layer."),
    as_json: bool = AS_JSON,
) -> None:
    """Quantize a model's weights to int4, int8 or fp8, for vLLM and transformers.

    Writes a folder in compressed-tensors format.

    Compares the result with the original on the text, and writes nothing if the perplexity rises beyond the limit.

    Example: bessemer compress runs/demo --to int4 --text notes/*.md
    """
    from bessemer.export.compress import LIMITS, METHODS

    if to not in LIMITS or method not in METHODS:
        raise UserError(f"--to {to} --method {method}: write {', '.join(LIMITS)}; {', '.join(METHODS)}")
    if to == "fp8" and method not in ("auto", "rtn"):
        raise UserError(f"--method {method}: fp8 only rounds to the nearest value; leave --method out")
    from bessemer.checkpoint.manifest import DamagedCheckpoint
    from bessemer.data.curate.scores.train import read_texts
    from bessemer.data.tokenizer.tokenizer import Tokenizer, end_token
    from bessemer.export import compress as compression
    from bessemer.export.hf import DTYPES
    from bessemer.model.families.registry import read_shape
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import parse_share
    from bessemer.spec.schema import ParallelSpec
    from bessemer.train.device import pick_device

    if dtype not in ("auto", *DTYPES) or device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"--dtype {dtype} --device {device}: write auto, {', '.join(DTYPES)}; auto, cpu, cuda or mps")
    try:
        allowed = None if limit == "auto" else parse_share(limit)
    except ValueError as error:
        raise UserError(f"--limit {limit}: {error}") from None
    is_run = (model / "events.jsonl").exists()
    if out is None and not is_run:
        raise UserError(f"{model}: is not a run: name the folder to write with --out")
    place = out or model / "export" / to
    try:
        with (
            working("opening the model") as report,
            compression.source_folder(model, checkpoint, place.absolute().parent, report) as source,
        ):
            context = read_shape(source.config)[1].max_positions or length
            tokenizer = Tokenizer.load(source.path, end_token(source.path))
            report("reading text")
            tokens_RT = compression.text_rows(read_texts(text, text_field), tokenizer, rows, min(length, context))
            unit = pick_device(ParallelSpec(device=device))  # type: ignore[arg-type]
            result = compression.compress(
                source, tokens_RT, place, to, method, group, dtype, allowed, unit, overwrite, not skip_check, report
            )
    except (compression.QualityTooLow, DamagedCheckpoint) as error:
        print(f"{error}\nnothing was written", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        layers = [{"name": c.name, "method": c.method, "errors": c.errors} for c in result.choices]
        print_json(result.to_json() | {"layers": layers})
        return
    _print(result, group, verbose)


def _print(result: CompressedModel, group: int, verbose: bool) -> None:
    from bessemer.spec.quantity import human_bytes

    form, quality = result.form, result.quality
    if verbose:
        for choice in result.choices:
            errors = "  ".join(f"{name} {error:.2e}" for name, error in choice.errors.items())
            print(f"  {choice.name:<44} {choice.method:<6} {errors}")
    scales = f"groups of {form.group}" if form.group else "one scale per output"
    if form.group != group and form.group:
        scales += f", as {group} does not divide the inputs of every layer"
    methods = ", ".join(f"{count} {name}" for name, count in sorted(result.methods().items()))
    print(f"{form.name}  {scales}; layers by shared input: {methods}")
    rows = [["", "before", "after", ""]]
    for name, (before, after) in (("size", result.bytes), ("weights read per token", result.read_bytes)):
        rows.append([name, human_bytes(before), human_bytes(after), f"{before / after:.2f} x smaller"])
    change = f"{quality.increase:+.2%}"
    rows.append(["perplexity", f"{quality.perplexity_before:.4g}", f"{quality.perplexity:.4g}", change])
    rows.append(["KL divergence, nats per token", "", f"{quality.kl:.4f}", ""])
    rows.append(["same most likely token", "", f"{quality.top1_agreement:.2%}", f"{quality.tokens:,} tokens of text"])
    print_rows(rows)
    speed = result.read_bytes[0] / result.read_bytes[1]
    print(f"generation of single answers can become up to {speed:.1f} x as fast, where reading weights limits it")
    opened = "not opened with transformers: that needs `pip install bessemer[compress]` and memory for the whole model"
    if result.opened is not None:
        opened = f"opened with transformers: log-probabilities differ by {result.opened:.1e}"
    print(f"{opened}\nwritten  {result.folder}")
