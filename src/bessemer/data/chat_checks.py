"""Named checks of fine-tuning rows, made before the first step: mistakes that waste a run although its loss looks fine.

A check refuses what makes a run worthless and warns of what is a matter of degree. `lints.silence` accepts either by
name. Each reads the sample of a source's rows, or counts of all its rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bessemer.data.chat_rows import ChatRow, RowCounts, SharedRows
from bessemer.data.language import LanguageDetector
from bessemer.data.tokenizer.chat import (
    BOS_NAMES,
    ChatSegment,
    Message,
    find_template,
    is_built_in,
    learned_turns,
    read_template,
)
from bessemer.data.tokenizer.tokenizer import Tokenizer, hf_prompt_format, named_tokens
from bessemer.errors import UserError
from bessemer.observe.format import short_path

WORTHLESS = 0.5  # share of the rows from which a mistake refuses the run
_RARE = 0.01  # share of the rows up to which a mistake is not reported
_SHORT, _EMPTY, _MIXED, _OTHER = 0.5, 0.02, 0.3, 0.05  # shares of rows from which these are reported
_FEWEST = 10  # rows whose language is known, to compare them
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
_PLACES = 3
_PARAGRAPHS = 8  # of prompts, whose languages are compared with the answer's
# Names that only special tokens have.
_SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<(?:start|end)_of_\w{1,20}>|</?s>|<[be]os>")
_END = re.compile(r"end|eot|eos|/s")  # in the names of tokens that end a turn
_ROLE = re.compile(r"(?i)^\s*(system|user|assistant|human|model|tool|instruction|response)\b:?\s*")
_WORDS = re.compile(r"[\u0e00-\u0eff\u3040-\u9fff\uac00-\ud7af]|\w+")  # letters of scripts without spaces count alone


@dataclass(frozen=True)
class Mistake:
    """The finding of one check: what is wrong, in how many rows, where, and the fix."""

    name: str
    what: str
    fix: str
    count: int
    places: list[str]
    refuses: bool = False

    def line(self) -> str:
        """One line with the first place and the name."""
        place = f"{short_path(self.places[0])}: " if self.places else ""
        return f"{place}{self.what}: {self.fix} [{self.name}]"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "refuses": self.refuses, "count": self.count, "what": self.what, "fix": self.fix,
            "places": self.places,
        }  # fmt: skip


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokens that tokenizer_config.json names, and the ids that end an answer by the model's files."""

    names: dict[str, str] = field(default_factory=dict)  # bos, eos, pad
    ends: frozenset[int] = frozenset()
    template: str | None = None  # the model's own


def read_tokenizer_config(folder: Path, tokenizer: Tokenizer) -> TokenizerConfig:
    names = named_tokens(folder)
    ends = hf_prompt_format(folder, tokenizer).ends if names else frozenset[int]()
    file = next((file for name in TEMPLATE_FILES if (file := folder / name).is_file()), None)
    try:
        return TokenizerConfig(names, ends, read_template(str(file), ()) if file else None)
    except UserError:  # a tokenizer_config.json without a template
        return TokenizerConfig(names, ends)


