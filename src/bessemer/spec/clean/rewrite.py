"""Settings of the step that hands documents to a function of the user's: translation and back, paraphrase, repair."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bessemer.spec.clean.step import StepSpec
from bessemer.spec.quantity import Share


class RewriteSpec(StepSpec):
    """Some documents are replaced by what a Python function of yours makes of them, with the label `rewritten`.

    The function gets a list of texts and returns as many; None or an empty text leaves the original as it is. A step
    changes documents and cannot add any: to train on original and rewritten text, name the same path as two sources
    and give one of them this step. Conversations are left as they are. Nothing of it runs unless a spec names it;
    results are kept until the function's file or these settings change.
    """

    step: ClassVar[str] = "rewrite"
    function: str = Field(
        pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$",
        description="module:name or path/to/file.py:name of a function that takes a list of texts and returns one",
        examples=["rewriters.py:paraphrase"],
    )
    share: Share = Field(
        1.0, description="share of documents to rewrite, chosen by a hash of the text", examples=["10%"]
    )
    texts: int = Field(32, ge=1, description="texts in one call of the function, at most", examples=[32])
    version: str = Field(
        "", description="any word; another one means that texts have to be rewritten anew", examples=["2"]
    )


STEPS: tuple[type[StepSpec], ...] = (RewriteSpec,)
