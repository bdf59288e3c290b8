"""Sizes of data that is not prepared yet."""

import gzip
import json
from pathlib import Path

import pytest

from bessemer.data.estimate import estimate_sizes, estimate_vocab
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.request import depends_on_data
from bessemer.spec.schema import RunSpec


def spec_of(path: Path, **parts: object) -> RunSpec:
    model = {"width": 32, "layers": 1, "heads": 2}
    return RunSpec.model_validate({"model": model, "data": {"sources": {"rows": str(path)}}, **parts})


def test_tokens_and_rows_of_files(tmp_path: Path) -> None:
    text = "".join(json.dumps({"text": f"row {i:03}" + "." * 80}) + "\n" for i in range(400))
    plain, packed = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    (size,) = estimate_sizes(spec_of(plain)).values()
    assert size.documents == 400 and size.tokens == pytest.approx(len(text) / 1.62, rel=0.01)  # 512 tokens
    (size,) = estimate_sizes(spec_of(plain, tokenizer={"vocab": 50_000})).values()
    assert size.tokens == len(text) // 4
    (size,) = estimate_sizes(spec_of(packed)).values()
    assert size.tokens == pytest.approx(packed.stat().st_size * 3 / 1.62, rel=0.01)
    (tmp_path / "notes.txt").write_text(text)
    (size,) = estimate_sizes(spec_of(tmp_path / "notes.txt")).values()
    assert size.documents == 0 and size.tokens == pytest.approx(len(text) / 1.62, rel=0.01)
    assert estimate_vocab(spec_of(plain), estimate_sizes(spec_of(plain))) == 512
    assert estimate_vocab(spec_of(plain, tokenizer={"vocab": 999}), {}) is None
    assert estimate_vocab(spec_of(plain, tokenizer={"path": str(tmp_path / "none.json")}), {}) is None
    with pytest.raises(UserError, match=r"none\.jsonl"):
        estimate_sizes(spec_of(tmp_path / "none.jsonl"))


def test_a_tokenizer_is_measured_on_the_first_file(tmp_path: Path) -> None:
    text = "".join(json.dumps({"text": f"row {i:03}" + " steel and iron" * 8}) + "\n" for i in range(400))
    (tmp_path / "rows.jsonl").write_text(text)
    tokenizer = Tokenizer.train([text], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    (size,) = estimate_sizes(
        spec_of(tmp_path / "rows.jsonl", tokenizer={"path": str(tmp_path / "tokenizer.json")})
    ).values()
    assert size.tokens == pytest.approx(len(tokenizer.encode(text)), rel=0.01)


def test_which_plans_need_them(tmp_path: Path) -> None:
    assert depends_on_data(spec_of(tmp_path, objective="sft"))
    assert depends_on_data(spec_of(tmp_path, budget={"epochs": 2}))
    assert not depends_on_data(spec_of(tmp_path, objective="sft", budget={"tokens": "1M"}))
    assert not depends_on_data(spec_of(tmp_path))
