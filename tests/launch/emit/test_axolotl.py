"""axolotl.yaml under axolotl's own schema."""

from collections.abc import Callable

import pytest
import yaml

from bessemer.launch.emit import render
from bessemer.launch.emit.resolve import ResolvedRun

Resolve = Callable[..., ResolvedRun]


def test_the_file_says_the_run(resolved: Resolve) -> None:
    made = render("axolotl", resolved(processes=2))
    found = yaml.safe_load(made.files["axolotl.yaml"])
    assert found["micro_batch_size"] * found["gradient_accumulation_steps"] * 2 == 8
    assert (found["max_steps"], found["sequence_len"], found["learning_rate"]) == (20, 32, 0.01)
    assert found["datasets"][0]["path"] == "json"
    assert any(note.startswith("data.sources:") for note in made.notes)


@pytest.mark.parametrize("shard", [1, 4])
def test_axolotl_reads_it(resolved: Resolve, shard: int) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config", reason="axolotl is not installed")
    run = resolved(parallel={"dp_shard": shard}, memory={"activations": "full"}, precision="bf16")
    said = yaml.safe_load(render("axolotl", run).files["axolotl.yaml"])
    known = schema.AxolotlInputConfig.model_fields
    assert not [key for key in said if key not in known]
    found = schema.AxolotlInputConfig(**said)
    assert (found.sequence_len, found.max_steps, found.gradient_checkpointing) == (32, 20, True)
    assert found.learning_rate == 0.01
    assert (found.fsdp_version, found.dp_shard_size) == ((2, 4) if shard > 1 else (None, None))
