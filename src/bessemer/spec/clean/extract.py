"""Settings of the step that takes the main text out of web pages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bessemer.spec.clean.step import StepSpec


class ExtractSpec(StepSpec):
    """HTML pages become their main text, without menus, comments and footers; other documents stay as they are."""

    step: ClassVar[str] = "extract"
    favour: Literal["precision", "recall", "balanced"] = Field(
        "precision",
        description="precision: less text, but surely the main one (as FineWeb); recall: more of it; or balanced",
        examples=["precision"],
    )
    include_tables: bool = Field(True, description="keep the text of tables", examples=[True])
    min_chars: int = Field(
        1, ge=1, description="fewest characters of main text; pages with less go", examples=[100]
    )
    max_page_chars: int = Field(
        2_000_000,
        ge=1,
        description="longest page in characters of HTML; longer ones go, since they can take minutes",
        examples=[2_000_000],
    )


STEPS: tuple[type[StepSpec], ...] = (ExtractSpec,)
