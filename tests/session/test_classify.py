"""Classifiers as a user trains them: from scratch to an accuracy, cut in micro-batches, exported, and from a folder."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.data.stream.batches import Batch
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.generate import Sampling
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.data import TokenizerSpec
from bessemer.spec.model import ModelSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job, Outcome
from bessemer.train.trained import load_model

from .conftest import Faults, spec_data

transformers = pytest.importorskip("transformers")

GOOD = ["good", "great", "fine", "lovely", "superb", "happy", "bright", "warm"]
BAD = ["bad", "awful", "poor", "nasty", "broken", "sad", "dull", "cold"]
OTHER = ["the", "film", "was", "a", "piece", "of", "work", "and", "it", "had", "some", "scenes", "at", "night"]
SENTIMENT = {"labels": ["negative", "positive"]}


def write_reviews(path: Path, rows: int = 700) -> Path:
    """Reviews whose label is said by one to three words in them."""
    draw = random.Random(0)
    with path.open("w") as file:
        for row in range(rows):
            label = draw.randrange(2)
            words = draw.choices(OTHER, k=draw.randint(3, 12))
            for _ in range(draw.randint(1, 3)):
                words.insert(draw.randint(0, len(words)), draw.choice((BAD, GOOD)[label]))
            tags = ["O" if word in OTHER else "W" for word in words]
            review, sentiment = f"{' '.join(words)} {row}", SENTIMENT["labels"][label]
            line = {"review": review, "sentiment": sentiment, "words": words, "tags": tags, "stars": 1 + 3 * label}
            file.write(json.dumps({**line, "topics": [sentiment] if row % 3 else []}) + "\n")
    return path


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reviews(tmp_path_factory.mktemp("reviews") / "reviews.jsonl")


@pytest.fixture
def make(reviews: Path, tmp_path: Path) -> Callable[..., RunSpec]:
    def spec(name: str = "run", columns: dict[str, str] | None = None, **parts: Any) -> RunSpec:
        source = {"path": [str(reviews)], "columns": columns or {"text": "review", "label": "sentiment"}}
        data = {"sources": {"reviews": source}, "context": 32, "validation": 0.1} | parts.pop("data", {})
        parts = {"objective": "classify", "classify": SENTIMENT, "budget": {"steps": 3, "batch": 512}} | parts
        parts = {"optimizer": {"lr": 5e-3}, "evaluate": {"every": 40, "tokens": "16K"}} | parts
        return RunSpec.model_validate(spec_data(name, reviews, tmp_path / "runs", data=data, **parts))

    return spec


def train(spec: RunSpec) -> Outcome:
    outcome = Session(spec).train()
    assert outcome.kind == "finished"
    return outcome


def hf_logits(folder: Path, texts: list[str]) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits


@torch.no_grad()
def native_logits(run: Path, texts: list[str], at: int) -> torch.Tensor:
    loaded = load_model(run, device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    return torch.cat([model.logits(model(torch.tensor([tokenizer.encode(text)])))[:, at] for text in texts])


TEXTS = ["a great film and a lovely work", "it was awful", "the night had some sad scenes of broken work"]


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sentiment_from_scratch_and_its_export(make: Callable[..., RunSpec], tmp_path: Path, causal: bool) -> None:
    """95 % of held-out reviews are right; the exported model gives the same logits and labels."""
    bert = {"causal": False, "norm": "layer", "norm_place": "post", "positions": "learned", "gated": False,
            "activation": "gelu", "qkv_bias": True, "out_bias": True, "ffn_bias": True, "kv_heads": 2}  # fmt: skip
    spec = make(budget={"steps": 120, "batch": 1024}, model={} if causal else bert)
    validation = train(spec).validation
    assert validation is not None and validation["accuracy"] > 0.95 and validation["f1"] > 0.95
    assert sum(map(sum, validation["confusion"])) == validation["tokens"] > 40
    assert "perplexity" not in validation and "bits_per_byte" not in validation
    records = list(Run(run_folder(spec)).metrics())
    assert records[-1]["accuracy"] > 0.9 and records[-1]["tokens"] > 120 * 32 * 4  # tokens read, not labels
    if not causal:
        return  # the from-scratch shape has no token types, which BERT has
    loaded = load_model(run_folder(spec), device="cpu")
    with pytest.raises(UserError, match="a classifier writes no text"):
        next(loaded.stream([1], 4, Sampling()))
    converted = to_hf(open_native(run_folder(spec)), tmp_path / "hf")
    assert converted.comparison is not None and converted.comparison.logits < 1e-4
    theirs, ours = hf_logits(tmp_path / "hf", TEXTS), native_logits(run_folder(spec), TEXTS, -1)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    guesses = [config["id2label"][str(int(i))] for i in theirs.argmax(-1)]
    assert guesses == ["positive", "negative", "negative"]


def test_any_accumulation_gives_the_same_loss(make: Callable[..., RunSpec]) -> None:
    curves = []
    for micro in (16, 8, 4):  # 1, 2 and 4 micro-batches
        spec = make(f"micro-{micro}", budget={"steps": 6, "batch": 512, "micro_batch": micro})
        train(spec)
        curves.append([record["loss"] for record in Run(run_folder(spec)).metrics()])
    assert curves[1] == pytest.approx(curves[0], rel=2e-6) and curves[2] == pytest.approx(curves[0], rel=2e-6)


@pytest.mark.parametrize(
    ("columns", "classify", "numbers"),
    [
        ({"words": "words", "label": "tags"}, {"kind": "token", "labels": ["O", "W"]}, ("accuracy", "f1", "confusion")),
        pytest.param(
            {"text": "review", "label": "topics"}, {"problem": "multi", **SENTIMENT}, ("accuracy", "f1", "f1_micro"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"text": "review", "label": "stars"}, {"problem": "regression"}, ("mse", "mae", "r2"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_other_problems_learn(make: Callable[..., RunSpec], tmp_path: Path, columns: Any, classify: Any, numbers: Any):
    spec = make(columns=columns, classify=classify, budget={"steps": 60, "batch": 512})
    validation = train(spec).validation
    first = next(Run(run_folder(spec)).validations())
    assert validation is not None and all(name in validation for name in numbers)
    # A third of the rows has no topic, whatever its words: no model gets below 0.47 of the first loss there.
    assert validation["loss"] < (0.6 if "f1_micro" in numbers else 0.5) * first["loss"]
    converted = to_hf(open_native(run_folder(spec)), tmp_path / "hf")
    assert converted.comparison is not None and converted.comparison.logits < 1e-4
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    kind = "Token" if "kind" in classify else "Sequence"
    assert config["architectures"] == [f"LlamaFor{kind}Classification"]


@pytest.mark.parametrize("family", ["Bert", pytest.param("Llama", marks=pytest.mark.slow)])
def test_a_new_head_on_a_language_model(make: Callable[..., RunSpec], tmp_path: Path, family: str) -> None:
    """From a folder of transformers, with its special tokens, and back: the same logits as transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator([" ".join(GOOD + BAD + OTHER)], trainers.WordLevelTrainer(special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path / family
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=0)
    model_class = "BertForMaskedLM" if family == "Bert" else "LlamaForCausalLM"
    torch.manual_seed(0)
    getattr(transformers, model_class)(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[SEP]",
    ).save_pretrained(folder)  # fmt: skip
    spec = make(budget={"steps": 10, "batch": 512}, optimizer={"lr": 1e-3})
    spec = spec.model_copy(update={"model": ModelSpec(hf=str(folder)), "tokenizer": TokenizerSpec(eos="[SEP]")})
    validation = train(spec).validation
    assert validation is not None and validation["loss"] < 0.8
    to_hf(open_native(run_folder(spec)), tmp_path / "out")
    loaded = load_model(run_folder(spec), device="cpu")
    model, _ = loaded.model, loaded.tokenizer
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        ours = torch.cat(
            [
                model.logits(model(torch.tensor([fast(text).input_ids])))[:, 0 if family == "Bert" else -1]
                for text in TEXTS
            ]
        )
    torch.testing.assert_close(hf_logits(tmp_path / "out", TEXTS), ours, rtol=1e-4, atol=1e-5)
    again = make("again", budget={"steps": 1, "batch": 512}, optimizer={"lr": 1e-9})
    again = again.model_copy(
        update={"model": ModelSpec(hf=str(tmp_path / "out")), "tokenizer": TokenizerSpec(eos="[SEP]")}
    )
    begun = train(again).validation
    assert begun is not None and begun["loss"] == pytest.approx(validation["loss"], rel=1e-3)  # its head was read too


def test_bad_rows_and_settings_are_refused_by_place(make: Callable[..., RunSpec], tmp_path: Path) -> None:
    rows = tmp_path / "odd.jsonl"
    lines = [{"text": f"row {i} of many", "label": "good" if i % 2 else "bad"} for i in range(20)]
    rows.write_text("\n".join(json.dumps(line) for line in [*lines, {"text": "the last", "label": "goood"}]))
    source = {"path": [str(rows)], "columns": {"label": "label"}}
    spec = make(data={"sources": {"rows": source}}, classify={"labels": ["bad", "good"]})
    with pytest.raises(UserError, match=r"odd.jsonl:21: label 'goood' is none of bad, good; add it to classify.labels"):
        Session(spec).train()
    with pytest.raises(
        ValueError, match="no objective 'tune'; write pretrain, sft, classify, distill, dpo, kto, reward, grpo, "
    ):
        make(objective="tune")


BURST = 125  # the step of the wrong labels


class FlippedLabels(Faults):
    """The labels of one step's rows are the wrong ones, whenever it is read."""

    def __init__(self, step: int) -> None:
        self.step = step

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        super().attach(job, tokenizer)
        start, stop = job.data.stream.steps.range(self.step)

        class Flip:
            identity: dict[str, Any] = {}

            def __call__(self, batch: Batch) -> Batch:
                flipped = (batch.positions >= start) & (batch.positions < stop)
                labels = batch.fields["label"]
                wrong = np.where(flipped[:, None, None], 1 - labels, labels)
                return replace(batch, fields={"label": wrong})

        job.data.stream.transforms = (*job.data.stream.transforms, Flip())


@pytest.mark.slow  # the veto is tested on the steps of a real run in guard/test_near_zero.py
def test_a_burst_of_flipped_labels_is_vetoed_and_the_run_goes_on(make: Callable[..., RunSpec]) -> None:
    spec = make(budget={"steps": 150, "batch": 1024}, optimizer={"lr": 1e-2}, guard={"warmup": 32, "window": 64})
    outcome = Session(spec, faults=FlippedLabels(BURST)).train()
    assert outcome.kind == "finished" and outcome.validation is not None and outcome.validation["accuracy"] > 0.95
    records = list(Run(run_folder(spec)).metrics())
    before = [record["loss"] for record in records[BURST - 20 : BURST]]
    assert max(before) < 0.5 and records[BURST]["loss"] > 3
    vetoes = [(event["step"], event["reason"]) for event in Run(run_folder(spec)).events("veto")]
    assert vetoes == [(BURST, "loss outlier")]
    assert [event["verdict"] for event in Run(run_folder(spec)).events("trial")] == ["data"]
    assert not list(Run(run_folder(spec)).events("rollback"))


def test_items_of_a_dataset_from_python(make: Callable[..., RunSpec], reviews: Path, tmp_path: Path) -> None:
    """The same rows as those of files give the same losses; an item without a label is named."""
    files = make("files", budget={"steps": 2, "batch": 512}, data={"validation": 0.0})
    train(files)
    (tokenizer,) = (tmp_path / "runs" / ".data").glob("*/tokenizer.json")
    rows = [json.loads(line) for line in reviews.read_text().splitlines()]
    items = [{"text": row["review"], "label": row["sentiment"]} for row in rows]
    sources = {"reviews": {"path": ["python"]}}
    own = make("own", budget={"steps": 2, "batch": 512}, data={"validation": 0.0, "sources": sources})
    own = own.model_copy(update={"tokenizer": TokenizerSpec(path=str(tokenizer))})
    assert Session(own, datasets={"reviews": items}).train().kind == "finished"
    curves = [[record["loss"] for record in Run(run_folder(spec)).metrics()] for spec in (files, own)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    bad = own.model_copy(update={"name": "bad"})
    with pytest.raises(UserError, match=r"dataset list:1: no label"):
        Session(bad, datasets={"reviews": [{"text": "without"}, *items]}).train()


def test_the_predicted_rate_counts_no_padding(make: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the measured rate of the steps; the predicted time stays that of the rows."""
    from bessemer.session import record

    shares: list[float] = []
    monkeypatch.setattr(
        record, "filled_share", lambda job, exact=record.filled_share: shares.append(exact(job)) or shares[-1]
    )
    spec = make("padded")
    Session(spec).train()
    steps = list(Run(run_folder(spec)).metrics())
    rows = spec.budget.batch / spec.data.context  # type: ignore[operator]
    first = steps[0]["tokens_per_s"] * steps[0]["step_s"] / (rows * spec.data.context)  # type: ignore[operator]
    assert shares[0] == pytest.approx(first, rel=1e-3) and 0.05 < shares[0] < 0.9
