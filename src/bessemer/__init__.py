"""Bessemer: an LLM training engineer that you install.

Importing the package costs nothing: the public names below load their modules, and torch, on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "RunSpec": "bessemer.spec.schema",
    "load_spec": "bessemer.spec.load",
    "Run": "bessemer.run.directory",
    "Finding": "bessemer.run.finding",
    "Plan": "bessemer.plan.decision",
    "TokenStore": "bessemer.data.store",
    "BatchStream": "bessemer.data.stream",
    "train": "bessemer.supervise.session",
    "UserError": "bessemer.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'bessemer' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
