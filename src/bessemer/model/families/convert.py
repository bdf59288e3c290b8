"""Weights from a Hugging Face folder into a model and back, one piece at a time.

Besides the model only one piece is in memory, so a checkpoint of any size passes. A folder that does not fit the model
is refused, tensors by name, before the first of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from bessemer.model.families.bare import complete_names
from bessemer.model.families.family import Family
from bessemer.model.families.folder import Folder, check_tensors
from bessemer.spec.shape import ModelShape

Progress = Callable[[int, int], None]  # tensors done, and of how many


def theirs(tensor_of: Callable[[str], Tensor], shape: ModelShape, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the family's files hold them, made from ours by name, in the order of the pieces."""
    for piece in family.pieces(shape):
        found = piece.to_theirs([tensor_of(name).detach() for name in piece.ours])
        yield from zip(piece.theirs, found, strict=True)


def ours(folder: Folder, shape: ModelShape, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Our tensors by name, in the folder's types. The folder is one that `check_folder` accepts."""
    for piece in family.pieces(shape):
        yield from zip(piece.ours, piece.to_ours([folder.read(name) for name in piece.theirs]), strict=True)


def expected_shapes(model: nn.Module, family: Family) -> dict[str, tuple[int, ...]]:
    """Their tensors by name, as a file should hold them: the pieces applied to tensors without data."""
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in theirs(blank.__getitem__, _shape(model), family)}


def check_folder(model: nn.Module, folder: Folder, family: Family) -> None:
    """UserError unless the folder holds the tensors of this model. The model may be on the meta device."""
    shape = _shape(model)
    complete_names(folder, shape, family)
    # An untied model has a head of its own: so we know what a tied one's would be called.
    loose = {piece.ours: piece.theirs for piece in family.pieces(replace(shape, tied=False))}
    heads = set(loose.get(("head.weight",), ()))
    check_tensors(folder.tensors, expected_shapes(model, family), heads, folder.path, "|".join(family.ignored) or "^$")
    if shape.tied:
        for head in heads:
            folder.check_tied(head, *loose["embedding.weight",])


def load_weights(model: nn.Module, folder: Folder, family: Family, progress: Progress | None = None) -> None:
    """Fill a model, which has memory already (`to_empty`), in its own types."""
    check_folder(model, folder, family)
    empty, total = model.state_dict(), len(model.state_dict())
    with torch.no_grad():
        for name, tensor in ours(folder, _shape(model), family):
            empty.pop(name).copy_(tensor)
            if progress is not None:
                progress(total - len(empty), total)
    assert not empty, f"no piece of {family.name} fills {sorted(empty)}"


def _shape(model: nn.Module) -> ModelShape:
    shape = model.shape
    assert isinstance(shape, ModelShape)
    return shape
