"""`bessemer export`: writes a model in another program's format, opens it there, and compares both."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, print_json
from bessemer.errors import UserError

FORMATS = ("hf", "gguf", "onnx", "pt", "peft", "bessemer")


def export(
    source: Path = typer.Argument(help="A run, an import or a Hugging Face folder (with --to hf and peft, a run)."),
    to: str = typer.Option(
        ...,
        "--to",
        help="hf, gguf (llama.cpp), onnx, pt (torch.export), peft (a run's adapter), or bessemer: a checkpoint for "
        "`start_from`, from a Hugging Face folder.",
    ),
    out: Path | None = typer.Option(None, "--out", help="What to write (default: in RUN/export)."),
    quantization: str | None = typer.Option(
        None, "--quantize", help="With gguf: q8_0, q5_1, q5_0, q4_1, q4_0, or a K-quant such as q4_k_m."
    ),
    limit: float | None = typer.Option(
        None, "--limit", help="With --quantize: the largest rise of perplexity, such as 0.05 (default: by type)."
    ),
    base: Path | None = typer.Option(
        None, "--base", help="With peft: the adapter's base, a Hugging Face folder (default: that of the run)."
    ),
    checkpoint: str = CHECKPOINT,
    dtype: str = typer.Option("same", "--dtype", help="same as saved (gguf: fp16), bf16, fp16 or fp32."),
    family: str | None = typer.Option(None, "--family", help="llama, qwen3, ... (default: the first that fits)."),
    check: str = typer.Option("auto", "--check", help="With hf: whole, layers (one in memory at a time) or auto."),
    skip_check: bool = typer.Option(False, "--skip-check", help="Do not compare the result with its source."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing model."),
    region: str | None = typer.Option(None, "--region", help="Region of the electricity, for the model card."),
    verbose: bool = typer.Option(False, "--verbose", help="Print the difference of every layer."),
    as_json: bool = AS_JSON,
) -> None:
    """Convert a model for transformers, llama.cpp, ONNX Runtime or torch, and compare the result.

    The program that the format is for opens the result, and its outputs are compared on real tokens.

    Example: bessemer export runs/demo --to gguf --quantize q8_0
    """
    from bessemer.checkpoint.manifest import DamagedCheckpoint
    from bessemer.export.gate import Mismatch
    from bessemer.export.hf import DTYPES

    if to not in FORMATS:
        raise UserError(f"--to {to}: write {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if base is not None and to != "peft":
        raise UserError(f"--base {base}: only --to peft has a base")
    if check not in ("auto", "whole", "layers"):
        raise UserError(f"--check {check}: write auto, whole or layers")
    if dtype not in ("same", *DTYPES):
        raise UserError(f"--dtype {dtype}: write same, {', '.join(DTYPES)}")
    if to == "bessemer" and (out is None or dtype != "same" or family):
        raise UserError("--to bessemer needs --out FOLDER, and keeps family and dtype as they are")
    if (quantization is not None or limit is not None) and to != "gguf":
        raise UserError(f"--quantize: only --to gguf quantizes, not --to {to}")
    if limit is not None and quantization is None:
        raise UserError("--limit: only a quantization changes perplexity: add --quantize")
    if to in ("onnx", "pt") and dtype not in ("same", "fp32"):
        raise UserError(f"--dtype {dtype}: --to {to} writes fp32")
    if out is None and to in ("gguf", "onnx", "pt") and not (source / "model.json").exists():
        raise UserError(f"{source}: is neither a run nor an import: name what to write with --out")
    mode = "skip" if skip_check else check
    try:
        if to == "peft":
            _peft(source, out, base, checkpoint, overwrite, as_json)
        elif to == "gguf":
            place = out or source / "export" / "gguf" / f"{quantization or dtype.replace('same', 'fp16')}.gguf"
            _gguf(
                source,
                place,
                dtype,
                quantization,
                limit,
                checkpoint,
                not skip_check,
                overwrite,
                family,
                region,
                as_json,
            )
        elif to in ("onnx", "pt"):
            _graph(source, to, out or source / "export" / to, checkpoint, not skip_check, overwrite, region, as_json)
        else:
            _hf(source, to, out, dtype, family, mode, checkpoint, overwrite, region, verbose, as_json)
    except (Mismatch, DamagedCheckpoint, OSError) as error:  # not the user's mistake, and nothing worth keeping
        print(f"{error}\nnothing was written", file=sys.stderr)
        raise typer.Exit(1) from None


def _peft(source: Path, out: Path | None, base: Path | None, checkpoint: str, overwrite: bool, as_json: bool) -> None:
    from bessemer.export.hf import open_native
    from bessemer.export.peft import held_in_nf4, to_peft

    place = out or source / "export" / "peft"
    native = open_native(source, checkpoint, merged=False)
    count, outcome = to_peft(native, place, base, overwrite)
    if as_json:
        facts = {"folder": str(place), "tensors": count, "check": outcome, "held_in_nf4": bool(held_in_nf4(native))}
        print_json(facts)
        return
    print(f"adapter  {count} tensors; {outcome}")
    if held_in_nf4(native):
        print("base     in nf4 while it trained: load it in 4 bits (nf4, double quantization) to use it")
    print(f"written  {place}")


def _hf(
    source: Path, to: str, out: Path | None, dtype: str, family: str | None, mode: str, checkpoint: str,
    overwrite: bool, region: str | None, verbose: bool, as_json: bool,
) -> None:  # fmt: skip
    from dataclasses import asdict

    from bessemer.export.hf import open_native, to_hf, to_native
    from bessemer.export.peft import held_in_nf4
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import human_count

    if to == "hf":
        native = open_native(source, checkpoint)
        if (held := held_in_nf4(native)) and not as_json:
            print(f"base     {held} matrices with the nf4 values that the adapter trained with")
        with working("opening the checkpoint") as report:
            result = to_hf(native, out or source / "export" / "hf", dtype, family, mode, overwrite, report)
    else:
        assert out is not None
        with working("opening the folder") as report:
            result = to_native(source, out, mode, overwrite, report)
    if to == "hf":
        checks = [f"transformers, {result.dtype}: {result.comparison}"] if result.comparison else []
        _write_card(result.folder, source, to, checks, region)
    if as_json:
        comparison = asdict(result.comparison) if result.comparison else None
        print_json({
            "folder": str(result.folder), "family": result.family, "tensors": result.tensors,
            "parameters": result.parameters, "dtype": result.dtype, "check": comparison,
        })  # fmt: skip
        return
    print(f"{result.family}  {result.tensors} tensors, {human_count(result.parameters)} parameters, {result.dtype}")
    if result.comparison is None:
        print("not checked")
    else:
        for part, gap in result.comparison.parts.items() if verbose else ():
            print(f"  {part:<12} {gap:.1e}")
        print(f"checked on {result.tokens}: {result.comparison}")
    print(f"written  {result.folder}")


def _gguf(
    source: Path, out: Path, dtype: str, quantization: str | None, limit: float | None, checkpoint: str, check: bool,
    overwrite: bool, family: str | None, region: str | None, as_json: bool,
) -> None:  # fmt: skip
    from bessemer.export.gguf import check_request, to_gguf
    from bessemer.export.source import open_source
    from bessemer.observe.progress import working

    check_request(quantization, check)
    with working("opening the model") as report:
        opened = open_source(source, checkpoint)
        result = to_gguf(opened, out, dtype, quantization, limit, check, overwrite, family, report)
    checks = [f"{kind}: {agreement}" for kind, agreement in result.agreements.items()]
    if out.parent.name == "gguf":  # a folder of its own
        _write_card(out.parent, opened.place, "gguf", checks, region)
    if as_json:
        rows = {kind: agreement.to_dict() for kind, agreement in result.agreements.items()}
        print_json({"file": str(out), "architecture": result.architecture, "kind": result.kind, "checks": rows})
        return
    print(f"{result.architecture}  {result.tensors} tensors, {result.kind}")
    print("\n".join(checks or ["not checked"]))
    print(f"written  {out}")


def _graph(
    source: Path, to: str, out: Path, checkpoint: str, check: bool, overwrite: bool, region: str | None, as_json: bool
) -> None:
    from bessemer.export.graph import to_graph
    from bessemer.export.source import open_source
    from bessemer.observe.progress import working
    from bessemer.spec.quantity import human_count

    with working("opening the model") as report:
        opened = open_source(source, checkpoint)
        result = to_graph(opened, out, to, check, overwrite, report)
    checks = [str(result.agreement)] if result.agreement else []
    _write_card(out, opened.place, to, checks, region)
    if as_json:
        agreement = result.agreement.to_dict() if result.agreement else None
        print_json({"file": str(out / result.file), "check": agreement})
        return
    print(f"{result.file}  {human_count(result.parameters)} parameters, float32, with its cache as inputs")
    print("\n".join(checks or ["not checked"]))
    print(f"written  {out}")


def _write_card(folder: Path, source: Path, kind: str, checks: list[str], region: str | None) -> None:
    """For models with records here; a Hugging Face folder has a card of its own."""
    from bessemer.export.card import write_card

    if (source / "model.json").exists():
        write_card(folder, source, kind, checks, region)