@dataclass
class RowSource:
    """What the checks read of one source."""

    tokenizer: Tokenizer
    rows: list[ChatRow]
    documents: int  # of which `rows` are a sample
    counts: RowCounts
    context: int | None = None
    template: str | None = None  # of conversations; None: the rows are texts or the caller's tokens
    config: TokenizerConfig = field(default_factory=TokenizerConfig)
    masked: bool = True  # False: texts, trained completely
    caller_masks: bool = False
    system_places: Sequence[str] = ()  # rows with a system message
    shared: SharedRows = field(default_factory=SharedRows)

    @property
    def scope(self) -> str:
        """How many rows the sample has, and of how many."""
        if len(self.rows) == self.documents:
            return f"{self.documents:,} rows"
        return f"{len(self.rows):,} rows that were read (the first ones, others by hash) of {self.documents:,}"

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special.values())

    @cached_property
    def trained(self) -> list[tuple[ChatRow, list[tuple[int, int]]]]:
        """The rows with trained tokens, and the ranges of these."""
        return [(row, runs) for row in self.rows if (runs := row.trained_runs())]

    def plain(self, ids: Iterable[int]) -> list[str]:
        """The texts between special tokens."""
        pieces: list[list[int]] = [[]]
        for token in ids:
            if token in self.special_ids:
                pieces.append([])
            else:
                pieces[-1].append(token)
        return [self.tokenizer.decode(piece, continues=True) for piece in pieces if piece]

    @cached_property
    def answers(self) -> list[tuple[str, list[str], str]]:
        """Of each conversation: its place, the paragraphs of its prompts and the longest answer."""
        if not self.masked:
            return []
        texts = []
        for row, runs in self.trained:
            answer = max((" ".join(self.plain(row.ids[a:b].tolist())).strip() for a, b in runs), key=len)
            prompt = "\n\n".join(self.plain(row.ids[row.weights <= 0].tolist()))
            paragraphs = [text for piece in prompt.split("\n\n") if (text := _ROLE.sub("", piece).strip())]
            texts.append((row.place, paragraphs[-_PARAGRAPHS:], answer))
        return texts

    def probe(self, *messages: Message) -> list[ChatSegment]:
        """How the template lays out a conversation; empty if it refuses it, as preparing the rows then did."""
        assert self.template is not None
        try:
            return list(find_template(self.template, self.tokenizer)(
                messages, learned_turns(messages, "all"), self.tokenizer))  # fmt: skip
        except UserError:
            return []

    @cached_property
    def missing_names(self) -> list[str]:
        """Special tokens that the template writes as text that the tokenizer splits."""
        if self.template is None:
            return []
        user, assistant, system, tool = (
            {"role": role, "content": "x"} for role in ("user", "assistant", "system", "tool")
        )
        probes = ([user, assistant], [system, user, assistant], [user, assistant, tool, assistant])
        segments = (segment for messages in probes for segment in self.probe(*messages))
        text = "".join(" " if segment.special else segment.text for segment in segments)
        return [name for name in dict.fromkeys(_SPECIAL.findall(text)) if len(self.tokenizer.encode(name)) != 1]

    @cached_property
    def template_source(self) -> str:
        """The Jinja source; empty for a built-in template."""
        return read_template(self.template, ()) if self.template and not is_built_in(self.template) else ""

    def end_of(self, row: ChatRow, runs: list[tuple[int, int]]) -> int | None:
        """The special token that ends the last answer; None if its last trained token is another. The caller's rows may
        be packed or cut: there, any trained special token."""
        start, stop = runs[0 if self.caller_masks else -1][0], runs[-1][1]
        ids = row.ids[start:stop].tolist()
        trained = row.weights[start:stop] > 0
        last = max((i for i, token in enumerate(ids) if trained[i] and token in self.special_ids), default=None)
        if last is None or (not self.caller_masks and self.tokenizer.decode(ids[last + 1 :]).strip()):
            return None
        return int(ids[last])


Mistakes = Iterator[Mistake]


def _mistake(what: str, fix: str, places: Sequence[str], rows: int, worthless: float = WORTHLESS) -> Mistake:
    """A mistake of some of the rows: it refuses the run from a share on."""
    refuses = len(places) >= worthless * rows
    return Mistake("", what, fix, len(places), list(places[:_PLACES]), refuses)


def _share(count: int, total: int) -> str:
    return "all" if count == total else f"{count / total:.0%} ({count:,})" if count >= _RARE * total else f"{count:,}"


def nothing_trained(source: RowSource) -> Mistakes:
    counts = source.counts
    if count := counts.counts["untrained"]:
        what = f"{_share(count, counts.rows)} of {counts.rows:,} rows have no trained token"
        fix = "give each a turn of the assistant whose weight is not 0 and which the template writes, or delete it"
        yield Mistake("", what, fix, count, counts.places["untrained"], count == counts.rows)


def turn_end_untrained(source: RowSource) -> Mistakes:
    ends = source.config.ends | {source.tokenizer.eos_id}
    unended = [row.place for row, runs in source.trained if source.end_of(row, runs) is None]
    masked = set(_places_of_masked_ends(source, ends))
    places = [place for place in unended if place not in masked]
    if len(places) > _RARE * len(source.trained):
        what = f"in {_share(len(places), len(source.rows))} of {source.scope} no end of the turn is trained"
        where = (
            "in the mask" if source.caller_masks else "inside the template's {% generation %} block (tokenizer.chat)"
        )
        fix = f"the model would never stop: include the token that ends the turn, such as {{{{ eos_token }}}}, {where}"
        yield _mistake(what, fix, places, len(source.trained))


def pad_is_eos(source: RowSource) -> Mistakes:
    """Only the caller's own masks can do this: padding of our rows has no weight by its position."""
    ends = source.config.ends | {source.tokenizer.eos_id}
    places = list(_places_of_masked_ends(source, ends))
    if len(places) > _RARE * len(source.trained):
        what = f"in {_share(len(places), len(source.rows))} of {source.scope} the end of the answer is masked out"
        fix = (
            "the model would never stop: where EOS is also the padding token, mask padding by its position, or leave "
            "it out"
        )
        yield _mistake(what, fix, places, len(source.trained))


