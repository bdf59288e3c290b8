"""`bessemer data`: prepare and verify a corpus, check raw files, train filter models, audit and extend tokenizers."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import (
    AS_JSON,
    SETTINGS,
    SPEC,
    CommandGroup,
    name_spec,
    naming_spec,
    print_json,
    print_table,
    table_console,
)
from bessemer.cli.data_check import check
from bessemer.errors import UserError

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Prepare, check, verify and publish training data.\n\nExample: bessemer data prepare my-run.yaml --workers 8",
)
_TEXT_FIELD = typer.Option("text", "--text-field", help="The field or column that holds the text.")
_SEED = typer.Option(0, "--seed", min=0, help="Seed of the training.")


@app.command()
def prepare(
    spec: Path = SPEC,
    settings: list[str] = SETTINGS,
    workers: int | None = typer.Option(None, "--workers", min=1, help="Number of processes (default: one per core)."),
    engine: str = typer.Option("local", "--engine", help="local, or ray."),
    address: str | None = typer.Option(None, "--address", help="Address of a running Ray cluster, or auto."),
    as_json: bool = AS_JSON,
) -> None:
    """Read, clean, deduplicate, filter and tokenize the sources of a spec, and print a report.

    The same command again continues where it stopped, with any number of workers. Steps whose settings did not change
    do not run again. `bessemer train` on the same spec uses the result.

    Example: bessemer data prepare my-run.yaml --workers 8
    """
    import sys

    from bessemer.data.curate.engine import make_engine
    from bessemer.data.curate.report import PAGE, read_report
    from bessemer.observe.progress import working
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data
    from bessemer.session.start import complete_spec
    from bessemer.spec.load import load_spec

    if engine not in ("local", "ray"):
        raise UserError(f"--engine {engine}: write local or ray")
    run_spec = load_spec(spec, settings)
    workers_engine = make_engine(engine, workers, address)
    try:
        with working("listing the sources") as report, naming_spec(spec, settings):
            prepared = prepare_data(complete_spec(run_spec), Plan(), report, workers_engine)
    finally:
        workers_engine.close()
    for note in prepared.notes:
        print(f"note  {note}", file=sys.stderr)
    _print_report(read_report(prepared.folder), prepared.folder / PAGE, as_json)


@app.command()
def publish(
    spec: Path = SPEC,
    url: str | None = typer.Argument(
        None, help="The URL to upload to, such as s3://bucket/corpus (default: data.store)."
    ),
    settings: list[str] = SETTINGS,
    as_json: bool = AS_JSON,
) -> None:
    """Upload the prepared data of a spec to an object store, for runs that have `data.store`.

    Prepares the data first if needed. The same command again continues an interrupted upload. Credentials come from the
    environment, other options of the file system from `data.store.storage`.

    Example: bessemer data publish my-run.yaml s3://bucket/corpus
    """

    from bessemer.data.read.secrets import redact
    from bessemer.observe.progress import working
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data, publish_data
    from bessemer.session.start import complete_spec, decide_shape, open_source
    from bessemer.spec.load import load_spec
    from bessemer.spec.quantity import human_bytes

    run_spec = load_spec(spec, settings)
    if url:
        key = "data.store.url" if run_spec.data.store and run_spec.data.store.storage else "data.store"
        run_spec = load_spec(spec, [*settings, f"{key}={url}"])
    run_spec, store = complete_spec(run_spec), run_spec.data.store
    if store is None:
        raise UserError("missing URL: write bessemer data publish SPEC s3://bucket/corpus, or set data.store")
    run_spec = run_spec.model_copy(update={"data": run_spec.data.model_copy(update={"store": None})})
    with working("listing the sources") as progress, naming_spec(spec, settings):
        vocab = prepare_data(run_spec, Plan(), progress).tokenizer.vocab_size
        _, context = decide_shape(run_spec, open_source(run_spec), vocab, Plan())
        prepared, size_bytes = publish_data(run_spec, store, context, progress)
    tokens = {name: source.tokens for name, source in prepared.train.items()}
    if as_json:
        print_json({"url": redact(store.url), "bytes": size_bytes, "tokens": tokens})
        return
    print(f"published  {redact(store.url)}  {human_bytes(size_bytes)}, {sum(tokens.values()):,} tokens to train on")
    print(f"train from it with  --set data.store={redact(store.url)}")


@app.command()
def teacher(spec: Path = SPEC, settings: list[str] = SETTINGS, as_json: bool = AS_JSON) -> None:
    """Store the predictions of a teacher for the rows of a run with `distill.stored`.

    `bessemer train` does this too, before its first step; this stores them on another machine or ahead of time. The
    same command again continues where it stopped.

    Example: bessemer data teacher my-run.yaml
    """
    from bessemer.observe.progress import working
    from bessemer.parallel.world import World
    from bessemer.session.start import complete_spec, dry_run
    from bessemer.session.teacher import store_teacher
    from bessemer.spec.load import load_spec
    from bessemer.spec.quantity import human_bytes
    from bessemer.train.device import pick_device, use_threads

    run_spec = complete_spec(load_spec(spec, settings))
    use_threads(run_spec.parallel)
    device = pick_device(run_spec.parallel)
    with working("listing the sources") as progress, naming_spec(spec, settings):
        store = store_teacher(run_spec, dry_run(run_spec, device), World(device=device), progress)
    if store is None:
        raise UserError(f"{spec}: has no distill.stored: write for example distill: {{top_k: 64, stored: FOLDER}}")
    rows = int(store.stored.sum())
    if as_json:
        print_json({"folder": str(store.folder), "rows": rows, "bytes": rows * store.row_bytes, **store.header.summary})
        return
    size = human_bytes(rows * store.row_bytes)
    covered = f", {store.header.covered:.0%} covered" if store.header.covered < 1 else ""
    print(f"stored  {store.folder}  {rows:,} rows of {store.header.context:,} tokens, {size}{covered}")


@app.command()
def report(
    spec: Path = typer.Argument(help="The run's YAML file, or a folder of prepared data."),
    settings: list[str] = SETTINGS,
    as_json: bool = AS_JSON,
) -> None:
    """Print the report of prepared data.

    Example: bessemer data report my-run.yaml --json
    """
    from bessemer.data.curate.report import PAGE, read_report

    folder = spec if (spec / "prepared.json").exists() else _folder_of_spec(spec, settings)
    _print_report(read_report(folder), folder / PAGE, as_json)


@app.command()
def verify(
    place: Path = typer.Argument(help="A run's YAML file, a run, a folder of prepared data, or a store's prefix."),
    settings: list[str] = SETTINGS,
    add_digests: bool = typer.Option(False, "--add-digests", help="Write digests for stores that have none."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare every byte of prepared data with its digests.

    A run verifies the parts that it reads; this verifies everything. Exit code 1 if something is damaged, with the
    file, the position and the fix.

    Example: bessemer data verify my-run.yaml
    """
    import sys
    from dataclasses import replace

    from bessemer.data.curate.engine import Meter
    from bessemer.data.verify import data_bytes
    from bessemer.data.verify import verify as run_verify
    from bessemer.spec.quantity import human_bytes

    # A run folder holds its spec with the `--set` of its command applied.
    spec, place = (place / "spec.yaml" if place.is_dir() else place), _prepared_folder(place, settings)
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
        print_json({"damaged": damaged, "files": [result.to_json() for result in results]})
    else:
        print(f"{len(results)} verified, {damaged} damaged")
    raise typer.Exit(1 if damaged else 0)


