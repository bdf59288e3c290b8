"""`bessemer data check`: problems of files, mistakes in fine-tuning rows, and which tokens are trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import AS_JSON, SETTINGS, naming_spec, print_json, table_console
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.data.chat_rows import ChatRow
    from bessemer.data.check import CheckReport
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.observe.page import WeightedText


def check(
    paths: list[str] = typer.Argument(help="Files, folders, globs or URLs; or the YAML file of a run."),
    settings: list[str] = SETTINGS,
    format: str = typer.Option("auto", "--format", help="As in a spec: auto, jsonl, parquet, text, ..."),
    text_field: str = typer.Option("text", "--text-field", help="The field or column that holds the text."),
    messages_field: str | None = typer.Option(None, "--messages", help="The field that holds a conversation."),
    tokenizer: Path | None = typer.Option(None, "--tokenizer", help="Check conversations as they would be trained."),
    context: int | None = typer.Option(None, "--context", min=2, help="Tokens per training sequence."),
    chat: str | None = typer.Option(
        None, "--chat", help="The chat template (default: that of the tokenizer's folder, or chatml)."
    ),
    show_masks: bool = typer.Option(False, "--show-masks", help="Print rows with the trained tokens marked."),
    rows: int = typer.Option(5, "--rows", min=1, max=10_000, help="Rows to print of each source."),
    html: Path | None = typer.Option(None, "--html", help="Write these rows and the result to a page."),
    as_json: bool = AS_JSON,
) -> None:
    """Check files or the sources of a spec for problems that would harm training; print how often, where, and the fix.

    A spec with objective sft, dpo or kto gets the named checks that its run makes before the first step; its data is
    prepared if necessary. Exit code 1 if there are problems, 2 if the run would be refused.

    Example: bessemer data check my-run.yaml --show-masks --rows 3
    """
    from bessemer.observe.format import short_path
    from bessemer.observe.page import WeightedText

    spec = Path(paths[0]) if len(paths) == 1 and paths[0].endswith((".yaml", ".yml")) else None
    if spec:
        if tokenizer or messages_field or chat or context:
            raise UserError(f"--tokenizer, --messages, --chat, --context: {spec} has them: change it, or write --set")
        lines, result, shown, code = _check_spec(spec, settings, rows)
        if (show_masks or html) and not shown:
            raise UserError(f"--show-masks: {spec} has no conversations: its objective is not sft, dpo or kto")
    else:
        lines, result, shown, code = _check_files(
            paths, format, text_field, messages_field, tokenizer, context, chat, show_masks or html is not None
        )
        shown = shown[:rows]
    texts = [WeightedText(row.pieces(loaded), f"{short_path(row.place)}, {_size(row)}") for row, loaded in shown]
    if html:
        _write_page(html, lines, texts)
    if as_json:
        masks = [{"place": row.place, "pieces": row.pieces(loaded)} for row, loaded in shown]
        print_json(result | ({"rows": masks} if show_masks else {}), ensure_ascii=False)
    else:
        for text in texts if show_masks else ():
            _print_masks(text)
        print("\n".join([*lines, *([f"page  {html}"] if html else [])]))
    raise typer.Exit(code)


Checked = tuple[list[str], dict[str, Any], "list[tuple[ChatRow, Tokenizer]]", int]


def _check_files(
    paths: list[str], format: str, text_field: str, messages_field: str | None, tokenizer: Path | None,
    context: int | None, chat: str | None, needs_tokenizer: bool,
) -> Checked:  # fmt: skip
    from bessemer.data.chat_checks import read_tokenizer_config
    from bessemer.data.check import check_files
    from bessemer.data.tokenizer.chat import special_tokens
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.observe.progress import working
    from bessemer.spec.load import source_spec

    if needs_tokenizer and tokenizer is None:
        raise UserError("--show-masks: which tokens are trained depends on the tokenizer: add --tokenizer FILE")
    source = source_spec({"path": paths, "format": format, "text_field": text_field, "messages_field": messages_field})
    config = loaded = None
    if tokenizer:
        from bessemer.train.trained import folder_template_file  # imports torch

        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        chat = chat or str(folder_template_file(folder) or "chatml")
        loaded = Tokenizer.load(tokenizer, special=special_tokens(chat))
        config = read_tokenizer_config(folder, loaded)
        source = _recognise(source)
    with working("listing the files") as report:
        result = check_files(source, loaded, context, chat or "chatml", report, config)
    shown = [(row, loaded) for row in result.rows if loaded]
    return _file_lines(result), result.to_json(), shown, int(bool(result.problems))


def _recognise(source: Any) -> Any:
    """The source with the format of conversations that its first rows have; as it is if they have none."""
    from bessemer.data.read.chat_formats import recognise_source

    try:
        return recognise_source("files", source)
    except UserError:
        return source


def _file_lines(result: CheckReport) -> list[str]:
    lines = [f"{result.documents:,} documents, {result.characters:,} characters in {result.files:,} files"]
    lines += [f"     note  {line}" for line in result.notes]
    for problem in result.problems:
        lines += [f"{problem.count:>9,}  {problem.what}", f"           fix: {problem.fix}"]
        lines += [f"           {example}" for example in problem.examples]
    return lines if result.problems else [*lines, "no problems found"]


def _check_spec(path: Path, settings: list[str], most_rows: int) -> Checked:
    """The problems of each source's files, then the named checks of its rows."""
    from bessemer.data.check import check_files
    from bessemer.observe.format import short_path
    from bessemer.observe.progress import working
    from bessemer.plan.decision import Plan
    from bessemer.session.data import PYTHON_SOURCE, open_data
    from bessemer.session.preferences import agreement_lines, check_pair_sources, decide_sharing
    from bessemer.session.sft import check_sources, open_rows
    from bessemer.session.start import complete_spec, decide_shape, open_source
    from bessemer.spec.load import load_spec
    from bessemer.spec.preference import PREFERENCES

    spec = complete_spec(load_spec(path, settings))
    lines, result, shown, refused, problems = [], dict[str, Any](sources={}), [], False, False
    with working("listing the sources") as report, naming_spec(path, settings):
        for name, source in spec.data.sources.items():
            if spec.data.store is not None or source.path == [PYTHON_SOURCE]:
                continue
            files = check_files(source, progress=report)
            lines += [f"data.sources.{name}", *_file_lines(files)]
            result["sources"][name] = files.to_json()
            problems = problems or bool(files.problems)
        if spec.objective in ("sft", *PREFERENCES):
            data = open_data(spec, Plan(), report)
            shape, window = decide_shape(spec, open_source(spec), data.tokenizer.vocab_size, Plan())
            if spec.objective == "sft":
                mistakes = check_sources(spec, data, window)
            else:
                spec = decide_sharing(spec, shape, data, Plan())
                mistakes = check_pair_sources(spec, data, window, lengths=True)
            lines += [f"     note  {line}" for line in agreement_lines(spec)]
            for name, training in data.train.items():
                reader = open_rows(training, data.tokenizer, window)
                count = min(most_rows, reader.count) if reader else 0
                shown += [(reader.row(number), data.tokenizer) for number in range(count) if reader]
                for one in mistakes.get(name, []):
                    lines.append(f"{'error' if one.refuses else 'warning'}: data.sources.{name}: {one.line()}")
                    lines += [f"           {short_path(place)}" for place in one.places[1:]]
                    refused, problems = refused or one.refuses, True
            result["mistakes"] = {name: [one.to_json() for one in some] for name, some in mistakes.items()}
            kind = {"dpo": "pairs", "kto": "labelled answers"}.get(spec.objective, "fine-tuning rows")
            lines += [] if mistakes else [f"{kind}: no mistakes found"]
    return lines, result, shown, 2 if refused else int(problems)


def _size(row: ChatRow) -> str:
    return f"{row.ids.size:,} tokens, {int((row.weights > 0).sum()):,} trained"


def _print_masks(text: WeightedText) -> None:
    """Trained text is green on a terminal, and in double brackets elsewhere."""
    from rich.text import Text

    console = table_console()
    if not console.is_terminal:
        print(f"{text.caption}\n{text.plain()}\n")
        return
    line = Text(f"{text.caption}\n", style="dim")
    for piece, weight in text.visible():
        if weight not in (0, 1):
            line.append(f"{weight:g}:", style="yellow")
        line.append(piece, style="bold green" if weight > 0 else "not dim")
    console.print(line, soft_wrap=True)
    console.print()


def _write_page(path: Path, lines: list[str], texts: list[WeightedText]) -> None:
    from bessemer.observe.page import Code, html_page
    from bessemer.storage import atomic_path

    page = html_page(
        "Trained tokens", [("", [Code("\n".join(lines))]), ("Rows: trained tokens are marked", list(texts))]
    )
    with atomic_path(path, parents=True) as temporary:
        temporary.write_text(page, encoding="utf-8")
