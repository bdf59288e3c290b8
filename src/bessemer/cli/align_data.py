"""`bessemer align critique`, `measure`, `audit` and `redteam`: pairs from a model's own answers, and from files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, print_json, print_rows
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.align.responder import Responder

MODEL = typer.Argument(help="A run, a checkpoint, a Hugging Face or LoRA folder; or an endpoint as URL#NAME.")
PROMPTS = typer.Option(..., "--prompts", help='One prompt per line, or .jsonl with "prompt" or "messages".')
TEMPLATE = typer.Option(None, "--template", help="Chat template if the model has none (default: plain).")
MEASURE = "words:damn,heck; words:FILE; regex:PATTERN; file.py:function or a judge, as `align best --reward`."
KEY_ENV = typer.Option(None, "--key-env", help="The environment variable with the key of an endpoint.")
MAX_TOKENS = typer.Option(256, "--max-tokens", min=1, help="Maximum number of tokens of an answer.")
TEMPERATURE = typer.Option(1.0, "--temperature", help="0 always takes the most likely token.")
SEED = typer.Option(0, "--seed", help="The same seed gives the same answers.")


def check_new_files(files: dict[str, Path | None]) -> None:
    """Refuses outputs that exist, by option."""
    from bessemer.align.scored_rows import check_new_file

    for option, path in files.items():
        if path is not None:
            check_new_file(path, option)


def open_model(
    model: str, max_tokens: int, temperature: float, checkpoint: str, device: str, template: str | None,
    key_env: str | None = None,
) -> Responder:  # fmt: skip
    """A model that answers, with a line of progress while it loads."""
    from bessemer.align.responder import open_responder
    from bessemer.model.generate import Sampling
    from bessemer.observe.progress import working
    from bessemer.train.answers import AnswerSettings

    with working(f"loading {model}"):
        settings = AnswerSettings(max_tokens, sampling=Sampling(temperature))
        return open_responder(model, settings, checkpoint, device, template, key_env)


def critique(
    model: str = MODEL,
    principles: Path = typer.Option(..., "--principles", help="YAML: principles: [{name, critique, revision}, ...]."),
    prompts: Path = PROMPTS,
    write: Path = typer.Option(..., "--write", help="The pairs: revision chosen, answer rejected (.jsonl)."),
    sft: Path | None = typer.Option(None, "--sft", help="Also write the revisions, for objective: sft (.jsonl)."),
    critic: str | None = typer.Option(None, "--critic", help="Another model that criticises and revises."),
    rounds: int = typer.Option(1, "--rounds", min=1, help="Revisions of each answer, one principle each."),
    measure: str | None = typer.Option(None, "--measure", help=f"The unwanted behaviour: {MEASURE}"),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = SEED,
    template: str | None = TEMPLATE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    key_env: str | None = KEY_ENV,
    as_json: bool = AS_JSON,
) -> None:
    """Constitutional AI: a model answers, criticises its answers by principles and revises them; writes pairs for dpo.

    A stopped command continues where it was. With --measure, revisions that still show the behaviour are left out, and
    its rate is printed before and after.

    Example: bessemer align critique runs/sft --principles principles.yaml --prompts prompts.txt --write pairs.jsonl
    """
    from bessemer.align.behaviour import open_detector
    from bessemer.align.critique import critique_all, load_principles
    from bessemer.align.records import forget_partial, write_rows
    from bessemer.observe.progress import working
    from bessemer.train.answers import read_prompt_rows

    check_new_files({"--write": write, "--sft": sft})
    rules, texts = load_principles(principles), read_prompt_rows(prompts)
    detector = open_detector(measure, device=device) if measure else None
    answerer = open_model(model, max_tokens, temperature, checkpoint, device, template, key_env)
    other = open_model(critic, max_tokens, temperature, "last", device, template, key_env) if critic else None
    with working("answering") as report:
        result = critique_all(answerer, texts, rules, rounds, seed, other, detector, write, report)
    pairs = write_rows(write, result.pairs())
    if sft:
        write_rows(sft, result.revisions())
    forget_partial(write)
    if as_json:
        print_json(result.to_json())
        return
    rows = [("prompts", f"{len(result.records):,}"), ("pairs", f"{pairs:,} in {write}")]
    rows += [(f"left out: {reason}", f"{count:,}") for reason, count in result.left_out().items() if count]
    if result.before and result.after:
        rows += [("unwanted in answers", str(result.before)), ("unwanted in revisions", str(result.after)),
                 ("change", str(result.change))]  # fmt: skip
    print_rows(rows)


def measure(
    model: str = MODEL,
    prompts: Path = PROMPTS,
    measure: str = typer.Option(..., "--measure", help=MEASURE),
    before: str | None = typer.Option(None, "--before", help="An earlier model to compare with."),
    samples: int = typer.Option(1, "--samples", min=1, help="Answers to each prompt."),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = SEED,
    template: str | None = TEMPLATE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    key_env: str | None = KEY_ENV,
    as_json: bool = AS_JSON,
) -> None:
    """Measure how often a model's answers show a behaviour, with an interval; with --before, the change and its test.

    Example: bessemer align measure runs/dpo --before runs/sft --prompts test.txt --measure words:rubbish,awful
    """
    from bessemer.align.behaviour import measure_rate, open_detector
    from bessemer.observe.progress import working
    from bessemer.statistics import PairedChange, Rate
    from bessemer.train.answers import read_prompt_rows

    detector, texts = open_detector(measure, device=device), read_prompt_rows(prompts)
    models = ([("before", before, "last")] if before else []) + [("model", model, checkpoint)]
    flags = {}
    for name, folder, which in models:
        responder = open_model(folder, max_tokens, temperature, which, device, template, key_env)
        with working(f"answering: {folder}") as report:
            flags[name] = measure_rate(responder, texts, detector, samples, seed, report)
    shares = {name: [sum(some) / len(some) for some in values] for name, values in flags.items()}
    change = PairedChange.of(shares["before"], shares["model"]) if before else None
    rates = {name: Rate.of(flag for some in values for flag in some) for name, values in flags.items()}
    if as_json:
        result = {name: rate.to_json() for name, rate in rates.items()}
        print_json(result | ({"change": change.to_json()} if change else {}))
        return
    print_rows([*((name, str(rate)) for name, rate in rates.items()), *([("change", str(change))] if change else [])])


def audit(
    pairs: Path = typer.Argument(help="Preference pairs: .jsonl with prompt, chosen and rejected."),
    write: Path | None = typer.Option(None, "--write", help="Write all rows with their scores (.jsonl)."),
    drop: bool = typer.Option(False, "--drop", help="With --write: only the rows that are not listed, as they were."),
    corrections: Path | None = typer.Option(
        None, "--corrections", help="Write the listed pairs with their answers exchanged: the correction is chosen."
    ),
    columns: list[str] = typer.Option(
        [], "--column", help="A column by its purpose, such as chosen=good (repeatable); default: as named."
    ),
    truth: str | None = typer.Option(
        None, "--truth", help="The field with the true answer: a chosen answer that has it agrees with a right claim."
    ),
    model: Path | None = typer.Option(
        None, "--model", help="Ask a model too: pairs whose chosen answer it finds likelier are not listed."
    ),
    template: str | None = TEMPLATE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    show: int = typer.Option(20, "--show", min=0, help="Listed pairs to print."),
    as_json: bool = AS_JSON,
) -> None:
    """List preference pairs whose chosen answer flatters where the rejected one does not; drop or swap them.

    Example: bessemer align audit pairs.jsonl --write clean.jsonl --drop --corrections corrections.jsonl
    """
    from bessemer.align.audit import audit_pairs
    from bessemer.align.records import write_rows
    from bessemer.align.responder import load_chat_model
    from bessemer.observe.progress import working

    if drop and write is None:
        raise UserError("--drop: name the file for the other rows: add --write FILE")
    check_new_files({"--write": write, "--corrections": corrections})
    with working("reading the pairs") as report:
        loaded = load_chat_model(model, checkpoint, device, template) if model else None
        result = audit_pairs(pairs, dict(text.partition("=")[::2] for text in columns), truth, loaded, report)
    files = []
    if write:
        count = write_rows(write, result.clean_rows() if drop else result.scored_rows())
        files.append(("written", f"{count:,} rows in {write}"))
    if corrections:
        files.append(("corrections", f"{write_rows(corrections, result.corrections()):,} pairs in {corrections}"))
    if as_json:
        print_json(result.to_json(), ensure_ascii=False)
        return
    listed = result.listed
    for pair in listed[:show]:
        scores = f"{pair.agreeable[0]:+.2f} over {pair.agreeable[1]:+.2f}"
        scores += f", model {pair.model:+.2f}" if pair.model is not None else ""
        print(f"{pair.place}  {scores}\n   chosen    {_excerpt(pair.chosen)}\n   rejected  {_excerpt(pair.rejected)}")
    if len(listed) > show:
        print(f"and {len(listed) - show:,} more: --show {len(listed)} prints all, --json too")
    print_rows([
        ("pairs", f"{len(result.pairs):,}"),
        ("listed as sycophantic", f"{len(listed):,} ({len(listed) / len(result.pairs):.1%})"),
        ("chosen is more agreeable", f"{result.more_agreeable} pairs that differ"), *files,
    ])  # fmt: skip


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:99]}\N{HORIZONTAL ELLIPSIS}"


def redteam(
    model: str = MODEL,
    attacks: Path = typer.Option(..., "--attacks", help="Harmful requests: one per line, or .jsonl."),
    benign: Path | None = typer.Option(None, "--benign", help="Harmless requests that should be answered."),
    mutations: str = typer.Option(
        "all",
        "--mutations",
        help="Comma-separated: all, none, case, leetspeak, role-play, prefix, base64, typos, spaces, table:FILE.",
    ),
    harm: str | None = typer.Option(
        None, "--harm", help=f"What counts as harmful (default: every answer that is no refusal): {MEASURE}"
    ),
    write: Path | None = typer.Option(None, "--write", help="Pairs from failures: harmful answer rejected (.jsonl)."),
    refusal: str | None = typer.Option(
        None, "--refusal", help="The chosen answer if the model never refuses a request."
    ),
    max_tokens: int = MAX_TOKENS,
    temperature: float = typer.Option(0.0, "--temperature", help="0 always takes the most likely token."),
    seed: int = SEED,
    template: str | None = TEMPLATE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    key_env: str | None = KEY_ENV,
    as_json: bool = AS_JSON,
) -> None:
    """Red-team a model: harm and refusal rates for each mutation of harmful prompts, over-refusal of harmless ones.

    Refusals are recognised by English phrases. A stopped command with --write continues where it was.

    Example: bessemer align redteam runs/dpo --attacks attacks.txt --benign benign.txt --write pairs.jsonl
    """
    from bessemer.align.behaviour import open_detector
    from bessemer.align.mutations import find_mutations
    from bessemer.align.records import forget_partial, write_rows
    from bessemer.align.redteam import REFUSAL, red_team
    from bessemer.observe.progress import working
    from bessemer.train.answers import read_prompt_rows

    check_new_files({"--write": write})
    forms = find_mutations([name.strip() for name in mutations.split(",") if name.strip() not in ("", "none")])
    requests, harmless = read_prompt_rows(attacks), read_prompt_rows(benign) if benign else []
    detector = open_detector(harm, "--harm", device) if harm else None
    responder = open_model(model, max_tokens, temperature, checkpoint, device, template, key_env)
    with working("answering") as report:
        result = red_team(responder, requests, forms, harmless, detector, seed, write, report)
    if write:
        count = write_rows(write, result.pairs(refusal or REFUSAL))
        forget_partial(write)
    if as_json:
        print_json(result.to_json())
        return
    lines = [("form", "harmful", "refused")]
    lines += [(form, str(result.harm(form)), str(result.refusal(form))) for form in result.forms]
    print_rows([*lines, ("all", str(result.harm()), str(result.refusal()))])
    if harmless:
        print(f"harmless prompts refused: {result.over_refusal}")
    if write:
        print(f"written  {write}  {count:,} pairs")
