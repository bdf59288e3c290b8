"""The first weights of an emitted run as a Hugging Face folder: `python -m bessemer.launch.emit.initial FOLDER`.

They are those that `bessemer train` begins with (fresh ones by the seed, `start_from`'s or `model.hf`'s), and the
folder is compared with our own network before it gets its name.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from bessemer.checkpoint.manifest import DamagedCheckpoint
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import stream_model
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.transformer import build
from bessemer.session.start import load_source, open_source
from bessemer.spec.load import load_spec
from bessemer.spec.shape import ModelShape

NAME = "model"


def write_initial(folder: str | Path) -> Path:
    """The folder with the weights, made unless it is there. Needs the whole model in the host's memory, in fp32."""
    folder = Path(folder).absolute()
    target = folder / NAME
    if (target / "config.json").exists():
        return target
    spec = load_spec(folder / "spec.yaml")
    shape = ModelShape.from_dict(json.loads((folder / "model.json").read_text())["shape"])
    if shape.wrapped:
        raise UserError(f"model.wrap: {spec.model.hf} is a transformers model already: copy that folder to {target}")
    model = build(shape, "cpu", spec.seed, spec.model.init)
    source = open_source(spec)
    if spec.start_from:
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        try:
            CheckpointStore(Path(spec.start_from).parent).load(Path(spec.start_from), weights)
        except DamagedCheckpoint as error:
            raise UserError(f"start_from: {error}") from None
    elif source:
        load_source(model, source)
    state = model.state_dict()
    native = stream_model(folder, state, state.__getitem__, {"first_weights_of": spec.name})
    try:
        return to_hf(open_native(folder), target).folder
    finally:
        shutil.rmtree(native)


if __name__ == "__main__":
    print(write_initial(sys.argv[1]))
