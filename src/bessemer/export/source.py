"""A model to export, opened for reading text: a run with its adapter merged, an import or a Hugging Face folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from bessemer.data.tokenizer.tokenizer import PromptFormat, Tokenizer
from bessemer.errors import UserError
from bessemer.export.hf import choose_family, other_files, real_tokens
from bessemer.model.families.folder import HfFolder, ModelOrigin, find_origin
from bessemer.model.transformer import Decoder
from bessemer.train.trained import LoadedModel, find_model, load_model


@dataclass(frozen=True)
class ExportSource:
    """The whole model in float32: the reference of its export, and what is written."""

    place: Path
    loaded: LoadedModel

    @property
    def model(self) -> Decoder:
        return self.loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def format(self) -> PromptFormat:
        return self.loaded.format

    @property
    def template(self) -> str | None:
        return self.loaded.template

    @property
    def name(self) -> str:
        return self.place.resolve().name

    @property
    def context(self) -> int:
        """Tokens that the model was made to read."""
        return self.loaded.context or self.model.shape.max_positions or 2048

    @cached_property
    def origin(self) -> ModelOrigin | None:
        return find_origin(self.place)

    @property
    def origin_folder(self) -> HfFolder | None:
        return self.origin.folder if self.origin else None

    def files(self) -> dict[str, Any]:
        """Tokenizer files and config.json; a classifier, or a model of no family, has its native shape there."""
        shape = self.model.shape
        files, ids = other_files(self.place, shape, self.tokenizer, self.origin)
        config: dict[str, Any] = {"bessemer": shape.to_dict()}
        with suppress(UserError):
            config = config if shape.labels else choose_family(shape, None, self.origin_folder).config(shape)
        return files | {"config.json": config | ids}

    def tokens(self) -> tuple[Tensor, str]:
        """Rows of ids to compare on, and where they come from."""
        return real_tokens(self.model.shape, self.tokenizer, self.place)


def open_source(place: Path, which: str = "last") -> ExportSource:
    """Load a model on the CPU."""
    files = find_model(place, which)
    return ExportSource(files.place, load_model(place, which, "cpu"))
