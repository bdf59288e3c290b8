"""Model folders: what is written is read by safetensors and transformers; what is damaged is refused in one line."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.folder import INDEX, SINGLE_FILE, HfFolder, TensorInfo, check_tensors, write_folder

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def plan_of(tensors: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def write(path: Path, tensors: dict[str, Tensor], shard_bytes: int = 10**9, **more: Any) -> Path:
    files = {"config.json": CONFIG} | more.pop("files", {})
    write_folder(path, plan_of(tensors), tensors.items(), files, shard_bytes, **more)
    return path


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(8, 6, generator=generator) for i in range(5)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Five tensors of 192 bytes in three files, of which two are exactly full."""
    return write(tmp_path / "model", some_tensors(), shard_bytes=384)


def refused(act: Callable[[], Any], *words: str) -> str:
    with pytest.raises(UserError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def craft(folder: Path, header: Any, data: bytes, file: str = SINGLE_FILE, length: int | None = None) -> Path:
    """A safetensors file with any header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / file).write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return folder


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


# What is written


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from([*FLOATS, torch.int64, torch.bool]), min_size=6, max_size=6),
    shard_bytes=st.integers(1, 400),
)
def test_what_is_written_is_read_by_us_and_by_safetensors(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtypes: list[torch.dtype], shard_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "model"
    tensors = {f"é.{i}": (torch.randn(shape) * 9).to(dtypes[i]) for i, shape in enumerate(shapes)}
    write(path, tensors, shard_bytes)
    folder = HfFolder(path)
    theirs: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        theirs |= load_file(file)
    assert set(folder.tensors) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert folder.tensors[name].dtype == tensor.dtype and folder.tensors[name].shape == tuple(tensor.shape)
        assert folder.tensors[name].offset % tensor.dtype.itemsize == 0
        for read in (folder.read(name), theirs[name]):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_shards_index_and_other_files(sharded: Path, tmp_path: Path) -> None:
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(file.name for file in sharded.iterdir()) == sorted(["config.json", INDEX, *names])
    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"] == {"total_size": 5 * 192}
    assert index["weight_map"]["layers.2.weight"] == names[1]
    template = "{{ messages }} – ü"
    (sharded / "tokenizer.model").write_bytes(b"\x00\xff")
    files = {"generation_config.json": {"eos_token_id": 2}, "chat_template.jinja": template, "tokenizer.json": {}}
    files |= {"additional_chat_templates/tool.jinja": "{{ tools }}", "tokenizer.model": sharded / "tokenizer.model"}
    folder = HfFolder(write(tmp_path / "other", some_tensors(), files=files))
    assert (folder.path / SINGLE_FILE).exists() and not (folder.path / INDEX).exists()
    assert folder.config == CONFIG and folder.generation_config == {"eos_token_id": 2}
    assert set(folder.tokenizer_files) == set(files) - {"generation_config.json"}
    assert folder.tokenizer_files["chat_template.jinja"].read_text(encoding="utf-8") == template
    assert folder.tokenizer_files["tokenizer.model"].read_bytes() == b"\x00\xff"
    assert HfFolder(sharded).generation_config is None


def test_the_same_model_gives_the_same_bytes(sharded: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", some_tensors(), shard_bytes=384)
    for file in sharded.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_tensors_that_are_not_contiguous_are_written_by_value(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    assert torch.equal(HfFolder(write(tmp_path / "model", {"a": tensor})).read("a"), tensor)


@pytest.mark.parametrize("shard_bytes", [10_000, 10**9])
def test_transformers_loads_it(tmp_path: Path, shard_bytes: int) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    files = {"config.json": model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}}
    path = write(tmp_path / "model", state, shard_bytes, files=files)
    assert (path / INDEX).exists() == (shard_bytes == 10_000)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name])
    # And the other way: what transformers saves is read here.
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    folder = HfFolder(tmp_path / "theirs")
    assert set(folder.tensors) == set(state)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in state.items())


def test_the_plan_is_kept(tmp_path: Path) -> None:
    tensors = some_tensors()
    plan, target = plan_of(tensors), tmp_path / "model"
    first, second, *_ = tensors.items()
    wrong = [
        [first],  # too few
        [second, first],  # another order
        [*tensors.items(), ("more", torch.zeros(1))],  # too many
        [(first[0], first[1].double()), *list(tensors.items())[1:]],  # another type
    ]
    for given_tensors in wrong:
        with pytest.raises(ValueError, match=r"plan"):
            write_folder(target, plan, given_tensors, {"config.json": {}}, 400)
        assert list(tmp_path.iterdir()) == []


def test_the_config_comes_last(tmp_path: Path) -> None:
    """So that what a kill leaves is not taken for a model."""
    seen = []

    class Watching(dict[str, Any]):
        def items(self) -> Any:
            seen.append({file.name for file in tmp_path.glob(".model.partial-*/*")})
            return super().items()

    write(tmp_path / "model", some_tensors(), files={"tokenizer.json": Watching(a=1), "zz.json": Watching(a=1)})
    assert seen == [{SINGLE_FILE}, {SINGLE_FILE, "tokenizer.json"}]


def test_only_a_model_is_overwritten_and_only_when_asked(sharded: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in sharded.iterdir()}
    refused(lambda: write(sharded, some_tensors()), str(sharded), "not empty", "overwrite")
    assert before == {file.name: file.read_bytes() for file in sharded.iterdir()}
    write(sharded, {"a": torch.ones(1)}, overwrite=True)
    assert sorted(file.name for file in sharded.iterdir()) == ["config.json", SINGLE_FILE]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("years")
    refused(lambda: write(work, some_tensors(), overwrite=True), str(work), "not a model")
    assert (work / "thesis.txt").exists()
    refused(lambda: write(work / "thesis.txt", some_tensors()), "is a file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write(tmp_path / "link", some_tensors())
    assert (tmp_path / "link").is_symlink() and len(HfFolder(tmp_path / "empty").tensors) == 5


def test_a_model_can_be_rewritten_in_place_from_itself(sharded: Path) -> None:
    folder = HfFolder(sharded)
    plan = [(name, info.shape, info.dtype) for name, info in folder.tensors.items()]
    write_folder(sharded, plan, ((name, folder.read(name)) for name, *_ in plan), {"config.json": CONFIG}, 10**9, True)
    assert all(torch.equal(HfFolder(sharded).read(name), tensor) for name, tensor in some_tensors().items())


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    plan = [("huge", (2**60,), torch.float32)]
    refused(lambda: write_folder(tmp_path / "model", plan, [], {"config.json": {}}), "GB", str(tmp_path / "model"))
    assert list(tmp_path.iterdir()) == []


def run(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """In a process whose freed memory goes back at once: glibc keeps some 60 MB of any loop over 8 MB tensors."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from bessemer.model.families.folder import write_folder
def tensors():
    yield "a", torch.ones(1000)
    os.kill(os.getpid(), signal.SIGKILL)
plan = [("a", (1000,), torch.float32), ("b", (1000,), torch.float32)]
write_folder(Path(sys.argv[1]), plan, tensors(), {"config.json": {}}, int(sys.argv[2]), overwrite=True)
"""


def test_a_kill_leaves_the_old_model_and_nothing_that_looks_like_a_new_one(sharded: Path, tmp_path: Path) -> None:
    done = run(KILLED, sharded, Path("10000"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(HfFolder(sharded).tensors) == 5
    left = [path for path in tmp_path.iterdir() if path != sharded]
    assert len(left) == 1 and left[0].name.startswith(".model.partial-")
    refused(lambda: HfFolder(left[0]), "config.json")


MEMORY = """
import sys, torch
from pathlib import Path
from bessemer.model.families.folder import HfFolder
from bessemer.model.families.folder import write_folder
def anon_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
peak = 0
def watched(pairs):
    global peak
    for name, tensor in pairs:
        peak = max(peak, anon_mb())
        yield name, tensor
        del tensor
path = Path(sys.argv[1])
plan = [(f"layers.{i}", (2 << 20,), torch.float32) for i in range(25)]  # 25 of 8 MB
write_folder(path.with_name("small"), plan[:1], [(plan[0][0], torch.ones(2 << 20))], {"config.json": {}})
before = anon_mb()
made = ((name, torch.full(shape, 1.0)) for name, shape, _ in plan)
write_folder(path, plan, watched(made), {"config.json": {}}, 30_000_000)
folder, total = HfFolder(path), 0.0
for name, tensor in watched((name, folder.read(name)) for name in folder.tensors):
    total += tensor.sum().item()
    del tensor
print(peak - before, total)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of memory")
def test_200_mb_pass_through_little_memory(tmp_path: Path) -> None:
    done = run(MEMORY, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    growth_mb, total = map(float, done.stdout.split())
    assert growth_mb < 40 and total == 25 * (2 << 20)


# What is refused


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        refused(lambda path=path: HfFolder(path), str(path), "not a model folder", "hf download")
    (tmp_path / "config.json").write_text("{}")
    refused(lambda: HfFolder(tmp_path).tensors, "no weights", SINGLE_FILE)


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"a": \xff}', "[" * 100_000, "null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_json_that_cannot_be_read(sharded: Path, name: str, text: str) -> None:
    (sharded / name).write_bytes(text.encode("latin-1"))
    refused(lambda: (HfFolder(sharded).generation_config, HfFolder(sharded).tensors), str(sharded / name), "again")


def test_pickles_are_named_and_not_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"a": Trap()}, tmp_path / "pytorch_model.bin")
    message = refused(
        lambda: HfFolder(tmp_path).tensors, str(tmp_path), "pytorch_model.bin", "pickle", "save_pretrained"
    )
    assert "transformers.LlamaForCausalLM.from_pretrained" in message
    assert not (tmp_path / "sprung").exists()


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(lambda: HfFolder(sharded).tensors, INDEX, "'model-00002-of-00003.safetensors'", "download")


