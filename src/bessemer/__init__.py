"""Bessemer: an LLM training engineer that you install.

Importing the package is cheap: the public names below load their modules, and torch, on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

if (
    "BESSEMER_PARENT_PID" in os.environ
):  # a child of Bessemer must end with its parent; before torch, whose import takes seconds
    from bessemer.parent import end_with_parent

    end_with_parent()

__version__ = "0.1.0"

# Public name -> module, or module:name. No public name may equal a subpackage (`bessemer.train`), whose import would
# silently replace it.
_PUBLIC = {
    "RunSpec": "bessemer.spec.schema",
    "load_spec": "bessemer.spec.load",
    "Run": "bessemer.run.directory",
    "Finding": "bessemer.run.finding",
    "Plan": "bessemer.plan.decision",
    "TokenStore": "bessemer.data.store.token_store",
    "BatchStream": "bessemer.data.stream.batches",
    "plan_run": "bessemer.session.api",
    "train_run": "bessemer.session.api",
    "evaluate_run": "bessemer.session.api",
    "plot_run": "bessemer.session.api",
    "documents_of": "bessemer.session.replay",
    "UserError": "bessemer.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'bessemer' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
