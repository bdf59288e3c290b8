"""StepSpec: the base of curation steps. An entry of `clean` is `- length`, or `- length: {min_chars: 100}`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bessemer.spec.quantity import SpecSection

Named = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class StepSpec(SpecSection):
    """The settings of one step. Defaults are the published ones. `step` is its name in a spec."""

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
        """The schema of both forms: the name, or the name with its settings."""
        full = handler.resolve_ref_schema(handler(core))
        with_settings = {
            "type": "object",
            "properties": {cls.step: full},
            "required": [cls.step],
            "additionalProperties": False,
        }
        return {"anyOf": [{"const": cls.step}, with_settings], "description": full.get("description", "")}

    @model_serializer(mode="wrap")
    def _wrap(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {self.step: handler(self)}
