"""Files of a bare model, without a head: the first files of GPT-2 and BLOOM are such, and everything that transformers'
`AutoModel` saves. Their names lack the first part, which the class with the head puts before all others."""

from __future__ import annotations

from dataclasses import replace

from bessemer.model.families.family import Family
from bessemer.model.families.folder import Folder
from bessemer.spec.shape import ModelShape


def complete_names(folder: Folder, shape: ModelShape, family: Family) -> None:
    """Put that part (`transformer.`, `model.`) before the names of such a folder; another is left as it is."""
    pieces = list(family.pieces(replace(shape, tied=False)))
    for embedding in (piece.theirs[0] for piece in pieces if piece.ours == ("embedding.weight",)):
        prefix, rest = embedding.split(".", 1)
        if rest in folder.tensors and embedding not in folder.tensors:
            whole = {name for piece in pieces for name in piece.theirs}
            tensors = folder.tensors.items()
            folder.tensors = {name if name in whole else f"{prefix}.{name}": info for name, info in tensors}
