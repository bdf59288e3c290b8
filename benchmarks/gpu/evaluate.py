"""Multiple-choice scoring beside lm-eval's Hugging Face backend (HFLM): one GPU, one command, the same weights.

    python benchmarks/gpu/evaluate.py --items 10000 --out benchmarks/results/DATE-gpu-evaluate.json

Synthetic questions with the shapes of MMLU (57 subjects, five examples shared by a subject, four letters) and HellaSwag
(no examples, four endings of a sentence or two). Both sides get text: tokenization counts, and is also given alone.
HFLM runs with the fastest of the given batch sizes, found on a part of the items. Scores are compared twice: all items
in bfloat16, and some in float32, where both sides must agree. Needs lm_eval's modules without its tasks and without its
dependencies (`pip install --no-deps lm_eval==0.4.13`), transformers and accelerate.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bessemer.data.tokenizer.tokenizer import Tokenizer, native_prompt_format
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.scoring import Likelihood
from bessemer.model.families.folder import hf_tensors
from bessemer.model.families.registry import family_named
from bessemer.model.transformer import build_model
from bessemer.train.trained import LoadedModel

sys.path.insert(0, str(Path(__file__).parent))
from generate import SIZES

Pair = tuple[str, str]
CHOICES = 4
EXACT = 1e-3  # nats; largest difference of a likelihood in float32
SUBJECTS, SHOTS = 57, 5
CONTEXT = 4096


def corpus(size: int) -> list[str]:
    """Docstrings of the standard library: English that is on every machine."""
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "test" in path.parts or total > size:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                texts.append(text)
                total += len(text)
    return texts


def mmlu_like(words: Sequence[str], items: int, draw: random.Random) -> list[Pair]:
    """Questions of about 50 words with four choices of about six, behind five examples of the subject."""

    def question() -> str:
        choices = [f"{'ABCD'[i]}. {some(words, draw, 2, 11)}" for i in range(CHOICES)]
        return "\n".join([some(words, draw, 15, 85), *choices, "Answer:"])

    headers = []
    for subject in range(SUBJECTS):
        shots = "\n\n".join(f"{question()} {draw.choice('ABCD')}" for _ in range(SHOTS))
        headers.append(f"The following are multiple choice questions (with answers) about {words[subject]}.\n\n{shots}")
    pairs = []
    for number in range(items):
        prompt = f"{headers[number * SUBJECTS // items]}\n\n{question()}"
        pairs += [(prompt, f" {letter}") for letter in "ABCD"]
    return pairs


def hellaswag_like(words: Sequence[str], items: int, draw: random.Random) -> list[Pair]:
    """Contexts of about 40 words with four endings of about 22."""
    pairs = []
    for _ in range(items):
        prompt = some(words, draw, 15, 65)
        pairs += [(prompt, f" {some(words, draw, 8, 36)}.") for _ in range(CHOICES)]
    return pairs


def some(words: Sequence[str], draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(words, k=draw.randint(least, most)))


WORKLOADS = {"mmlu_5_shot": mmlu_like, "hellaswag_0_shot": hellaswag_like}


def timed(run: Any, device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def instances(pairs: Sequence[Pair]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


def make_peer(model: Any, tokenizer: Any, batch: int, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=CONTEXT, **options)


def run_ours(loaded: LoadedModel, pairs: list[Pair], compiled: bool, device: str) -> tuple[dict[str, Any], Any]:
    """Warm kernels first (a row of full length), then all pairs with new caches."""
    warm_s, _ = timed(lambda: LanguageModel(loaded, compiled=compiled).score_pairs(pairs[: max(400, len(pairs) // 20)]),
                      device)  # fmt: skip
    model = LanguageModel(loaded, compiled=compiled)
    encode_s, _ = timed(lambda: model.encode_pairs(pairs), device)
    seconds, scores = timed(lambda: model.score_pairs(pairs), device)
    facts = {"seconds": seconds, "encode_s": encode_s, "warm_up_s": warm_s, "passes": model.scorer.passes,
             "computed_tokens": model.scorer.computed}  # fmt: skip
    return facts, scores


def run_theirs(
    hf: Any, tokenizer: Any, pairs: list[Pair], batches: Sequence[int], device: str
) -> tuple[dict[str, Any], Any]:
    """The fastest batch size on a part of the pairs, then all pairs with it."""
    draw = random.Random(1)
    questions = [pairs[i : i + CHOICES] for i in range(0, len(pairs), CHOICES)]
    part = [pair for question in draw.sample(questions, max(1, len(questions) // 20)) for pair in question]
    rates: dict[int, float] = {}
    for batch in batches:
        peer = make_peer(hf, tokenizer, batch)
        try:
            timed(lambda peer=peer: peer.loglikelihood(instances(part[: 4 * CHOICES]), disable_tqdm=True), device)
            seconds, _ = timed(lambda peer=peer: peer.loglikelihood(instances(part), disable_tqdm=True), device)
            rates[batch] = len(part) / seconds
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    best = max(rates, key=lambda batch: rates[batch])
    peer = make_peer(hf, tokenizer, best)
    encode_s, _ = timed(lambda: [peer._encode_pair(*pair) for pair in part], device)
    seconds, scores = timed(lambda: peer.loglikelihood(instances(pairs), disable_tqdm=True), device)
    facts = {"seconds": seconds, "encode_s": encode_s * len(pairs) / len(part), "batch": best,
             "pairs_per_s_by_batch": {str(batch): round(rate, 1) for batch, rate in rates.items()}}  # fmt: skip
    return facts, [Likelihood(*score) for score in scores]


def compare(ours: list[Likelihood], theirs: list[Likelihood]) -> dict[str, float]:
    differences = sorted(abs(a.logp - b.logp) for a, b in zip(ours, theirs, strict=True))
    choices = [[max(range(CHOICES), key=lambda i, s=side, q=q: s[q + i].logp) for q in range(0, len(side), CHOICES)]
               for side in (ours, theirs)]  # fmt: skip
    same = sum(a == b for a, b in zip(*choices, strict=True)) / len(choices[0])
    mean = sum(differences) / len(differences)
    return {"mean_difference": mean, "largest_difference": differences[-1], "same_choice": same}


def compare_exactly(loaded: LoadedModel, hf: Any, tokenizer: Any, pairs: list[Pair], device: str) -> dict[str, float]:
    """In float32 without TF32, on few items. Ours then also computes with every kernel it used before."""
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded.model.float()
    hf.float()
    ours = LanguageModel(loaded).score_pairs(pairs)
    theirs = make_peer(hf, tokenizer, 8).loglikelihood(instances(pairs), disable_tqdm=True)
    return compare(ours, [Likelihood(*score) for score in theirs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", choices=SIZES)
    parser.add_argument("--items", type=int, default=10_000, help="questions of each workload")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 128], help="of HFLM; the fastest is used")
    parser.add_argument("--exact-items", type=int, default=100, help="compared in float32")
    parser.add_argument("--corpus", type=int, default=4_000_000, help="characters that the tokenizer is trained on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import transformers

    texts = corpus(options.corpus)
    config = transformers.LlamaConfig(**SIZES[options.model], max_position_embeddings=4096)
    own = Tokenizer.train(texts, min(32_768, config.vocab_size))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=own.inner, eos_token=own.eos, bos_token=own.eos)
    words = sorted({word for text in texts for word in text.split() if word.isalpha()})
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    family = family_named("llama")
    shape = family.shape(config.to_dict())
    model = build_model(shape, options.device, 0).to(dtype).eval()
    hf = transformers.LlamaForCausalLM(config).to(options.device, dtype).eval()
    hf.load_state_dict(dict(hf_tensors(model.state_dict().__getitem__, shape, family)), strict=False)
    hf.tie_weights()
    # The same prefix on both sides: none, as the tokenizer made here adds nothing.
    form = native_prompt_format(own)
    loaded = LoadedModel(model, own, type(form)((), (), own.eos_id, form.ends), None, CONTEXT)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv), "commit": options.commit, "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__,
        "transformers": transformers.__version__, "model": options.model, "items": options.items, "workloads": {},
    }  # fmt: skip
    everything = {}
    for name in options.workloads:
        pairs = everything[name] = WORKLOADS[name](words, options.items, random.Random(name))
        lengths = [len(row) for pair in LanguageModel(loaded).encode_pairs(pairs[:400]) for row in pair]
        results: dict[str, Any] = {"tokens_per_pair": round(sum(lengths) * 2 / len(lengths), 1)}
        kinds = ["bessemer", *(["bessemer_compiled"] if options.device == "cuda" else [])]
        scores: dict[str, list[Likelihood]] = {}
        for kind in kinds:
            try:
                results[kind], scores[kind] = run_ours(loaded, pairs, kind != "bessemer", options.device)
            except Exception as error:  # of a compiler; the other kind still counts
                results[kind] = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
            print(name, kind, json.dumps(results[kind]), flush=True)
        for block in model.blocks:
            block.compiled = None  # type: ignore[assignment]
        model.chain = None
        results["lm_eval"], scores["lm_eval"] = run_theirs(hf, theirs, pairs, options.batches, options.device)
        print(name, "lm_eval", json.dumps(results["lm_eval"]), flush=True)
        kinds = [kind for kind in kinds if kind in scores]
        fastest = min(kinds, key=lambda kind: results[kind]["seconds"])
        results["times_as_fast"] = results["lm_eval"]["seconds"] / results[fastest]["seconds"]
        results["agreement"] = {kind: compare(scores[kind], scores["lm_eval"]) for kind in kinds}
        print(f"{name}: {results['times_as_fast']:.2f} x lm-eval's HF backend; {results['agreement']}", flush=True)
        report["workloads"][name] = results
        gc.collect()
    for name, pairs in everything.items():
        exact = compare_exactly(loaded, hf, theirs, pairs[: CHOICES * options.exact_items], options.device)
        report["workloads"][name]["float32"] = exact
        print(f"{name}: in float32 {exact}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if any(results["float32"]["largest_difference"] > EXACT for results in report["workloads"].values()):
        sys.exit("the likelihoods differ in float32")


if __name__ == "__main__":
    main()
