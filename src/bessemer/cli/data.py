"""`bessemer data`: prepare a corpus, look at what became of it, check files before using them.

`bessemer data`: checking files, training the small models that steps use, looking into tokenizers.
"""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import CommandGroup, name_spec, naming_spec

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Prepare a corpus, see what became of it, check files.")

_SETTINGS = typer.Option([], "--set", help="Override a key, such as --set data.validation=2%. Repeatable.")
_JSON = typer.Option(False, "--json", help="As JSON.")


@app.command()
def prepare(
    spec: Path = typer.Argument(help="The run's YAML file."),
    settings: list[str] = _SETTINGS,
    workers: int | None = typer.Option(None, "--workers", min=1, help="Processes (default: one per core)."),
    engine: str = typer.Option("local", "--engine", help="local, or ray."),
    address: str | None = typer.Option(None, "--address", help="Address of a running Ray cluster, or auto."),
    as_json: bool = _JSON,
) -> None:
    """Read, clean, deduplicate, filter and tokenize the sources of a spec; print what became of them.

    The same command again goes on where it was stopped, with any number of workers; steps whose settings did not
    change are not run again. `bessemer train` on the same spec uses the result.

    Example: bessemer data prepare my-run.yaml --workers 8
    """
    import sys

    from bessemer.data.curate.engine import make_engine
    from bessemer.data.curate.report import PAGE, read_report
    from bessemer.errors import UserError
    from bessemer.observe.progress import working
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data
    from bessemer.spec.load import load_spec

    if engine not in ("local", "ray"):
        raise UserError(f"--engine {engine}: write local or ray")
    run_spec = load_spec(spec, settings)
    chosen = make_engine(engine, workers, address)
    try:
        with working("listing the sources") as report, naming_spec(spec, settings):
            prepared = prepare_data(run_spec, Plan(), report, chosen)
    finally:
        chosen.close()
    for note in prepared.notes:
        print(f"note  {note}", file=sys.stderr)
    _show(read_report(prepared.folder), prepared.folder / PAGE, as_json)


@app.command()
def publish(
    spec: Path = typer.Argument(help="The run's YAML file."),
    url: str | None = typer.Argument(None, help="Where to, such as s3://bucket/corpus (default: data.store)."),
    settings: list[str] = _SETTINGS,
    as_json: bool = _JSON,
) -> None:
    """Upload the prepared data of a spec to an object store, for runs that have `data.store`.

    Prepares the data first where that is not done. The same command continues an upload that was interrupted.
    Credentials come from the environment, other options of the file system from `data.store.storage`.

    Example: bessemer data publish my-run.yaml s3://bucket/corpus
    """
    import json

    from bessemer.data.read.secrets import shown
    from bessemer.errors import UserError
    from bessemer.observe.progress import working
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data, publish_data
    from bessemer.session.start import completed, decide_shape, open_source
    from bessemer.spec.load import load_spec
    from bessemer.spec.quantity import human_bytes

    run_spec = load_spec(spec, settings)
    if url:
        key = "data.store.url" if run_spec.data.store and run_spec.data.store.storage else "data.store"
        run_spec = load_spec(spec, [*settings, f"{key}={url}"])
    run_spec, store = completed(run_spec), run_spec.data.store
    if store is None:
        raise UserError("say where to publish: bessemer data publish SPEC s3://bucket/corpus, or write data.store")
    run_spec = run_spec.model_copy(update={"data": run_spec.data.model_copy(update={"store": None})})
    with working("listing the sources") as progress, naming_spec(spec, settings):
        vocab = prepare_data(run_spec, Plan(), progress).tokenizer.vocab_size
        _, context = decide_shape(run_spec, open_source(run_spec), vocab, Plan())
        prepared, size_bytes = publish_data(run_spec, store, context, progress)
    tokens = {name: source.tokens for name, source in prepared.train.items()}
    if as_json:
        print(json.dumps({"url": shown(store.url), "bytes": size_bytes, "tokens": tokens}, indent=1))
        return
    print(f"published  {shown(store.url)}  {human_bytes(size_bytes)}, {sum(tokens.values()):,} tokens to train on")
    print(f"train from it with  --set data.store={shown(store.url)}")


@app.command()
def report(
    spec: Path = typer.Argument(help="The run's YAML file, or a folder of prepared data."),
    settings: list[str] = _SETTINGS,
    as_json: bool = _JSON,
) -> None:
    """Print the report of data that was prepared before.

    Example: bessemer data report my-run.yaml --json
    """
    from bessemer.data.curate.report import PAGE, read_report
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepared_folder_of
    from bessemer.spec.load import load_spec

    folder = spec if (spec / "prepared.json").exists() else prepared_folder_of(load_spec(spec, settings), Plan())
    _show(read_report(folder), folder / PAGE, as_json)


