"""Launch files of inference engines: complete, valid YAML, every setting with its reason, numbers as in the plan."""

from pathlib import Path

import pytest
import yaml

from bessemer.errors import UserError
from bessemer.plan.cost_model.serving import ServingDemand, serve, timing
from bessemer.plan.hardware import find_gpu
from bessemer.plan.serving_files import SMALLEST_CHUNK, launch_plan, launch_text, write_launch_file
from bessemer.spec.shape import PRESETS, with_vocab

SHAPE = with_vocab(PRESETS["8B"], 128_256)
DEMAND = ServingDemand(20, prompt=1000, answer=250)
OPTION = serve(SHAPE, DEMAND, find_gpu("H100"))[0]
PLAN = launch_plan("/models/steel", SHAPE, DEMAND, OPTION)


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ("vllm", {"model": "/models/steel", "tensor-parallel-size": OPTION.tensor_parallel, "dtype": "bfloat16",
                  "max-model-len": 2048, "enable-prefix-caching": True, "enable-chunked-prefill": True,
                  "max-num-seqs": PLAN.sequences}),
        ("tensorrt-llm", {"tensor_parallel_size": OPTION.tensor_parallel, "max_seq_len": 2048,
                          "max_batch_size": PLAN.sequences, "enable_chunked_prefill": True}),
        ("sglang", {"model-path": "/models/steel", "context-length": 2048, "chunked-prefill-size": PLAN.chunk}),
    ],
)  # fmt: skip
def test_every_setting_has_its_reason(tmp_path: Path, engine: str, keys: dict[str, object]) -> None:
    path = write_launch_file(engine, PLAN, tmp_path / f"{engine}.yaml")
    lines = path.read_text().splitlines()
    settings = yaml.safe_load(path.read_text())
    assert keys.items() <= settings.items()
    for key in settings:
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
        assert lines[place - 1].startswith("# ")
    assert any(line.startswith("# expected:") for line in lines) and any("not a measurement" in line for line in lines)
    assert any(line.startswith("# start:") and f"{engine}.yaml" in line for line in lines)


def test_the_chunk_is_the_largest_within_the_time_per_token() -> None:
    times = timing(SHAPE, DEMAND, OPTION)
    assert times.chunk_s(PLAN.chunk) <= DEMAND.tpot_s < times.chunk_s(2 * PLAN.chunk)
    hurried = launch_plan(
        "m", SHAPE, ServingDemand(1, tpot_s=0.011), serve(SHAPE, ServingDemand(1), find_gpu("H100"))[0]
    )
    assert hurried.chunk == SMALLEST_CHUNK
    assert PLAN.sequences <= OPTION.most_sequences


def test_low_precision_is_named() -> None:
    (option, *_) = serve(SHAPE, DEMAND, find_gpu("H100"), ("fp8",))
    plan = launch_plan("m", SHAPE, DEMAND, option)
    assert yaml.safe_load(launch_text("vllm", plan, "f"))["quantization"] == "fp8"
    assert yaml.safe_load(launch_text("tensorrt-llm", plan, "f"))["quant_config"] == {"quant_algo": "FP8"}


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UserError, match="--emit ollama: write vllm, tensorrt-llm, sglang"):
        launch_text("ollama", PLAN, "f")