def test_a_missing_index_is_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(lambda: HfFolder(sharded).tensors, INDEX, "'model-00001-of-00003.safetensors'")


def test_a_single_file_beside_an_index_is_ambiguous(sharded: Path) -> None:
    (sharded / SINGLE_FILE).write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    refused(lambda: HfFolder(sharded).tensors, str(sharded), SINGLE_FILE, INDEX, "delete")


@pytest.mark.parametrize("elsewhere", ["../secret.safetensors", "/etc/passwd", "a\x00b", ""])
def test_an_index_cannot_lead_outside_the_folder(sharded: Path, elsewhere: str) -> None:
    craft(sharded.parent, {"layers.0.weight": entry(0, 4)}, bytes(4), "secret.safetensors")
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"layers.0.weight": elsewhere}}))
    refused(lambda: HfFolder(sharded).tensors, INDEX, repr(elsewhere))


def test_a_tensor_that_is_not_where_the_index_says(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    for name, file in (
        ("layers.0.weight", "model-00003-of-00003.safetensors"),
        ("ghost", next(iter(index["weight_map"].values()))),
    ):
        changed = index["weight_map"] | {name: file}
        (sharded / INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(lambda name=name, file=file: HfFolder(sharded).tensors, INDEX, repr(name), file)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_an_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: HfFolder(sharded).tensors, str(sharded / INDEX), "weight_map")


def test_two_shards_with_the_same_tensor(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        craft(tmp_path, {"same": entry(0, 4), file: entry(4, 8)}, bytes(8), file)
    shard_of = {"same": "a.safetensors", "b.safetensors": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    refused(lambda: HfFolder(tmp_path).tensors, "'same'", "a.safetensors", "b.safetensors", "delete")


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"x": entry(0, 8)}, 4),  # data shorter than said
        ({"x": entry(0, 8)}, 12),  # longer
        ({"x": entry(0, 8), "y": entry(4, 12)}, 12),  # overlapping
        ({"x": entry(0, 8), "y": entry(12, 16)}, 16),  # a hole
        ({"x": entry(8, 0)}, 8),  # backwards
        ({"x": entry(0, 8, shape=[3])}, 8),
        ({"x": entry(0, 8, shape=[-1, -2])}, 8),
        ({"x": entry(0, 8, shape=["2"])}, 8),
        ({"x": entry(0, 8, shape=[2.0])}, 8),
        ({"x": entry(0, 8, shape=[2**40, 2**40])}, 8),
        ({"x": entry(0, 8, dtype="F5")}, 8),
        ({"x": {"dtype": "F32"}}, 8),
        ({"x": 3}, 8),
        (b"[1]", 8),
        (b"{", 8),
        (b"\xff\xfe{}", 8),
        (b'{"a":' * 100_000, 8),
    ],
)  # fmt: skip
def test_headers_that_lie(tmp_path: Path, header: Any, data_bytes: int) -> None:
    craft(tmp_path / "model", header, bytes(data_bytes))
    refused(lambda: HfFolder(tmp_path / "model").tensors, str(tmp_path / "model" / SINGLE_FILE), "again")


