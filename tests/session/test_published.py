"""Training from a store published to a real S3 server: as from the local one, digit for digit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.data.store import remote
from bessemer.data.verify import verify
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec

from .conftest import spec_data, train_until, write_corpus

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def s3(s3_server: str) -> Iterator[str]:
    """The server's address; a transfer that fails is tried twice, without a pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            remote.Transfer.__init__, "__defaults__", (*remote.Transfer.__init__.__defaults__[:1], 2, 0.01, 8)
        )
        yield s3_server


class Published:
    """A corpus, the run that was trained from its files, and the same spec over the published store, without files."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.home, self.endpoint = home, endpoint
        self.files = [write_corpus(home / f"{name}.jsonl", seed=seed) for seed, name in enumerate(("words", "more"))]
        self.local = self.spec("local", home / "here", paths=True)
        assert Session(self.local).train().kind == "finished"
        command = ["data", "publish", str(self.write(self.local)), "--set", f"data.store={json.dumps(self.store())}"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "published  s3://bucket/web" in result.output
        assert train_until(self.spec("half", home / "here", paths=True), 5).kind == "interrupted"
        for file in self.files:
            file.unlink()

    def store(self, **changes: Any) -> dict[str, Any]:
        return {"url": "s3://bucket/web", "storage": {"endpoint_url": self.endpoint}, **changes}

    def spec(self, name: str, runs: Path, paths: bool = False, **data: Any) -> RunSpec:
        parts = spec_data(name, self.files[0], runs, budget={"steps": 12, "batch": 128}, checkpoint={"every": 4})
        weights = {"words": 0.7, "more": 0.3}
        sources = {
            file.stem: {"path": [str(file)] if paths else [], "weight": weights[file.stem]} for file in self.files
        }
        parts["data"] = parts["data"] | {"sources": sources, "packing": "best_fit"}
        parts["data"] |= {} if paths else {"store": self.store(cache=10**6)}
        parts["data"] |= data
        return RunSpec.model_validate(parts)

    def write(self, spec: RunSpec) -> Path:
        path = self.home / f"{spec.name}.yaml"
        path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
        return path


@pytest.fixture(scope="module")
def published(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("published"), s3)


def records(spec: RunSpec) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in Run(run_folder(spec)).metrics()]


def test_a_run_from_the_published_store_has_the_losses_and_documents_of_the_local_one(published: Published) -> None:
    spec = published.spec("remote", published.home / "there")
    assert train_until(spec, 5).kind == "interrupted"  # and resumes
    assert Session(spec).train().kind == "finished"
    assert records(spec) == records(published.local)
    evaluations = [list(Run(run_folder(s)).events("evaluated")) for s in (spec, published.local)]
    assert [e.get("loss") for e in evaluations[0]] == [e.get("loss") for e in evaluations[1]]
    for step in (0, 11):
        assert documents_of(run_folder(spec), step) == documents_of(run_folder(published.local), step)


def test_a_run_that_began_with_the_local_store_continues_with_the_published_one(published: Published) -> None:
    spec = published.spec("half", published.home / "here")
    assert Session(spec).train().kind == "finished"
    assert records(spec) == records(published.local)


def test_verify_reads_every_shard_and_names_a_damaged_one(published: Published, tmp_path: Path) -> None:
    path = published.write(published.spec("verified", tmp_path / "runs"))
    result = CliRunner().invoke(app, ["data", "verify", str(path)])
    assert result.exit_code == 0 and "s3://bucket/web/words.train.00000" in result.output, result.output
    (shard,) = [p for p in (tmp_path / "runs" / ".data" / "shards").glob("*/shard.bin") if p.stat().st_size > 10_000][
        :1
    ]
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    folder = next((tmp_path / "runs" / ".data").glob("published-*"))
    (damaged,) = [report for report in verify(folder, lambda size: None) if report.damage]
    assert "the next start fetches it again" in damaged.damage[0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data": {"context": 64}}, "data.context: 64: .* has no best_fit packing .* (it has 32)"),
        ({"data": {"validation": 0.2}}, "data.validation: 0.2 does not fit .* which has 0.1"),
        ({"data": {"clean": ["whitespace"]}}, "data.clean: .* does not fit .* which has \\[\\]"),
        ({"data": {"sources": {"books": {}}}}, "data.sources.books: .* has words, more only"),
        ({"tokenizer": {"vocab": 400}}, "tokenizer.vocab: 400 does not fit .* which has 300"),
        ({"tokenizer": {"vocab": 300, "special": ["<mask>"]}}, "tokenizer.special: <mask> does not fit"),
        ({"data": {"store": {"url": "s3://bucket/no"}}}, "data.store: s3://bucket/no/prepared.json: no such file"),
        ({"data": {"store": {"url": "s3://nowhere/x"}}}, "data.store: s3://nowhere/x/prepared.json: "),
    ],
    ids=str,
)
def test_a_spec_that_the_store_does_not_fit_is_refused_in_one_line(
    published: Published, tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    data = dict(changes.get("data", {}))
    if "store" in data:
        data["store"] = published.store(**data["store"])
    spec = published.spec("refused", tmp_path / "runs", **data)
    tokenizer = spec.tokenizer.model_copy(update=changes.get("tokenizer", {}))
    with pytest.raises(UserError) as caught:
        Session(spec.model_copy(update={"tokenizer": tokenizer})).train()
    assert re.search(error.replace("(it has 32)", r"\(it has 32\)"), str(caught.value))
    assert "\n" not in str(caught.value)


def test_the_command_exits_with_2_where_the_bucket_cannot_be_reached(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses would take most of the time
    spec = published.spec(
        "lost", tmp_path / "runs", store=published.store(storage={"endpoint_url": "http://127.0.0.1:9"})
    )
    result = CliRunner().invoke(app, ["data", "verify", str(published.write(spec))])
    assert isinstance(result.exception, UserError) or result.exit_code == 2
    assert "data.store: s3://bucket/web/prepared.json: failed" in (str(result.exception) + result.output)