@app.command()
def verify(
    place: Path = typer.Argument(help="A run's YAML file, a run, a folder of prepared data, or a store's prefix."),
    settings: list[str] = _SETTINGS,
    add_digests: bool = typer.Option(False, "--add-digests", help="Write digests for stores that have none."),
    as_json: bool = _JSON,
) -> None:
    """Compare every byte of prepared data with the digests that were written with it.

    A run compares what it reads when it reads it; this compares everything. Exit code 1 where something is damaged,
    with the file, the place in it and what to do.

    Example: bessemer data verify my-run.yaml
    """
    import json
    import sys
    from dataclasses import replace

    from bessemer.data.curate.engine import Meter
    from bessemer.data.verify import data_bytes
    from bessemer.data.verify import verify as run_verify
    from bessemer.spec.quantity import human_bytes

    # A run keeps its spec, in which `--set` of its command is written.
    spec, place = (place / "spec.yaml" if place.is_dir() else place), _prepared_place(place, settings)
    meter = Meter(lambda line: print(line, file=sys.stderr, flush=True))
    meter.start("verifying", data_bytes(place))
    results = []
    for result in run_verify(place, meter.advance, add_digests):
        if spec.is_file() and spec.suffix in (".yaml", ".yml"):
            result = replace(result, damage=tuple(name_spec(line, spec, settings) for line in result.damage))
        results.append(result)
        if not as_json:
            note = f"  ({result.note})" if result.note else ""
            print(f"{'DAMAGED' if result.damage else 'sound  '}  {result.path}  {human_bytes(result.bytes)}{note}")
            for line in result.damage:
                print(f"         {line}")
    damaged = sum(bool(result.damage) for result in results)
    if as_json:
        print(json.dumps({"damaged": damaged, "files": [result.to_json() for result in results]}, indent=1))
    else:
        print(f"{len(results)} verified, {damaged} damaged")
    raise typer.Exit(1 if damaged else 0)


def _prepared_place(place: Path, settings: list[str]) -> Path:
    """Where the data of a spec or a run is; other places are taken as they are."""
    import json

    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepared_folder_of
    from bessemer.spec.load import load_spec

    if (place / "data.json").exists():
        return Path(json.loads((place / "data.json").read_text())["folder"])
    if place.is_file() and place.suffix in (".yaml", ".yml"):
        return prepared_folder_of(load_spec(place, settings), Plan())
    return place


def _show(found: dict, page: Path, as_json: bool) -> None:  # type: ignore[type-arg]
    import json

    if as_json:
        print(json.dumps({**found, "page": str(page)}, indent=1))
        return
    from rich.table import Table

    from bessemer.cli.console import table_console
    from bessemer.data.curate.report import source_table, table

    console = table_console()
    for rows in (table(found), source_table(found)):
        grid = Table(box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(rows[0]):
            grid.add_column(name, justify="left" if (i in (0, 5) and rows[0][0] == "step") or i == 0 else "right")
        for row in rows[1:]:
            grid.add_row(*row)
        console.print(grid)
        console.print()
    print(f"report  {page}")


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
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.observe.progress import working
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
    from bessemer.data.curate.scores.train import train_classifier
    from bessemer.errors import UserError
    from bessemer.observe.progress import working

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
    from bessemer.data.curate.scores.train import train_perplexity
    from bessemer.observe.progress import working

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
    from bessemer.data.curate.scores.train import read_texts
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.data.tokenizer.vocabulary import audit as run_audit
    from bessemer.errors import UserError
    from bessemer.observe.progress import working

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

    from bessemer.cli.console import print_table

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
    from bessemer.data.curate.scores.train import read_texts
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.data.tokenizer.vocabulary import extend as run_extend
    from bessemer.observe.progress import working

    _check_out(out)
    with working("choosing tokens"):
        made = run_extend(Tokenizer.load(tokenizer), read_texts(paths, text_field), tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    made.tokenizer.save(out)
    before, after = made.before.bytes_per_token, made.after.bytes_per_token
    print(f"{len(made.tokens):,} new tokens; bytes per token of this text {before:.2f} -> {after:.2f}")
    print("first: " + ", ".join(repr(token) for token in made.tokens[:12]))
    print(f"written  {out}")