@pytest.mark.parametrize("content", [b"", b"abc", b"\x80\x02}q\x00.", b"PK\x03\x04" * 100, b"\xff" * 100])
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes) -> None:
    craft(tmp_path, {}, b"")
    (tmp_path / SINGLE_FILE).write_bytes(content)
    refused(lambda: HfFolder(tmp_path).tensors, str(tmp_path / SINGLE_FILE), "again")


def test_a_git_lfs_pointer_says_what_to_run(tmp_path: Path) -> None:
    craft(tmp_path, {}, b"")
    (tmp_path / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    refused(lambda: HfFolder(tmp_path).tensors, str(tmp_path / SINGLE_FILE), "git lfs pull")


def test_types_and_sizes_that_no_weight_has(tmp_path: Path) -> None:
    craft(tmp_path, {"x": entry(0, 8, "C64", [1])}, bytes(8))
    refused(lambda: HfFolder(tmp_path).tensors, "'x'", "C64", "bf16")
    craft(tmp_path, {"x": entry(0, 0, shape=[0])}, b"")
    refused(lambda: HfFolder(tmp_path).tensors, "'x'", "empty", "ZeRO-3")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    folder = HfFolder(write(tmp_path / "model", some_tensors()))
    last = max(folder.tensors, key=lambda name: folder.tensors[name].offset)
    path = folder.path / SINGLE_FILE
    os.truncate(path, path.stat().st_size - 1)
    refused(lambda: folder.read(last), str(path), last)
    path.unlink()
    refused(lambda: folder.read(last), str(path))


def test_damage_anywhere_never_ends_in_a_traceback(sharded: Path) -> None:
    """Random cuts and flips of headers, index and config: either the folder reads in full, or UserError."""
    chance = random.Random(0)
    whole = {path: path.read_bytes() for path in sharded.iterdir()}
    messages = []
    for round_ in range(600):
        path = chance.choice(sorted(whole))
        raw = bytearray(whole[path])
        if round_ % 3 == 0:
            raw = raw[: chance.randrange(len(raw))]
        else:
            header_end = 8 + int.from_bytes(raw[:8], "little") if path.suffix == ".safetensors" else len(raw)
            for _ in range(chance.randrange(1, 4)):
                raw[chance.randrange(header_end)] = (
                    chance.randrange(256) if round_ % 3 == 1 else chance.choice(b'0129"}],:{')
                )
        path.write_bytes(raw)
        try:
            folder = HfFolder(sharded)
            for name in folder.tensors:
                folder.read(name)
        except UserError as error:
            messages.append(str(error))
        path.write_bytes(whole[path])
    assert 300 < len(messages) < 600  # most damage shows; a changed name in the config does not
    for message in messages:
        assert "\n" not in message and str(sharded) in message
        message.encode()  # it can be printed


# What does not fit the config

EXPECTED = {"embed_tokens.weight": (40, 8), "layers.0.q.weight": (8, 6), "layers.1.q.weight": (8, 6)}


def infos(**changes: Any) -> dict[str, TensorInfo]:
    found = {name: TensorInfo(shape, torch.bfloat16, SINGLE_FILE) for name, shape in EXPECTED.items()}
    for name, info in changes.items():
        key = name.replace("__", ".")
        if info is None:
            del found[key]
        else:
            found[key] = info
    return found


def check(found: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]] = EXPECTED, **more: Any) -> None:
    check_tensors(found, expected, {"lm_head.weight"}, Path("models/tiny"), **more)


