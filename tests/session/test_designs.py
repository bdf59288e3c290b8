"""Every kind of network and task trains, resumes exactly, is looked into and generates, from the spec alone."""

from pathlib import Path
from typing import Any

import pytest

from bessemer.model.generate import Sampling
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import load_model

CORPUS = Path(__file__).parents[2] / "src" / "bessemer" / "spec"
SMALL: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64}
DESIGNS: dict[str, dict[str, Any]] = {
    "experts": {"model": {**SMALL, "moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared": 1, "choice_bias": True}}},
    "capacity": {"model": {**SMALL, "moe": {"experts": 4, "top_k": 1, "ffn": 32, "capacity": 1.0, "router_z": 1e-3}}},
    "latent": {"model": {**SMALL, "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "q_rank": 16}}},
    "hybrid": {
        "model": {
            **SMALL,
            "layers": 3,
            "mixers": ["mamba", "attention", "mamba"],
            "mamba": {"heads": 4, "head_dim": 16, "state": 16},
        }
    },
    "alibi": {
        "model": {
            **SMALL,
            "positions": "alibi",
            "norm": "layer",
            "activation": "gelu",
            "gated": False,
            "qkv_bias": True,
            "ffn_bias": True,
            "parallel": "two_norms",
        }
    },
    "sandwich": {
        "model": {
            **SMALL,
            "norm_place": "sandwich",
            "qk_norm": True,
            "attention_cap": 50.0,
            "logit_cap": 30.0,
            "windows": [8, 0],
            "local_theta": 1000.0,
        }
    },
    "learned": {"model": {**SMALL, "positions": "learned", "norm_place": "post", "norm": "layer"}},
    "sparse": {"model": {**SMALL, "blocks": [8, 1], "positions": "sinusoidal", "init": "small"}},
    "relative": {"model": {**SMALL, "positions": "relative", "activation": "relu2", "gated": False, "init": "mup"}},
    "masked": {"model": {**SMALL, "causal": False}, "tasks": ["masked"]},
    "mixed": {
        "model": SMALL,
        "tasks": ["causal", {"kind": "infill", "share": 0.5}, {"kind": "prefix", "share": 0.5}],
        "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1},
        "loss": {"smoothing": 0.1, "z": 1e-4},
    },
    "denoise": {"model": SMALL, "tasks": ["denoise"], "loss": {"focal": 1.0}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that the corpus is prepared once."""
    return tmp_path_factory.mktemp("runs")


def spec_of(runs: Path, name: str, design: dict[str, Any], steps: int, **more: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": name, "runs": str(runs), "tokenizer": {"vocab": 512},
            "data": {"context": 32, "sources": {"code": {"path": str(CORPUS), "format": "source"}}},
            "budget": {"steps": steps, "batch": 128}, "optimizer": {"lr": 3e-3}, "schedule": {"kind": "constant"},
            "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
            "evaluate": {"tokens": 512, "every": 6}, "checkpoint": {"every": 3}, "guard": {"look_every": 4},
            **design, **more,
        }
    )  # fmt: skip


SLOW = ("capacity", "latent", "hybrid", "alibi", "sandwich", "learned", "sparse", "relative", "denoise")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in DESIGNS]
)
def test_a_design_trains_resumes_exactly_and_is_looked_into(name: str, runs: Path) -> None:
    design = DESIGNS[name]
    assert train(spec_of(runs, f"{name}-whole", design, 12)).kind == "finished"
    assert train(spec_of(runs, f"{name}-cut", design, 7)).kind == "finished"
    assert train(spec_of(runs, f"{name}-cut", design, 12)).kind == "finished"  # from step 7, or 6 where it was saved
    whole, cut = (
        {record["step"]: (record["loss"], record["grad_norm"]) for record in Run(runs / f"{name}-{part}").metrics()}
        for part in ("whole", "cut")
    )
    assert whole == cut  # dropout and masks are drawn from the seed and the row, not from what ran before
    assert len(whole) == 12
    if name != "masked":
        loaded = load_model(runs / f"{name}-cut")
        assert len("".join(loaded.stream(loaded.tokenizer.encode("import "), 4, Sampling(seed=1)))) >= 0
    validations = list(Run(runs / f"{name}-whole").validations())
    assert validations[-1]["loss"] < validations[0]["loss"]
