"""`bessemer data`: checking files, training the small models that steps use, looking into tokenizers."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.data import app

_JSON = typer.Option(False, "--json", help="As JSON.")
_TEXT_FIELD = typer.Option("text", "--text-field", help="The field or column that holds the text.")


@app.command()
def check(
    paths: list[str] = typer.Argument(help="Files, folders, globs or URLs."),
    format: str = typer.Option("auto", "--format", help="As in a spec: auto, jsonl, parquet, text, ..."),
    text_field: str = _TEXT_FIELD,
    messages_field: str | None = typer.Option(None, "--messages", help="The field that holds a conversation."),
    tokenizer: Path | None = typer.Option(None, "--tokenizer", help="To find answers that are never learnt."),
    context: int | None = typer.Option(None, "--context", min=2, help="Tokens in a training sequence."),
    chat: str = typer.Option("chatml", "--chat", help="Layout of conversations."),
    as_json: bool = _JSON,
) -> None:
    """Look through files for what would spoil a training run; say how often, where, and what to do.

    Exit code 1 where something was found.

    Example: bessemer data check data/*.jsonl --messages messages --tokenizer tokenizer.json --context 4096
    """
    import json

    from bessemer.data.check import check_files
    from bessemer.data.tokenizer import Tokenizer
    from bessemer.observe.activity import working
    from bessemer.spec.load import source_spec

    settings = {"path": paths, "format": format, "text_field": text_field, "messages_field": messages_field}
    loaded = Tokenizer.load(tokenizer) if tokenizer else None
    with working("listing the files") as report:
        found = check_files(source_spec(settings), loaded, context, chat, report)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))
    else:
        print(f"{found.documents:,} documents, {found.characters:,} characters in {found.files:,} files")
        for line in found.notes:
            print(f"     note  {line}")
        for problem in found.problems:
            print(f"{problem.count:>9,}  {problem.what}\n           fix: {problem.fix}")
            for example in problem.examples:
                print(f"           {example}")
        if not found.problems:
            print("nothing wrong was found")
    if found.problems:
        raise typer.Exit(1)


@app.command()
def classifier(
    out: Path = typer.Argument(help="The file to write, such as quality.safetensors."),
    folders: list[str] = typer.Option(
        ..., "--class", help="NAME=PATH, twice or more; the first is what scores are of. Repeat a name for more paths."
    ),
    text_field: str = _TEXT_FIELD,
    seed: int = typer.Option(0, "--seed", min=0),
    as_json: bool = _JSON,
) -> None:
    """Train a classifier for the steps quality, domain and toxicity from folders of text.

    Example: bessemer data classifier quality.safetensors --class good=books/ --class other=crawl/
    """
    from bessemer.data.clean.train import train_classifier
    from bessemer.errors import UserError
    from bessemer.observe.activity import working

    classes: dict[str, list[Path]] = {}
    for setting in folders:
        name, sign, path = setting.partition("=")
        if not (name and sign and path):
            raise UserError(f"--class {setting}: write NAME=PATH, such as good=books/")
        classes.setdefault(name, []).append(Path(path))
    _check_out(out)
    with working("training the classifier"):
        report = train_classifier(classes, out, seed, text_field=text_field)
    _tell(report, out, as_json)


@app.command()
def perplexity(
    out: Path = typer.Argument(help="The file to write, such as good.safetensors."),
    paths: list[Path] = typer.Argument(help="Good text: files or folders."),
    text_field: str = _TEXT_FIELD,
    order: int = typer.Option(7, "--order", min=3, max=8, help="Bytes that are looked at together."),
    seed: int = typer.Option(0, "--seed", min=0),
    as_json: bool = _JSON,
) -> None:
    """Train a small language model of good text for the step perplexity.

    Example: bessemer data perplexity good.safetensors books/
    """
    from bessemer.data.clean.train import train_perplexity
    from bessemer.observe.activity import working

    _check_out(out)
    with working("training the language model"):
        report = train_perplexity(paths, out, seed, text_field=text_field, order=order)
    _tell(report, out, as_json)


def _check_out(out: Path) -> None:
    """Before the work, not after it."""
    from bessemer.errors import UserError

    if out.is_dir():
        raise UserError(f"{out}: is a folder; name the file to write in it")
    if (existing := next(parent for parent in out.absolute().parents if parent.exists())).is_file():
        raise UserError(f"{out}: {existing} is a file, not a folder; name another place")


def _tell(report: dict, out: Path, as_json: bool) -> None:  # type: ignore[type-arg]
    import json

    print(json.dumps(report, indent=None if not as_json else 1, ensure_ascii=False))
    if not as_json:
        print(f"written  {out}")


@app.command()
def audit(
    tokenizer: Path = typer.Argument(help="A tokenizer.json, SentencePiece .model or tiktoken file."),
    groups: list[str] = typer.Argument(help="NAME=PATH of text to encode, one or more."),
    text_field: str = _TEXT_FIELD,
    as_json: bool = _JSON,
) -> None:
    """How well a tokenizer fits some text: tokens per word, bytes per token, unused and unreachable tokens.

    Example: bessemer data audit tokenizer.json code=src/ prose=docs/
    """
    from bessemer.data.clean.train import read_texts
    from bessemer.data.tokenizer import Tokenizer
    from bessemer.data.vocabulary.audit import audit as run_audit
    from bessemer.errors import UserError
    from bessemer.observe.activity import working

    pairs = []
    for setting in groups:
        name, sign, path = setting.partition("=")
        if not (name and sign and path):
            raise UserError(f"{setting}: write NAME=PATH, such as code=src/")
        pairs.append((name, Path(path)))
    texts = ((name, text) for name, path in pairs for text in read_texts([path], text_field))
    with working("encoding the texts"):
        found = run_audit(Tokenizer.load(tokenizer), texts)
    if as_json:
        print(found.to_json())
        return
    from rich.table import Table

    from bessemer.cli.output import print_table

    grid = Table(*found.HEADER, box=None, pad_edge=False, header_style="bold")
    for row in found.rows():
        grid.add_row(*row)
    print_table(grid)
    print(f"{found.vocab:,} tokens: {found.unused:,} unused here, {found.unreachable:,} that no text gives")
    for title, tokens in (("unused", found.unused_tokens), ("unreachable", found.unreachable_tokens)):
        if tokens:
            print(f"{title}: " + ", ".join(f"{i} {text!r}" for i, text in tokens[:12]))


@app.command()
def extend(
    tokenizer: Path = typer.Argument(help="A BPE tokenizer.json to start from."),
    out: Path = typer.Argument(help="The tokenizer.json to write."),
    paths: list[Path] = typer.Argument(help="Text of the new domain."),
    tokens: int = typer.Option(1000, "--tokens", min=1, help="New tokens, at most."),
    text_field: str = _TEXT_FIELD,
) -> None:
    """Add tokens of a domain to a BPE tokenizer, for continued pre-training; the old ids stay.

    Example: bessemer data extend tokenizer.json medical.json papers/ --tokens 2000
    """
    from bessemer.data.clean.train import read_texts
    from bessemer.data.tokenizer import Tokenizer
    from bessemer.data.vocabulary.extend import extend as run_extend
    from bessemer.observe.activity import working

    _check_out(out)
    with working("choosing tokens"):
        made = run_extend(Tokenizer.load(tokenizer), read_texts(paths, text_field), tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    made.tokenizer.save(out)
    before, after = made.before.bytes_per_token, made.after.bytes_per_token
    print(f"{len(made.tokens):,} new tokens; bytes per token of this text {before:.2f} -> {after:.2f}")
    print("first: " + ", ".join(repr(token) for token in made.tokens[:12]))
    print(f"written  {out}")