def _prepared_folder(place: Path, settings: list[str]) -> Path:
    """The data folder of a spec or a run; any other path is returned as it is."""
    import json

    if (place / "data.json").exists():
        return Path(json.loads((place / "data.json").read_text())["folder"])
    if place.is_file() and place.suffix in (".yaml", ".yml"):
        return _folder_of_spec(place, settings)
    return place


def _folder_of_spec(spec: Path, settings: list[str]) -> Path:
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepared_folder_of
    from bessemer.session.start import complete_spec
    from bessemer.spec.load import load_spec

    return prepared_folder_of(complete_spec(load_spec(spec, settings)), Plan())


def _print_report(report: dict, page: Path, as_json: bool) -> None:  # type: ignore[type-arg]

    if as_json:
        print_json({**report, "page": str(page)})
        return
    from rich.table import Table

    from bessemer.data.curate.report import source_table, step_table

    console = table_console()
    for rows in (step_table(report), source_table(report)):
        grid = Table(box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(rows[0]):
            grid.add_column(name, justify="left" if (i in (0, 5) and rows[0][0] == "step") or i == 0 else "right")
        for row in rows[1:]:
            grid.add_row(*row)
        console.print(grid)
        console.print()
    print(f"report  {page}")


app.command()(check)


@app.command()
def classifier(
    out: Path = typer.Argument(help="The file to write, such as quality.safetensors."),
    folders: list[str] = typer.Option(
        ...,
        "--class",
        help="NAME=PATH, two or more; a score is the probability of the first. Repeat a name to add paths.",
    ),
    text_field: str = _TEXT_FIELD,
    seed: int = _SEED,
    as_json: bool = AS_JSON,
) -> None:
    """Train a classifier from folders of text, for the steps quality, domain and toxicity.

    Example: bessemer data classifier quality.safetensors --class good=books/ --class other=crawl/
    """
    from bessemer.data.curate.scores.train import train_classifier
    from bessemer.observe.progress import working

    classes: dict[str, list[Path]] = {}
    for name, path in _parse_pairs(folders, "--class ", "good=books/"):
        classes.setdefault(name, []).append(path)
    _check_output(out)
    with working("training the classifier"):
        report = train_classifier(classes, out, seed, text_field=text_field)
    _print_training(report, out, as_json)


@app.command()
def perplexity(
    out: Path = typer.Argument(help="The file to write, such as good.safetensors."),
    paths: list[Path] = typer.Argument(help="Files or folders of good text."),
    text_field: str = _TEXT_FIELD,
    order: int = typer.Option(7, "--order", min=3, max=8, help="Order of the byte n-gram model."),
    seed: int = _SEED,
    as_json: bool = AS_JSON,
) -> None:
    """Train a small language model on good text, for the step perplexity.

    Example: bessemer data perplexity good.safetensors books/
    """
    from bessemer.data.curate.scores.train import train_perplexity
    from bessemer.observe.progress import working

    _check_output(out)
    with working("training the language model"):
        report = train_perplexity(paths, out, seed, text_field=text_field, order=order)
    _print_training(report, out, as_json)


def _parse_pairs(settings: list[str], option: str, example: str) -> list[tuple[str, Path]]:
    """NAME=PATH arguments as pairs."""

    pairs = []
    for setting in settings:
        name, sign, path = setting.partition("=")
        if not (name and sign and path):
            raise UserError(f"{option}{setting}: write NAME=PATH, such as {example}")
        pairs.append((name, Path(path)))
    return pairs


def _check_output(out: Path) -> None:
    """Refuse an output path that cannot be written, before any work is done."""

    if out.is_dir():
        raise UserError(f"{out}: is a folder; name a file in it")
    if (existing := next(parent for parent in out.absolute().parents if parent.exists())).is_file():
        raise UserError(f"{out}: {existing} is a file, not a folder; choose another path")


def _print_training(report: dict, out: Path, as_json: bool) -> None:  # type: ignore[type-arg]
    import json

    print(json.dumps(report, indent=None if not as_json else 1, ensure_ascii=False))
    if not as_json:
        print(f"written  {out}")


@app.command()
def audit(
    tokenizer: Path = typer.Argument(help="A tokenizer.json, SentencePiece .model or tiktoken file."),
    groups: list[str] = typer.Argument(help="NAME=PATH of texts to encode, one or more."),
    text_field: str = _TEXT_FIELD,
    as_json: bool = AS_JSON,
) -> None:
    """Measure how well a tokenizer fits a text: tokens per word, bytes per token, unused and unreachable tokens.

    Example: bessemer data audit tokenizer.json code=src/ prose=docs/
    """
    from bessemer.data.curate.scores.train import read_texts
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.data.tokenizer.vocabulary import audit as run_audit
    from bessemer.observe.progress import working

    pairs = _parse_pairs(groups, "", "code=src/")
    texts = ((name, text) for name, path in pairs for text in read_texts([path], text_field))
    with working("encoding the texts"):
        result = run_audit(Tokenizer.load(tokenizer), texts)
    if as_json:
        print(result.to_json())
        return
    from rich.table import Table

    grid = Table(*result.HEADER, box=None, pad_edge=False, header_style="bold")
    for row in result.rows():
        grid.add_row(*row)
    print_table(grid)
    print(f"{result.vocab:,} tokens: {result.unused:,} unused here, {result.unreachable:,} that no text encodes to")
    for title, tokens in (("unused", result.unused_tokens), ("unreachable", result.unreachable_tokens)):
        if tokens:
            print(f"{title}: " + ", ".join(f"{i} {text!r}" for i, text in tokens[:12]))


@app.command()
def extend(
    tokenizer: Path = typer.Argument(help="The BPE tokenizer.json to extend."),
    out: Path = typer.Argument(help="The tokenizer.json to write."),
    paths: list[Path] = typer.Argument(help="Text of the new domain."),
    tokens: int = typer.Option(1000, "--tokens", min=1, help="Maximum number of new tokens."),
    text_field: str = _TEXT_FIELD,
    as_json: bool = AS_JSON,
) -> None:
    """Add tokens of a domain to a BPE tokenizer, for continued pre-training. Existing ids stay.

    Example: bessemer data extend tokenizer.json medical.json papers/ --tokens 2000
    """
    from bessemer.data.curate.scores.train import read_texts
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.data.tokenizer.vocabulary import extend as run_extend
    from bessemer.observe.progress import working

    _check_output(out)
    with working("choosing tokens"):
        extended = run_extend(Tokenizer.load(tokenizer), read_texts(paths, text_field), tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    extended.tokenizer.save(out)
    before, after = extended.before.bytes_per_token, extended.after.bytes_per_token
    if as_json:
        rates = {"bytes_per_token_before": before, "bytes_per_token_after": after}
        print_json({"file": str(out), "new_tokens": extended.tokens, **rates}, ensure_ascii=False)
        return
    print(f"{len(extended.tokens):,} new tokens; bytes per token of this text {before:.2f} -> {after:.2f}")
    print("first: " + ", ".join(repr(token) for token in extended.tokens[:12]))
    print(f"written  {out}")
