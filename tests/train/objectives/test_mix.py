"""Objectives from specs: shares of rows, objectives of sources, and mistakes told before a run begins."""

from dataclasses import replace

import numpy as np
import pytest

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.model import ObjectiveSpec
from bessemer.spec.shape import PRESETS
from bessemer.train.objectives import Causal, Denoise, Infill, Masked, Mix, Prefix, make_rewriting

NAMES = ("books", "code", "web")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    special = ["<mask>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", *(f"<extra_id_{k}>" for k in range(8))]
    return Tokenizer.train(["a few words"], 300, special=special)


def make(tokenizer, *specs, context=64, **shape):
    parsed = [ObjectiveSpec.model_validate(spec) for spec in specs]
    return make_rewriting(parsed, NAMES, 5, tokenizer, replace(PRESETS["1M"], **shape), context)


def test_a_single_objective_is_itself_with_the_ids_of_the_tokenizer(tokenizer):
    special = tokenizer.special
    assert make(tokenizer, "causal") == Causal() and make(tokenizer, "prefix") == Prefix(5)
    masked = make(tokenizer, {"kind": "masked", "rate": 0.3})
    assert isinstance(masked, Masked) and (masked.rate, masked.mask, masked.random) == (0.3, 0.8, 0.1)
    assert masked.mask_id == special["<mask>"] and tokenizer.eos_id in masked.special_ids
    infill = make(tokenizer, {"kind": "infill", "suffix_first": 0.0})
    assert isinstance(infill, Infill) and infill.suffix_first == 0 and infill.rate == 0.5
    assert infill.marks == tuple(special[f"<fim_{part}>"] for part in ("prefix", "middle", "suffix"))
    denoise = make(tokenizer, "denoise", decoder_layers=2)
    assert isinstance(denoise, Denoise) and denoise.encoder and denoise.context == 64
    assert denoise.sentinels == tuple(special[f"<extra_id_{k}>"] for k in range(3))


def kinds_of(mix, batch):
    """Which objective made each row, seen from outside."""
    made = mix.rewrite(batch)
    seen = []
    for row in range(len(batch.tokens)):
        changed = (made.tokens[row] != batch.tokens[row]).any()
        if made.prefix[row].any():
            seen.append("masked" if changed else "prefix")
        else:
            seen.append("infill" if changed else "causal")
    return np.array(seen)


def test_rows_are_shared_out_by_source_and_by_share(packed, tokenizer):
    mix = make(
        tokenizer,
        {"kind": "infill", "sources": ["code"], "rate": 1.0},
        {"kind": "masked", "share": 3.0, "sources": ["web"]},
        {"kind": "prefix", "share": 1.0, "sources": ["web", "code"]},
        "causal",
    )
    assert isinstance(mix, Mix)
    batch = packed([[50, 14]] * 6000, 64)
    batch.targets[batch.targets >= 256] %= 256
    batch.sources = np.arange(6000) % 3
    seen = kinds_of(mix, batch)
    shares = {
        name: {kind: (seen[batch.sources == k] == kind).mean() for kind in set(seen[batch.sources == k])}
        for k, name in enumerate(NAMES)
    }
    assert shares["books"] == {"causal": 1.0}
    assert shares["code"] == pytest.approx({"infill": 0.5, "prefix": 0.5}, abs=0.05)
    assert shares["web"] == pytest.approx({"masked": 0.75, "prefix": 0.25}, abs=0.05)
    only_code = replace(batch, sources=np.zeros(6000, np.int64))  # as a stream that has no other source numbers it
    assert set(kinds_of(replace(mix, names=("code",)), only_code)) == {"infill", "prefix"}


def test_mistakes_are_told(tokenizer):
    with pytest.raises(UserError, match="needs the special token '<extra_id_8>'"):
        make(tokenizer, "denoise", context=256)
    with pytest.raises(UserError, match=r"masked needs the special token '\[MASK\]', which the tokenizer has not"):
        make(tokenizer, {"kind": "masked", "tokens": ["[MASK]"]})
    with pytest.raises(UserError, match="has up to 3 spans, and there are 1 sentinels"):
        make(tokenizer, {"kind": "denoise", "tokens": ["<mask>"]})
    with pytest.raises(UserError, match="names the source 'coed', but there are only books, code, web"):
        make(tokenizer, {"kind": "infill", "sources": ["coed"]}, "causal")
    with pytest.raises(UserError, match="no objective is left for source 'books'"):
        make(tokenizer, {"kind": "infill", "sources": ["code"]}, {"kind": "prefix", "sources": ["web"]})
    with pytest.raises(UserError, match="a decoder learns all sources by denoise, not by causal, denoise"):
        make(tokenizer, "causal", "denoise", decoder_layers=2)
    with pytest.raises(UserError, match="sees both sides learns all sources by masked, not by causal"):
        make(tokenizer, "causal", causal=False)
    assert isinstance(make(tokenizer, "masked", causal=False), Masked)
