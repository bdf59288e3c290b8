"""The step `extract`: web pages become their main text. Trafilatura does it, as for FineWeb, with every option fixed
here. Its own deduplication stays off: that remembers earlier pages of the same process, so the outcome would depend
on what the worker happened to read before."""

from __future__ import annotations

import copy
import logging
from importlib.metadata import version as version_of
from typing import Any

from bessemer.data.clean.each_document import EachDocument
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.text import ExtractSpec

_HTML, _TEXT = "html", "text"  # values of the label `type`


class Extract(EachDocument):
    """Documents that readers labelled as HTML get their main text, and the label `type: text`. Others stay."""

    def __init__(self, spec: ExtractSpec, seed: int) -> None:
        self._spec = spec
        try:
            import trafilatura
        except ImportError as error:
            raise UserError(f"extract: needs trafilatura ({error}); pip install 'bessemer[data]'") from error
        logger = logging.getLogger("trafilatura")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)  # it warns of every page without text, and we count those
        self._extract = trafilatura.extract
        self._options = {
            "favor_precision": spec.favour == "precision",
            "favor_recall": spec.favour == "recall",
            "include_tables": spec.include_tables,
            "include_comments": False,
            "include_formatting": False,
            "include_links": False,
            "include_images": False,
            "deduplicate": False,
            "with_metadata": False,
            "output_format": "txt",
            "config": _config(),
        }

    @property
    def identity(self) -> str:
        """Another version of the library may find another main text."""
        return f"trafilatura {version_of('trafilatura')}, lxml {version_of('lxml')}"

    def outcome(self, document: Document) -> Outcome:
        if document.labels.get("type") != _HTML:
            return None
        if len(document.text) > self._spec.max_page_chars:
            return Drop("page too long", len(document.text))
        try:
            found = self._extract(document.text, **self._options)
        except Exception as error:  # of the parsers below it, which promise nothing about what they raise
            return Drop("page cannot be parsed", type(error).__name__)
        text = (found or "").strip()
        if len(text) < self._spec.min_chars:
            return Drop("no main text", len(text))
        document.labels["type"] = _TEXT
        return text


def _config() -> Any:
    """The library's settings at their published values, whatever a settings file of the machine says."""
    from trafilatura.settings import DEFAULT_CONFIG

    config = copy.deepcopy(DEFAULT_CONFIG)
    for name, value in (("MIN_EXTRACTED_SIZE", "250"), ("MIN_OUTPUT_SIZE", "1"), ("MAX_TREE_SIZE", "")):
        config.set("DEFAULT", name, value)
    return config
