"""Folders in and out: a good one is read piece by piece, and a damaged one is refused by the tensor's name."""

import json
import shutil

import parity
import pytest
import torch
from safetensors.torch import load_file, save_file

from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder, hf_tensors, load_weights
from bessemer.model.families.llama import LLAMA, PHI3
from bessemer.model.families.registry import family_of
from bessemer.model.transformer import Decoder

transformers = pytest.importorskip("transformers")
EMBEDDING, HEAD, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"


def sizes(**more):
    return {
        "vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved():
    return parity.Pair(transformers.LlamaConfig(**sizes()), LLAMA)


@pytest.fixture
def path(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved.path, tmp_path / "model")


def change(path, **tensors):
    """Replace tensors of the file, names with dots written as __; None takes one out."""
    found = load_file(path / "model.safetensors")
    found |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path / "model.safetensors")


def configure(path, **keys):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))


def load(path, dtype=torch.float32, progress=None):
    folder = HfFolder(path)
    family = family_of(folder.config)
    with torch.device("meta"):
        model = Decoder(family.shape(folder.config))
    model = model.to(dtype).to_empty(device="cpu")
    load_weights(model, folder, family, progress)
    return model


def test_loads_in_the_types_of_the_model_and_tells_how_far_it_is(path):
    done = []
    change(path, **{QUERY.replace(".", "__"): torch.full((16, 16), 1 / 3).bfloat16()})
    model = load(path, torch.float16, lambda now, total: done.append((now, total)))
    third = model.blocks[1].attention.query.weight
    assert third.dtype == torch.float16
    assert torch.equal(third, torch.full((16, 16), 1 / 3).bfloat16().half())
    assert done == [(i + 1, 21) for i in range(21)]


def test_a_sharded_folder(path, saved):
    shutil.rmtree(path)
    saved.theirs.save_pretrained(path, max_shard_size="3KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    for name, tensor in load(path).state_dict().items():
        assert torch.equal(tensor, saved.ours.state_dict()[name]), name


def test_one_piece_at_a_time():
    """A tensor is asked for when its piece is due, and not before."""
    shape = PHI3.shape(sizes())
    with torch.device("meta"):
        state = Decoder(shape).state_dict()
    asked = []

    def tensor_of(name):
        asked.append(name)
        return state[name]

    stream = hf_tensors(tensor_of, shape, PHI3)
    assert asked == []
    names = [next(stream)[0] for _ in range(5)]
    assert names[-1] == "model.layers.0.self_attn.qkv_proj.weight"
    assert asked[-3:] == [f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value")]
    assert len(asked) == 7


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({QUERY: None}, f"missing '{QUERY}'"),
        ({QUERY: torch.zeros(8, 16)}, rf"'{QUERY}' has shape \(8, 16\), expected \(16, 16\)"),
        ({QUERY: torch.zeros(16, 16, dtype=torch.int8)}, f"'{QUERY}': quantized or integers"),
        ({QUERY: torch.zeros(16, 16).to(torch.float8_e4m3fn)}, f"'{QUERY}': quantized.*use the model's bf16"),
        ({"model.layers.1.mlp.up_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}, "up_proj.qweight': quantized"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(20, 16)}, "unexpected 'model.layers.2.mlp.up_proj.weight'"),
        ({HEAD: None}, f"unties the embeddings, but there is no '{HEAD}'; write \"tie_word_embeddings\": true"),
        ({EMBEDDING: torch.zeros(40, 16)}, f"'{EMBEDDING}' has shape .*set vocab_size to 40"),
    ],
)
def test_damaged_tensors(path, tensors, message):
    change(path, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    with pytest.raises(UserError, match=message):
        load(path)


def test_a_head_that_is_not_the_embedding_it_should_be_tied_to(path):
    configure(path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=f"'{HEAD}' differs from '{EMBEDDING}'; write \"tie_word_embeddings\": false"):
        load(path)
    change(path, **{HEAD.replace(".", "__"): load_file(path / "model.safetensors")[EMBEDDING].clone()})
    assert load(path).shape.tied


def test_buffers_of_older_files_do_not_matter(path, saved):
    change(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert torch.equal(load(path).head.weight, saved.ours.head.weight)


def test_unknown_architecture(path):
    configure(path, architectures=["RwkvForCausalLM"], model_type="rwkv")
    with pytest.raises(UserError, match=r"architectures: RwkvForCausalLM is not supported .*llama.*wrap: true"):
        load(path)


def test_truncated_file(path):
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model.safetensors: is truncated.*download or save it again"):
        load(path)


def test_pickles_are_not_loaded(path):
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pickles \('pytorch_model.bin'\).*save_pretrained"):
        load(path)