def _places_of_masked_ends(source: RowSource, ends: frozenset[int]) -> Iterator[str]:
    if source.caller_masks:
        for row, runs in source.trained:
            stop = runs[-1][1]
            if source.end_of(row, runs) is None and stop < row.ids.size and int(row.ids[stop]) in ends:
                yield row.place


def double_bos(source: RowSource) -> Mistakes:
    places = [
        row.place
        for row in source.rows
        if row.ids.size > 1 and row.ids[0] == row.ids[1] and int(row.ids[0]) in source.special_ids
    ]
    if places:
        name = source.tokenizer.decode([int(next(row for row in source.rows if row.place == places[0]).ids[0])])
        what = f"{_share(len(places), len(source.rows))} of {source.scope} begin with {name} twice"
        fix = "remove one from the template or the data; the model has only seen one"
        yield _mistake(what, fix, places, len(source.rows))


def answer_past_context(source: RowSource) -> Mistakes:
    counts = source.counts
    if count := counts.counts["late"]:
        what = (
            f"in {_share(count, counts.rows)} of {counts.rows:,} rows the answer lies past the context of "
            f"{source.context:,} tokens, where it is cut off or trained without its prompt"
        )
        fix = f"shorten the prompt, drop these rows, or raise data.context (now {source.context})"
        yield Mistake("", what, fix, count, counts.places["late"], count >= WORTHLESS * counts.rows)


def rows_beyond_context(source: RowSource) -> Mistakes:
    counts = source.counts
    count = counts.counts["long"]
    if source.masked and count > _RARE * counts.rows:
        what = (
            f"{count / counts.rows:.0%} of {counts.rows:,} rows are cut at {source.context:,} tokens; the longest has "
            f"{counts.longest:,}"
        )
        fix = "raise data.context, or drop long rows with the step length"
        yield Mistake("", what, fix, count, counts.places["long"])


def template_tokens_missing(source: RowSource) -> Mistakes:
    """Some models have role names such as <|user|> as text (Zephyr, Tulu), but the end of a turn must be one token."""
    names = source.missing_names
    refuses = any(_END.search(name) for name in names)
    if refuses or (names and source.template_source != source.config.template):
        what = f"the chat template writes {', '.join(names)}, which the tokenizer splits into pieces"
        fix = (
            "if it belongs to another tokenizer, use this model's own template (tokenizer.chat), or give the tokens an "
            f"id: tokenizer: {{special: {json.dumps(names)}}}"
        )
        yield Mistake("", what, fix, len(source.rows), [], refuses)


def bos_eos_mismatch(source: RowSource) -> Mistakes:
    """The first token of the rows and the trained end of answers beside those that tokenizer_config.json names."""
    ids, names, tokenizer = source.tokenizer.special, source.config.names, source.tokenizer
    eos, bos = ids.get(names.get("eos", "")), ids.get(names.get("bos", ""))
    ends = [source.end_of(row, runs) for row, runs in source.trained]
    other = ends.count(tokenizer.eos_id)
    if eos not in (None, tokenizer.eos_id) and tokenizer.eos_id not in source.config.ends and eos not in ends and other:
        what = f"answers end with {tokenizer.eos}, but tokenizer_config.json names {names['eos']} as eos_token"
        fix = f"the model stops at another token than it learns: write tokenizer: {{eos: {json.dumps(names['eos'])}}}"
        yield Mistake("", what, fix, other, [source.trained[0][0].place], True)
    firsts = {ids[name] for name in BOS_NAMES if name in ids} - {bos}
    places = [row.place for row in source.rows if row.ids.size and int(row.ids[0]) in firsts]
    if bos is not None and places:
        what = f"{_share(len(places), len(source.rows))} of {source.scope} begin with another token than {names['bos']}"
        fix = "tokenizer_config.json names it as bos_token: write it in the template (tokenizer.chat)"
        yield _mistake(what, fix, places, len(source.rows))


def special_tokens_split(source: RowSource) -> Mistakes:
    special = [name for name in source.tokenizer.special if len(name) > 2 and not name.isalnum()]
    pattern = re.compile("|".join([*map(re.escape, sorted(special, key=len, reverse=True)), _SPECIAL.pattern]))
    spelled = Counter[str]()
    by_template = {*source.missing_names, *_SPECIAL.findall(source.template_source)} - source.tokenizer.special.keys()
    places = []
    for row in source.rows:
        text = "\n".join(source.plain(row.ids.tolist()))
        if names := [name for name in dict.fromkeys(pattern.findall(text)) if name not in by_template]:
            spelled.update(names)
            places.append(row.place)
    if len(places) > _RARE * len(source.rows):
        what = (
            f"{_share(len(places), len(source.rows))} of {source.scope} spell {spelled.most_common(1)[0][0]} as text, "
            "which is encoded in pieces"
        )
        fix = "the template was applied before: give messages, or prompt and completion, without its tokens"
        yield _mistake(what, fix, places, len(source.rows))


