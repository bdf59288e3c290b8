"""A look at the first rows of a source, where its files lie on this machine: how many repeat an earlier one.

Classic mistakes: specs that would run and should not, one named rule each, with the numbers that speak against them.

`bessemer spec check` prints them as warnings. A rule that is wrong for a run is silenced in its spec:
`lints: {silence: [no_warmup]}`. Rules say nothing where the spec leaves the matter to the planner.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO

from bessemer.spec.data import SourceSpec
from bessemer.spec.document import Path as KeyPath
from bessemer.spec.mixture import domain_of
from bessemer.spec.model import model_shape
from bessemer.spec.published import (
    best_vocabulary_parameters,
    published_batch,
    published_rate,
    rope_base_needed,
    rope_reach,
    worth_of_epochs,
)
from bessemer.spec.quantity import human_count, human_time
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

ROWS = 2000
LONGEST_ROW = 1 << 20
_FEWEST = 20  # below it a share says nothing


def repeated_share(folder: Path, source: SourceSpec) -> tuple[float, int]:
    """(share of rows that were there before, rows looked at) among the first rows of a source's JSONL files; (0, 0)
    where there are none to look at."""
    seen: set[bytes] = set()
    rows = repeated = 0
    with suppress(OSError, ValueError, EOFError, zlib.error):  # a file that cannot be read is reported by other checks
        for text in islice(_texts(folder, source), ROWS):
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            repeated += key in seen
            seen.add(key)
            rows += 1
    return (repeated / rows, rows) if rows >= _FEWEST else (0.0, 0)


def _texts(folder: Path, source: SourceSpec) -> Iterator[str]:
    if source.format not in ("auto", "jsonl"):
        return
    for path in source.path:
        if "://" in path or any(mark in path for mark in "*?["):
            continue
        place = folder / os.path.expanduser(path)  # an absolute path replaces the folder
        files = sorted(islice(place.glob("*.jsonl*"), 20)) if place.is_dir() else [place]
        for file in files:
            if file.is_file() and file.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _rows(file, source.text_field)


def _rows(file: Path, field: str) -> Iterator[str]:
    """Texts of a file."""
    opened: Callable[..., IO[str]] = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(LONGEST_ROW):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get(field), str):
                yield row[field]


OLD_GPUS = ("p100", "v100", "t4", "titan", "2080", "1080")  # without bf16
USUAL_VOCAB = 32_000  # where a tokenizer is yet to be trained: only for counting
BENCHMARKS = ("gsm8k", "mmlu", "hellaswag", "humaneval", "mbpp", "arc-challenge", "arc_challenge", "truthfulqa",
              "winogrande", "piqa", "boolq", "triviaqa", "math500", "gpqa", "ifeval", "bbh")  # fmt: skip


@dataclass(frozen=True)
class Lint:
    """One warning: the rule, the key it is about, and what speaks against it, with the fix."""

    rule: str
    path: KeyPath
    message: str


@dataclass
class LintFacts:
    """What a spec settles, for the rules to read."""

    spec: RunSpec
    folder: Path | None  # that relative data paths start from; None: the files are not on this machine
    gpu: str = ""  # its name, where it is known

    @cached_property
    def shape(self) -> ModelShape | None:
        """None where a folder of weights decides it."""
        if self.spec.model.hf is not None:
            return None
        vocab = self.spec.tokenizer.vocab
        return model_shape(self.spec.model, vocab if isinstance(vocab, int) else USUAL_VOCAB)

    @cached_property
    def parameters(self) -> float:
        return float(self.shape.parameters) if self.shape else 0.0

    @property
    def fresh(self) -> bool:
        """Trained from random weights."""
        return self.spec.model.hf is None and self.spec.start_from is None

    @property
    def tokens(self) -> int | None:
        """Length of the run, where it is written."""
        budget = self.spec.budget
        if isinstance(budget.tokens, int):
            return budget.tokens
        return budget.steps * budget.batch if budget.steps and isinstance(budget.batch, int) else None

    def steps_named(self, *beginnings: str) -> bool:
        """Whether a curation step of such a name is asked for, of all sources or of one."""
        lists = [self.spec.data.clean, *(source.clean for source in self.spec.data.sources.values())]
        return any(step.step.startswith(beginnings) for steps in lists for step in steps)

    @cached_property
    def web(self) -> list[str]:
        """Sources of web pages."""
        return [name for name, source in self.spec.data.sources.items() if domain_of(name, source)[0] == "web"]


Found = Iterator[tuple[KeyPath, str]]
THEY = "GPT-3, TinyLlama, Llama 2 and 3"
ADAMS = ("adamw", "adam", "nadam", "radam")


def fp16_on_new_hardware(facts: LintFacts) -> Found:
    if facts.spec.precision == "fp16" and not any(old in facts.gpu.lower() for old in OLD_GPUS):
        where = f" on {facts.gpu}" if facts.gpu else ""
        why = (
            f"fp16 ends at 65,504 and needs loss scaling; bf16 is as fast{where} and reaches 3.4e38: write bf16 (on "
            "P100, V100 and T4, which lack it, silence this)"
        )
        yield ("precision",), why


def no_warmup(facts: LintFacts) -> Found:
    warmup, optimizer = facts.spec.schedule.warmup, facts.spec.optimizer
    if warmup in (0, 0.0, "0 tokens") and optimizer.name != "sgd":
        settings = optimizer.settings()
        beta = settings.get("betas", [0.9, 0.95])[-1]
        why = (
            f"none: the first steps take the full rate while the second moment has seen 1 of the {1 / (1 - beta):.0f} "
            "steps it averages: write warmup: 2%"
        )
        yield ("schedule", "warmup"), why


def rate_of_a_smaller_model(facts: LintFacts) -> Found:
    lr = facts.spec.optimizer.lr
    if lr == "auto" or not facts.fresh or not facts.shape or facts.spec.optimizer.name not in ADAMS:
        return
    usual = published_rate(facts.parameters)
    # Small models bear more than was published for them; at 70B twice the published rate is 7B's.
    times = 1.9 if facts.parameters >= 10e9 else 4.0 if facts.parameters >= 1e9 else 8.0
    if facts.spec.model.init != "mup" and lr >= times * usual:
        why = (
            f"{lr:g} is {lr / usual:.1f} times the {usual:.1e} that models of {human_count(facts.parameters)} "
            f"parameters were trained with ({THEY}): write {usual:.1e} or auto"
        )
        yield ("optimizer", "lr"), why


def lion_at_adams_rate(facts: LintFacts) -> Found:
    lr = facts.spec.optimizer.lr
    if facts.spec.optimizer.name != "lion" or lr == "auto" or not facts.shape:
        return
    usual = published_rate(facts.parameters)
    if lr > usual / 2 and facts.parameters >= 10e6:
        why = (
            f"Lion's step has the sign alone and wants 3 to 10 times less than AdamW's {usual:.1e}, with as much more "
            f"decay (Chen et al. 2023): write {usual / 5:.1e}"
        )
        yield ("optimizer", "lr"), why


def continued_at_the_peak(facts: LintFacts) -> Found:
    lr = facts.spec.optimizer.lr
    if facts.fresh or lr == "auto" or facts.spec.optimizer.name not in ADAMS:
        return
    usual = published_rate(facts.parameters) if facts.shape else 3e-4
    if lr > 0.7 * usual:
        size = f"of {human_count(facts.parameters)}" if facts.shape else "of this kind"
        why = (
            f"{lr:g} on trained weights is near the {usual:.1e} that models {size} were pre-trained with, and forgets "
            f"what they know (Ibrahim et al. 2024): write {usual / 3:.1e}, or auto"
        )
        yield ("optimizer", "lr"), why


def batch_too_small(facts: LintFacts) -> Found:
    batch = facts.spec.budget.batch
    if not isinstance(batch, int) or not facts.fresh or facts.parameters < 500e6:
        return
    usual = float(f"{published_batch(facts.parameters):.2g}")
    if batch < usual / 8:
        why = (
            f"{human_count(batch)} tokens are {usual / batch:.0f} times fewer than the {human_count(usual)} that "
            f"models of {human_count(facts.parameters)} had ({THEY}): noisy steps, and GPUs that wait for each "
            f"other: write {human_count(usual)} or auto"
        )
        yield ("budget", "batch"), why


def nobody_watches(facts: LintFacts) -> Found:
    guard = facts.spec.guard
    if not guard.enabled:
        why = (
            "false: gradient norms are still logged and nobody looks; PaLM met some 20 loss spikes in its run: write "
            "true"
        )
        yield ("guard", "enabled"), why


def no_clipping(facts: LintFacts) -> Found:
    clip = facts.spec.optimizer.clip
    if clip >= 100:
        yield (
            ("optimizer", "clip"),
            (f"{clip:g} clips nothing: norms of healthy runs lie below 10, and published runs clip at 1.0: write 1.0"),
        )


def no_dedup(facts: LintFacts) -> Found:
    if facts.steps_named("dedup"):
        return
    for name, source in facts.spec.data.sources.items():
        share, rows = repeated_share(facts.folder, source) if facts.folder is not None else (0.0, 0)
        if share > 0.05:
            why = (
                f"{share:.0%} of its first {rows:,} rows repeat one before them, and nothing removes duplicates: add "
                "dedup_exact and dedup_minhash to data.clean"
            )
            yield ("data", "sources", name), why
            return
    large = facts.fresh and (facts.tokens or 0) >= 1e9
    if facts.web and facts.fresh and (large or facts.parameters >= 100e6):
        why = (
            f"{', '.join(facts.web)}: web pages; 3 % of C4 and 14 % of RealNews were near-duplicates, and a model "
            "without them recited ten times less (Lee et al. 2022): add dedup_minhash"
        )
        yield ("data", "clean"), why
    elif large:
        why = (
            f"{human_count(facts.tokens or 0)} tokens and no step removes duplicates; what is there ten times is "
            "recited about 1,000 times as often (Kandpal et al. 2022): add dedup_exact and dedup_minhash"
        )
        yield ("data", "clean"), why


def contaminated_evaluation(facts: LintFacts) -> Found:
    for name, source in facts.spec.data.sources.items():
        for path in source.path:
            known = next((bench for bench in BENCHMARKS if bench in f"{name} {path}".lower()), None)
            if known and "train" not in path.lower() and source.weight > 0:
                why = (
                    f"{path!r} names {known}, which models are measured with: its scores would say nothing: take its "
                    "training split, or remove it"
                )
                yield ("data", "sources", name), why
                return
    if facts.web and facts.fresh and (facts.tokens or 0) >= 10e9 and not facts.steps_named("decontaminate"):
        why = (
            f"{human_count(facts.tokens or 0)} tokens with web pages ({', '.join(facts.web)}) hold parts of public "
            "benchmarks: GPT-3's report (2020, section 4) found a quarter of its sets with over half of their items "
            "possibly seen: add decontaminate with the sets you will report"
        )
        yield ("data", "clean"), why


def no_validation(facts: LintFacts) -> Found:
    if facts.spec.data.validation == 0:
        yield ("data", "validation"), ("0: nothing is held out, so that memorising and learning look alike: write 1%")


def tokenizer_not_audited(facts: LintFacts) -> Found:
    tokenizer, data = facts.spec.tokenizer, facts.spec.data
    if tokenizer.path is None or not facts.fresh:
        return
    special = {"code", "math", "multilingual"}
    found = [name for name, source in data.sources.items() if source.path and domain_of(name, source)[0] in special]
    if found:
        pairs = " ".join(f"{name}={data.sources[name].path[0]}" for name in found[:2])
        why = (
            f"a tokenizer from elsewhere for {', '.join(found)}: other languages take up to 15 times as many tokens "
            f"(Petrov et al. 2023), and as much compute: look at `bessemer data audit {tokenizer.path} {pairs}`, then "
            "silence this"
        )
        yield ("tokenizer", "path"), why


def vocabulary_outweighs_the_model(facts: LintFacts) -> Found:
    vocab = facts.spec.tokenizer.vocab
    if not isinstance(vocab, int) or not facts.shape:
        return
    share = vocab * facts.shape.width * (1 if facts.shape.tied else 2) / facts.parameters
    if share > 0.6:
        why = (
            f"{vocab:,} tokens of width {facts.shape.width} are {share:.0%} of {human_count(facts.parameters)} "
            f"parameters, where about {best_vocabulary_parameters(facts.parameters) / facts.parameters:.0%} are best "
            "(Tao et al. 2024): write auto"
        )
        yield ("tokenizer", "vocab"), why


def too_many_epochs(facts: LintFacts) -> Found:
    epochs = facts.spec.budget.epochs
    if epochs and epochs > 4.5 and facts.fresh and facts.parameters >= 30e6:
        why = (
            f"{epochs:g} passes are worth {worth_of_epochs(epochs):.1f} over fresh text, and past 4 repeats teach less "
            "and less (Muennighoff et al. 2023): add text, or take a smaller model"
        )
        yield ("budget", "epochs"), why


def too_few_tokens(facts: LintFacts) -> Found:
    tokens = facts.tokens
    if tokens and facts.fresh and facts.parameters >= 50e6 and tokens < 2 * facts.parameters:
        best = human_count(math.sqrt(facts.parameters * tokens / 20))
        why = (
            f"{tokens / facts.parameters:.2g} tokens for each of {human_count(facts.parameters)} parameters, where "
            f"about 20 are best (Chinchilla 2022): as much compute trains {best} parameters better"
        )
        yield ("budget", "tokens" if isinstance(facts.spec.budget.tokens, int) else "steps"), why


def rotary_base_too_small(facts: LintFacts) -> Found:
    context, shape = facts.spec.data.context, facts.shape
    if not isinstance(context, int) or shape is None or shape.positions != "rope" or shape.rope.scaling != "none":
        return
    base = shape.rope.theta
    if base * 10 < rope_base_needed(context):
        why = (
            f"{context:,} tokens with a rotary base of {base:g}, which tells positions apart up to about "
            f"{rope_reach(base):,} (Xu et al. 2024): write model.rope: {{theta: {rope_base_needed(context):.0e}}}"
        )
        yield ("data", "context"), why


def decay_in_the_gradient(facts: LintFacts) -> Found:
    optimizer = facts.spec.optimizer
    if optimizer.name == "adam" and (optimizer.weight_decay or 0) > 0:
        why = (
            f"{optimizer.weight_decay:g} is added to adam's gradient and then divided by its size: weights with large "
            "gradients hardly decay (Loshchilov and Hutter 2019): write name: adamw"
        )
        yield ("optimizer", "weight_decay"), why


def sgd_on_a_transformer(facts: LintFacts) -> Found:
    if facts.spec.optimizer.name == "sgd":
        why = (
            "sgd hardly learns rare tokens, which most of a text consists of (Kunstner et al. 2024), and its rates and "
            "clipping carry over to no other optimizer: write adamw"
        )
        yield ("optimizer", "name"), why


def slow_second_moment(facts: LintFacts) -> Found:
    betas = facts.spec.optimizer.betas
    if facts.spec.optimizer.name in ADAMS and betas and betas[1] >= 0.999 and facts.parameters >= 1e9 and facts.fresh:
        why = (
            f"beta2 {betas[1]:g} averages {1 / (1 - betas[1]):,.0f} steps, too slow for a gradient that grows: loss "
            "spikes (Molybog et al. 2023); GPT-3, Llama and OLMo have 0.95: write [0.9, 0.95]"
        )
        yield ("optimizer", "betas"), why


def loss_scale_without_fp16(facts: LintFacts) -> Found:
    scale, precision = facts.spec.loss_scale, facts.spec.precision
    if scale != "dynamic" and precision not in ("fp16", "auto"):
        yield (
            ("loss_scale",),
            (f"{scale:g} does nothing in {precision}, which reaches as far as fp32 (8 bits of exponent): remove it"),
        )


def hasty_stop(facts: LintFacts) -> Found:
    patience = facts.spec.budget.stop.patience
    if patience is not None and patience < 3:
        why = (
            f"{patience} without a new best ends the run; once the loss falls by less than its noise, every second "
            "evaluation is none: write 5"
        )
        yield ("budget", "stop", "patience"), why


def rare_saves(facts: LintFacts) -> Found:
    every = facts.spec.checkpoint.every
    if isinstance(every, str) and every != "auto" and float(every.split()[0]) > 4 * 3600:
        seconds = float(every.split()[0])
        why = (
            f"every {human_time(seconds)}: a failure loses {human_time(seconds / 2)} on average, where saves of "
            "seconds cost little (Young 1974: 32 nodes with 60 s a save want about 2 h): write auto"
        )
        yield ("checkpoint", "every"), why


RULES: dict[str, Callable[[LintFacts], Found]] = {
    rule.__name__: rule
    for rule in (
        fp16_on_new_hardware, no_warmup, rate_of_a_smaller_model, lion_at_adams_rate, continued_at_the_peak,
        batch_too_small, nobody_watches, no_clipping, no_dedup, contaminated_evaluation, no_validation,
        tokenizer_not_audited, vocabulary_outweighs_the_model, too_many_epochs, too_few_tokens, rotary_base_too_small,
        decay_in_the_gradient, sgd_on_a_transformer, slow_second_moment, loss_scale_without_fp16, hasty_stop,
        rare_saves,
    )
}  # fmt: skip


def lint(spec: RunSpec, folder: Path | None = Path(), gpu: str = "") -> list[Lint]:
    """Warnings about a valid spec, those silenced left out. `folder` is where relative paths of its data start; None
    where its files are not on this machine."""
    facts = LintFacts(spec, folder, gpu)
    found = []
    for name in spec.lints.silence:
        if name not in RULES:
            near = difflib.get_close_matches(name, RULES, n=1, cutoff=0.4)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(RULES)}"
            found.append(Lint("unknown_rule", ("lints", "silence"), f"no rule {name!r}: {meant}"))
    for name, rule in RULES.items():
        if name not in spec.lints.silence:
            found += [Lint(name, path, message) for path, message in rule(facts)]
    return found
