"""Warnings about settings that run but rarely work: one named rule each, with the numbers that support it.

`bessemer spec check` prints them. A rule that is wrong for a run is silenced in its spec:
`lints: {silence: [no_warmup]}`. Rules ignore settings that the spec leaves to the planner.
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
from bessemer.spec.document import KeyPath
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

SAMPLE_ROWS = 2000
MAX_ROW_CHARS = 1 << 20
MIN_SAMPLE_ROWS = 20  # a share of fewer rows says nothing


def repeated_share(folder: Path, source: SourceSpec) -> tuple[float, int]:
    """(share of repeated rows, number of rows) among the first rows of a source's local JSONL files; (0, 0) if there
    are too few."""
    seen: set[bytes] = set()
    rows = repeated = 0
    with suppress(OSError, ValueError, EOFError, zlib.error):  # other checks report unreadable files
        for text in islice(_texts(folder, source), SAMPLE_ROWS):
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            repeated += key in seen
            seen.add(key)
            rows += 1
    return (repeated / rows, rows) if rows >= MIN_SAMPLE_ROWS else (0.0, 0)


def _texts(folder: Path, source: SourceSpec) -> Iterator[str]:
    if source.format not in ("auto", "jsonl"):
        return
    for path in source.path:
        if "://" in path or any(mark in path for mark in "*?["):
            continue
        location = folder / os.path.expanduser(path)  # an absolute path replaces the folder
        files = sorted(islice(location.glob("*.jsonl*"), 20)) if location.is_dir() else [location]
        for file in files:
            if file.is_file() and file.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _texts_of_file(file, source.text_field)


def _texts_of_file(file: Path, field: str) -> Iterator[str]:
    open_file: Callable[..., IO[str]] = gzip.open if file.suffix == ".gz" else open
    with open_file(file, "rt", encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(MAX_ROW_CHARS):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get(field), str):
                yield row[field]


GPUS_WITHOUT_BF16 = ("p100", "v100", "t4", "titan", "2080", "1080")
USUAL_VOCAB = 32_000  # to count parameters while the tokenizer is not trained yet
BENCHMARKS = ("gsm8k", "mmlu", "hellaswag", "humaneval", "mbpp", "arc-challenge", "arc_challenge", "truthfulqa",
              "winogrande", "piqa", "boolq", "triviaqa", "math500", "gpqa", "ifeval", "bbh")  # fmt: skip


@dataclass(frozen=True)
class Lint:
    """One warning: the rule, the key, and a message with the fix."""

    rule: str
    path: KeyPath
    message: str


@dataclass
class LintFacts:
    """Facts about a spec that the rules read."""

    spec: RunSpec
    folder: Path | None  # base of relative data paths; None: the files are not on this machine
    gpu: str = ""  # its name, if known

    @cached_property
    def shape(self) -> ModelShape | None:
        """None if a folder of weights defines it."""
        if self.spec.model.hf is not None:
            return None
        vocab = self.spec.tokenizer.vocab
        return model_shape(self.spec.model, vocab if isinstance(vocab, int) else USUAL_VOCAB)

    @cached_property
    def parameters(self) -> float:
        return float(self.shape.parameters) if self.shape else 0.0

    @property
    def from_scratch(self) -> bool:
        """Whether the run starts from random weights."""
        return self.spec.model.hf is None and self.spec.start_from is None

    @property
    def tokens(self) -> int | None:
        """Length of the run, if the spec states it."""
        budget = self.spec.budget
        if isinstance(budget.tokens, int):
            return budget.tokens
        return budget.steps * budget.batch if budget.steps and isinstance(budget.batch, int) else None

    def has_step(self, *prefixes: str) -> bool:
        """Whether any source has a curation step whose name starts with one of the prefixes."""
        lists = [self.spec.data.clean, *(source.clean for source in self.spec.data.sources.values())]
        return any(step.step.startswith(prefixes) for steps in lists for step in steps)

    @cached_property
    def web_sources(self) -> list[str]:
        """Names of sources of web pages."""
        return [name for name, source in self.spec.data.sources.items() if domain_of(name, source)[0] == "web"]


Warnings = Iterator[tuple[KeyPath, str]]
PUBLISHED_RUNS = "GPT-3, TinyLlama, Llama 2 and 3"
ADAMS = ("adamw", "adam", "nadam", "radam")


def fp16_on_new_hardware(facts: LintFacts) -> Warnings:
    if facts.spec.precision == "fp16" and not any(old in facts.gpu.lower() for old in GPUS_WITHOUT_BF16):
        where = f" on {facts.gpu}" if facts.gpu else ""
        message = (
            f"fp16 overflows at 65,504 and needs loss scaling; bf16 is as fast{where} and reaches 3.4e38: write bf16 "
            "(silence this on P100, V100 and T4, which have no bf16)"
        )
        yield ("precision",), message


def warmup_is_the_run(facts: LintFacts) -> Warnings:
    """Training refuses it; where the data decides the number of steps, only training knows it."""
    warmup, steps = facts.spec.schedule.warmup, facts.spec.budget.steps
    if isinstance(warmup, int) and steps is not None and warmup >= steps:
        yield ("schedule", "warmup"), f"{warmup:,} steps are the whole run of {steps:,}: write warmup: 2%"
    if isinstance(warmup, float) and warmup >= 1:
        yield ("schedule", "warmup"), f"{warmup:.0%} are the whole run: write warmup: 2%"


def no_warmup(facts: LintFacts) -> Warnings:
    warmup, optimizer = facts.spec.schedule.warmup, facts.spec.optimizer
    if warmup in (0, 0.0, "0 tokens") and optimizer.name != "sgd":
        settings = optimizer.settings()
        beta = settings.get("betas", [0.9, 0.95])[-1]
        message = (
            f"no warm-up: the first steps use the full rate while the second moment has 1 of the {1 / (1 - beta):.0f} "
            "steps that it averages: write warmup: 2%"
        )
        yield ("schedule", "warmup"), message


def rate_of_a_smaller_model(facts: LintFacts) -> Warnings:
    lr = facts.spec.optimizer.lr
    if lr == "auto" or not facts.from_scratch or not facts.shape or facts.spec.optimizer.name not in ADAMS:
        return
    usual = published_rate(facts.parameters)
    # Small models tolerate more than their published rate; at 70B twice the published rate is that of 7B.
    times = 1.9 if facts.parameters >= 10e9 else 4.0 if facts.parameters >= 1e9 else 8.0
    if facts.spec.model.init != "mup" and lr >= times * usual:
        message = (
            f"{lr:g} is {lr / usual:.1f} times the {usual:.1e} that models of {human_count(facts.parameters)} "
            f"parameters were trained with ({PUBLISHED_RUNS}): write {usual:.1e} or auto"
        )
        yield ("optimizer", "lr"), message


def lion_at_adams_rate(facts: LintFacts) -> Warnings:
    lr = facts.spec.optimizer.lr
    if facts.spec.optimizer.name != "lion" or lr == "auto" or not facts.shape:
        return
    usual = published_rate(facts.parameters)
    if lr > usual / 2 and facts.parameters >= 10e6:
        message = (
            f"Lion steps by the sign and needs a rate 3 to 10 times below AdamW's {usual:.1e}, with as much more "
            f"weight decay (Chen et al. 2023): write {usual / 5:.1e}"
        )
        yield ("optimizer", "lr"), message


def continued_at_the_peak(facts: LintFacts) -> Warnings:
    lr = facts.spec.optimizer.lr
    if facts.from_scratch or lr == "auto" or facts.spec.optimizer.name not in ADAMS:
        return
    usual = published_rate(facts.parameters) if facts.shape else 3e-4
    if lr > 0.7 * usual:
        size = f"of {human_count(facts.parameters)}" if facts.shape else "of this kind"
        message = (
            f"{lr:g} on trained weights is near the pre-training rate {usual:.1e} of models {size}, and causes "
            f"forgetting (Ibrahim et al. 2024): write {usual / 3:.1e}, or auto"
        )
        yield ("optimizer", "lr"), message


def batch_too_small(facts: LintFacts) -> Warnings:
    batch = facts.spec.budget.batch
    if not isinstance(batch, int) or not facts.from_scratch or facts.parameters < 500e6:
        return
    usual = float(f"{published_batch(facts.parameters):.2g}")
    if batch < usual / 8:
        message = (
            f"{human_count(batch)} tokens are {usual / batch:.0f} times fewer than the {human_count(usual)} of "
            f"models with {human_count(facts.parameters)} parameters ({PUBLISHED_RUNS}): gradients are noisy and "
            f"communication dominates: write {human_count(usual)} or auto"
        )
        yield ("budget", "batch"), message


def nobody_watches(facts: LintFacts) -> Warnings:
    guard = facts.spec.guard
    if not guard.enabled:
        message = "no step is checked, although PaLM had about 20 loss spikes in its run: write true"
        yield ("guard", "enabled"), message


def no_clipping(facts: LintFacts) -> Warnings:
    clip = facts.spec.optimizer.clip
    if clip >= 100:
        yield (
            ("optimizer", "clip"),
            (f"{clip:g} clips nothing: norms of healthy runs are below 10, and published runs clip at 1.0: write 1.0"),
        )


def no_dedup(facts: LintFacts) -> Warnings:
    if facts.has_step("dedup"):
        return
    for name, source in facts.spec.data.sources.items():
        share, rows = repeated_share(facts.folder, source) if facts.folder is not None else (0.0, 0)
        if share > 0.05:
            message = (
                f"{share:.0%} of its first {rows:,} rows repeat an earlier row, and no step removes duplicates: add "
                "dedup_exact and dedup_minhash to data.clean"
            )
            yield ("data", "sources", name), message
            return
    large = facts.from_scratch and (facts.tokens or 0) >= 1e9
    if facts.web_sources and facts.from_scratch and (large or facts.parameters >= 100e6):
        message = (
            f"{', '.join(facts.web_sources)}: web pages; 3 % of C4 and 14 % of RealNews were near-duplicates, and "
            f"models "
            "trained without them memorise ten times less (Lee et al. 2022): add dedup_minhash"
        )
        yield ("data", "clean"), message
    elif large:
        message = (
            f"{human_count(facts.tokens or 0)} tokens and no step removes duplicates; text that occurs ten times "
            "is generated about 1,000 times as often (Kandpal et al. 2022): add dedup_exact and dedup_minhash"
        )
        yield ("data", "clean"), message


def contaminated_evaluation(facts: LintFacts) -> Warnings:
    for name, source in facts.spec.data.sources.items():
        for path in source.path:
            known = next((bench for bench in BENCHMARKS if bench in f"{name} {path}".lower()), None)
            if known and "train" not in path.lower() and source.weight > 0:
                message = (
                    f"{path!r} contains {known}, a benchmark: its scores would be meaningless: use its "
                    "training split, or remove it"
                )
                yield ("data", "sources", name), message
                return
    if facts.web_sources and facts.from_scratch and (facts.tokens or 0) >= 10e9 and not facts.has_step("decontaminate"):
        message = (
            f"{human_count(facts.tokens or 0)} tokens with web pages ({', '.join(facts.web_sources)}) contain parts "
            f"of public "
            "benchmarks: GPT-3's report (2020, section 4) found a quarter of its sets with over half of the items "
            "possibly seen: add decontaminate with the benchmarks you will report"
        )
        yield ("data", "clean"), message


def no_validation(facts: LintFacts) -> Warnings:
    if facts.spec.data.validation == 0:
        yield ("data", "validation"), ("0: without held-out data memorising cannot be told from learning: write 1%")


def tokenizer_not_audited(facts: LintFacts) -> Warnings:
    tokenizer, data = facts.spec.tokenizer, facts.spec.data
    if tokenizer.path is None or not facts.from_scratch:
        return
    special = {"code", "math", "multilingual"}
    special_sources = [
        name for name, source in data.sources.items() if source.path and domain_of(name, source)[0] in special
    ]
    if special_sources:
        pairs = " ".join(f"{name}={data.sources[name].path[0]}" for name in special_sources[:2])
        message = (
            f"a loaded tokenizer for {', '.join(special_sources)}: other languages can need 15 times as many tokens "
            f"(Petrov et al. 2023) and as much compute: run `bessemer data audit {tokenizer.path} {pairs}`, then "
            "silence this"
        )
        yield ("tokenizer", "path"), message


def vocabulary_outweighs_the_model(facts: LintFacts) -> Warnings:
    vocab = facts.spec.tokenizer.vocab
    if not isinstance(vocab, int) or not facts.shape:
        return
    share = vocab * facts.shape.width * (1 if facts.shape.tied else 2) / facts.parameters
    if share > 0.6:
        message = (
            f"{vocab:,} tokens of width {facts.shape.width} are {share:.0%} of {human_count(facts.parameters)} "
            f"parameters; about {best_vocabulary_parameters(facts.parameters) / facts.parameters:.0%} is best "
            "(Tao et al. 2024): write auto"
        )
        yield ("tokenizer", "vocab"), message


def too_many_epochs(facts: LintFacts) -> Warnings:
    epochs = facts.spec.budget.epochs
    if epochs and epochs > 4.5 and facts.from_scratch and facts.parameters >= 30e6:
        message = (
            f"{epochs:g} epochs are worth {worth_of_epochs(epochs):.1f} epochs of new text; after 4 epochs repeats "
            f"teach less and "
            "less (Muennighoff et al. 2023): add text, or use a smaller model"
        )
        yield ("budget", "epochs"), message


def too_few_tokens(facts: LintFacts) -> Warnings:
    tokens = facts.tokens
    if tokens and facts.from_scratch and facts.parameters >= 50e6 and tokens < 2 * facts.parameters:
        best = human_count(math.sqrt(facts.parameters * tokens / 20))
        message = (
            f"{tokens / facts.parameters:.2g} tokens per parameter with {human_count(facts.parameters)} parameters; "
            f"about 20 is best (Chinchilla 2022): the same compute trains {best} parameters to a lower loss"
        )
        yield ("budget", "tokens" if isinstance(facts.spec.budget.tokens, int) else "steps"), message


def rotary_base_too_small(facts: LintFacts) -> Warnings:
    context, shape = facts.spec.data.context, facts.shape
    if not isinstance(context, int) or shape is None or shape.positions != "rope" or shape.rope.scaling != "none":
        return
    base = shape.rope.theta
    if base * 10 < rope_base_needed(context):
        message = (
            f"{context:,} tokens with a rotary base of {base:g}, which distinguishes positions up to about "
            f"{rope_reach(base):,} tokens (Xu et al. 2024): write model.rope: {{theta: "
            f"{rope_base_needed(context):.0e}}}"
        )
        yield ("data", "context"), message


def decay_in_the_gradient(facts: LintFacts) -> Warnings:
    optimizer = facts.spec.optimizer
    if optimizer.name == "adam" and (optimizer.weight_decay or 0) > 0:
        message = (
            f"{optimizer.weight_decay:g} is added to adam's gradient and then normalised: weights with large gradients "
            "hardly decay (Loshchilov and Hutter 2019): write name: adamw"
        )
        yield ("optimizer", "weight_decay"), message


def sgd_on_a_transformer(facts: LintFacts) -> Warnings:
    if facts.spec.optimizer.name == "sgd":
        message = "sgd hardly learns rare tokens, which make up most of a text (Kunstner et al. 2024): write adamw"
        yield ("optimizer", "name"), message


def slow_second_moment(facts: LintFacts) -> Warnings:
    betas = facts.spec.optimizer.betas
    if (
        facts.spec.optimizer.name in ADAMS
        and betas
        and betas[1] >= 0.999
        and facts.parameters >= 1e9
        and facts.from_scratch
    ):
        message = (
            f"beta2 {betas[1]:g} averages {1 / (1 - betas[1]):,.0f} steps, too slow for growing gradients: loss spikes "
            "(Molybog et al. 2023); GPT-3, Llama and OLMo use 0.95: write [0.9, 0.95]"
        )
        yield ("optimizer", "betas"), message


def loss_scale_without_fp16(facts: LintFacts) -> Warnings:
    scale, precision = facts.spec.loss_scale, facts.spec.precision
    if scale != "dynamic" and precision not in ("fp16", "auto"):
        yield (("loss_scale",), (f"{scale:g} has no effect in {precision}, which has the range of fp32: remove it"))


def hasty_stop(facts: LintFacts) -> Warnings:
    patience = facts.spec.budget.stop.patience
    if patience is not None and patience < 3:
        message = (
            f"{patience} evaluations without a new best end the run, but once the loss falls by less than its noise, "
            f"every "
            "second evaluation is no new best: write 5"
        )
        yield ("budget", "stop", "patience"), message


def rare_saves(facts: LintFacts) -> Warnings:
    every = facts.spec.checkpoint.every
    if isinstance(every, str) and every != "auto" and float(every.split()[0]) > 4 * 3600:
        seconds = float(every.split()[0])
        message = (
            f"every {human_time(seconds)}: a failure loses {human_time(seconds / 2)} on average, while a save costs "
            "seconds (Young 1974: about 2 h is best for 32 nodes and 60 s per save): write auto"
        )
        yield ("checkpoint", "every"), message


def sft_from_scratch(facts: LintFacts) -> Warnings:
    if facts.spec.objective == "sft" and facts.from_scratch:
        message = (
            "sft of random weights: 1,000 demonstrations teach a format to a model that read 1T tokens, not language "
            "(Zhou et al. 2023, LIMA): write model: {hf: FOLDER}, or start_from"
        )
        yield ("model",), message


# Named checks of the rows of `objective: sft`, made before its first step (data/chat_checks.py); silenced like rules.
SFT_CHECKS = (
    "nothing_trained", "turn_end_untrained", "pad_is_eos", "double_bos", "answer_past_context",
    "template_tokens_missing", "bos_eos_mismatch", "special_tokens_split", "system_prompt_lost", "leaked_validation",
    "short_answers", "language_mixup", "rows_beyond_context",
)  # fmt: skip
# The same of `objective: dpo` and `kto` (data/pair_checks.py).
PAIR_CHECKS = (
    "identical_answers", "contradictory_pairs", "duplicate_pairs", "length_bias", "prompt_differs", "chosen_agreeable",
    "one_sided_labels", "contradictory_labels", "unbalanced_labels", "low_agreement",
)  # fmt: skip

RULES: dict[str, Callable[[LintFacts], Warnings]] = {
    rule.__name__: rule
    for rule in (
        fp16_on_new_hardware, no_warmup, warmup_is_the_run, rate_of_a_smaller_model, lion_at_adams_rate,
        continued_at_the_peak, batch_too_small, nobody_watches, no_clipping, no_dedup, contaminated_evaluation,
        no_validation,
        tokenizer_not_audited, vocabulary_outweighs_the_model, too_many_epochs, too_few_tokens, rotary_base_too_small,
        decay_in_the_gradient, sgd_on_a_transformer, slow_second_moment, loss_scale_without_fp16, hasty_stop,
        rare_saves, sft_from_scratch,
    )
}  # fmt: skip


def lint_spec(spec: RunSpec, folder: Path | None = Path(), gpu: str = "") -> list[Lint]:
    """Warnings about a valid spec, except silenced ones. `folder` is the base of relative data paths; None if the files
    are not on this machine."""
    facts = LintFacts(spec, folder, gpu)
    warnings, names = [], [*RULES, *SFT_CHECKS, *PAIR_CHECKS]
    for name in spec.lints.silence:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"rules are {', '.join(names)}"
            warnings.append(Lint("unknown_rule", ("lints", "silence"), f"no rule {name!r}: {hint}"))
    for name, rule in RULES.items():
        if name not in spec.lints.silence:
            warnings += [Lint(name, path, message) for path, message in rule(facts)]
    return warnings