def leaked_validation(source: RowSource) -> Mistakes:
    shared = source.shared
    if shared.count:
        what = (
            f"of {shared.held_out:,} validation rows and {shared.training:,} training rows that were compared, "
            f"{shared.count:,} are the same but for case, spacing or punctuation (as "
            f"{short_path(shared.places[0][1])})"
        )
        fix = "the validation loss is too low: remove copies with the steps whitespace, unicode and dedup_minhash"
        yield Mistake("", what, fix, shared.count, [place for place, _ in shared.places])


def short_answers(source: RowSource) -> Mistakes:
    total = len(source.answers)
    words = {place: len(_WORDS.findall(answer)) for place, _, answer in source.answers}
    empty = [place for place, _, answer in source.answers if not answer]
    if len(empty) >= max(1, _EMPTY * total):
        what = f"{_share(len(empty), total)} of {source.scope} have empty answers"
        yield _mistake(what, "the model would learn to say nothing: delete them", empty, total)
    short = [place for place, count in words.items() if count <= 1]
    if len(short) > _SHORT * total and len(empty) < len(short):
        what = f"{_share(len(short), total)} of {source.scope} have answers of one word"
        fix = "check that the columns are the right ones; for labels, see objective: classify"
        yield replace(_mistake(what, fix, short, total), refuses=False)


def language_mixup(source: RowSource) -> Mistakes:
    detector = LanguageDetector()
    answers = [
        (place, language, prompt) for place, prompt, text in source.answers if (language := detector.detect(text))
    ]
    if len(answers) < _FEWEST:
        return
    compared, mixed = 0, []
    for place, language, prompt in answers:
        spoken = [detector.detect(text) for text in prompt]
        if spoken and (last := spoken[-1]):  # the question: a system prompt may be in another language
            compared += 1
            if language not in spoken:
                mixed.append((place, last, language))
    if compared >= _FEWEST and len(mixed) >= _MIXED * compared:
        asked_in, answered_in = Counter((prompt, answer) for _, prompt, answer in mixed).most_common(1)[0][0]
        what = (
            f"{_share(len(mixed), compared)} of {compared:,} rows are answered in another language than they are "
            f"asked in ({asked_in}, then {answered_in}; {detector.method})"
        )
        fix = "check that prompts and answers belong together; silence this for translation"
        yield Mistake("", what, fix, len(mixed), [place for place, _, _ in mixed[:_PLACES]])
        return
    counts = Counter(language for _, language, _ in answers)
    usual, _ = counts.most_common(1)[0]
    others = [place for place, language, _ in answers if language != usual]
    if len(others) >= max(3, _OTHER * len(answers)):
        listed = ", ".join(f"{name} {count / len(answers):.0%}" for name, count in counts.most_common(4))
        what = (
            f"{len(others) / len(answers):.0%} of {len(answers):,} answers are in other languages than the rest "
            f"({listed}; {detector.method})"
        )
        fix = "keep one language with the step language, or silence this for multilingual data"
        yield Mistake("", what, fix, len(others), others[:_PLACES])


def system_prompt_lost(source: RowSource) -> Mistakes:
    if source.template is None or not source.system_places:
        return
    marker = "zqxsystem"
    segments = source.probe(
        {"role": "system", "content": marker}, {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    )
    if segments and marker not in "".join(segment.text for segment in segments):
        what = (
            f"the chat template leaves out system messages, which {len(source.system_places):,} of the first rows have"
        )
        fix = "write them in the template (tokenizer.chat), or put them into the first message of the user"
        yield Mistake("", what, fix, len(source.system_places), list(source.system_places[:_PLACES]), True)


CHECKS: dict[str, Callable[[RowSource], Mistakes]] = {
    check.__name__: check
    for check in (
        nothing_trained, template_tokens_missing, turn_end_untrained, pad_is_eos, double_bos, answer_past_context,
        bos_eos_mismatch, special_tokens_split, system_prompt_lost, leaked_validation, short_answers, language_mixup,
        rows_beyond_context,
    )
}  # fmt: skip


def check_rows(source: RowSource, silence: Sequence[str] = ()) -> list[Mistake]:
    """The mistakes of a source, those that refuse the run first. `silence` names checks to leave out."""
    mistakes = [
        replace(mistake, name=name)
        for name, check in CHECKS.items()
        if name not in silence and (source.rows or name == "nothing_trained")
        for mistake in check(source)
    ]
    return sorted(mistakes, key=lambda mistake: not mistake.refuses)