def test_a_model_that_fits_with_buffers_of_old_versions() -> None:
    check(infos())
    buffers = ["h.0.attn.bias", "h.0.attn.masked_bias", "layers.0.self_attn.rotary_emb.inv_freq", "attention.bias"]
    check(
        infos() | {name: TensorInfo((1,), torch.float32, SINGLE_FILE) for name in [*buffers, "embeddings.position_ids"]}
    )
    check(infos(mtp__x=TensorInfo((1,), torch.float32, SINGLE_FILE)), ignore=r"^mtp\.")
    check(infos(lm_head__weight=TensorInfo((40, 8), torch.bfloat16, SINGLE_FILE)))  # a tied head that was saved as well


def test_missing_wrong_and_unexpected_tensors_are_named() -> None:
    many = EXPECTED | {f"layers.{i}.k.weight": (1,) for i in range(5)}
    refused(
        lambda: check(infos(), many), "models/tiny", "missing 'layers.0.k.weight'", "'layers.2.k.weight' and 2 more"
    )
    extra = infos(
        score__weight=TensorInfo((2, 8), torch.float32, SINGLE_FILE),
        h__attn__c_attn__bias=TensorInfo((2,), torch.float32, SINGLE_FILE),
    )
    refused(lambda: check(extra), "unexpected 'score.weight', 'h.attn.c_attn.bias'")
    wrong = infos(layers__0__q__weight=TensorInfo((8, 7), torch.bfloat16, SINGLE_FILE), layers__1__q__weight=None)
    refused(lambda: check(wrong), "'layers.0.q.weight' has shape (8, 7), expected", "missing 'layers.1.q.weight'")
    refused(lambda: check(infos(layers__0__q__weight=TensorInfo((6, 8), torch.bfloat16, SINGLE_FILE))), "transposed")
    refused(
        lambda: check(infos(embed_tokens__weight=TensorInfo((41, 8), torch.bfloat16, SINGLE_FILE))), "vocab_size to 41"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_quantized_weights_are_refused(dtype: torch.dtype) -> None:
    found = infos(layers__0__q__weight=TensorInfo((8, 6), dtype, SINGLE_FILE), layers__1__q__weight=None)
    refused(lambda: check(found), "'layers.0.q.weight'", str(dtype), "bf16")


def test_quantized_names_are_refused_as_such() -> None:
    found = infos(layers__0__q__weight=None, layers__0__q__qweight=TensorInfo((1, 6), torch.int32, SINGLE_FILE))
    refused(lambda: check(found), "'layers.0.q.qweight'", "quantized")


def test_tied_and_untied(tmp_path: Path) -> None:
    untied = EXPECTED | {"lm_head.weight": (40, 8)}
    refused(lambda: check(infos(), untied), "unties", "'lm_head.weight'", '"tie_word_embeddings": true')
    embedding = torch.randn(40, 8)
    other = embedding.clone()
    other[39, 7] += 1e-6
    for number, head in enumerate((other, embedding.double(), embedding[:39].clone())):
        folder = HfFolder(write(tmp_path / f"different-{number}", {"embed": embedding, "head": head}))
        refused(lambda folder=folder: folder.check_tied("head", "embed"), "'head'", "'embed'", "tie_word_embeddings")
    HfFolder(write(tmp_path / "same", {"embed": embedding, "head": embedding.clone()})).check_tied("head", "embed")
    HfFolder(write(tmp_path / "alone", {"embed": embedding})).check_tied("head", "embed")
