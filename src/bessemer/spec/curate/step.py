"""How a step stands in a spec: `- length` with its defaults, or `- length: {min_chars: 100}`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bessemer.spec.quantity import SpecSection

Named = Annotated[str, Field(min_length=1)]  # a file, a word, a variable: never empty
Fraction = Annotated[float, Field(ge=0, le=1)]
LARGEST_COUNT = 10**12  # of characters, words, documents: no corpus has a document of a terabyte


def setting(default: Any, about: str, *examples: Any, **limits: Any) -> Any:
    """A field of a step. A default of `...` means that there is none; limits are pydantic's (ge, le, pattern)."""
    if limits.keys() & {"ge", "gt"} and not limits.keys() & {"le", "lt"}:
        limits["le"] = LARGEST_COUNT
    return Field(default, description=about, examples=list(examples), **limits)


class StepSpec(SpecSection):
    """The settings of one step. Defaults are the published ones; `step` is its name in a spec."""

    step: ClassVar[str] = ""

    def __init_subclass__(cls, step: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.step = step

    @model_validator(mode="before")
    @classmethod
    def _unwrap(cls, value: Any) -> Any:
        if value == cls.step:
            return {}
        if isinstance(value, dict) and list(value) == [cls.step]:
            inner = value[cls.step]
            return {} if inner is None else inner
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """As it is written: the name, or the name with its settings."""
        full = handler.resolve_ref_schema(handler(core))
        named = {
            "type": "object",
            "properties": {cls.step: full},
            "required": [cls.step],
            "additionalProperties": False,
        }
        return {"anyOf": [{"const": cls.step}, named], "description": full.get("description", "")}

    @model_serializer(mode="wrap")
    def _wrap(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {self.step: handler(self)}
