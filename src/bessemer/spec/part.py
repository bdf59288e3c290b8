"""What every section of a spec is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Paths = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Part(BaseModel):
    """A section of the spec: strict types, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False, allow_inf_nan=False)


class ShortPart(Part):
    """A section that may also be written as one word; the schema says so to editors."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        full = handler.resolve_ref_schema(handler(core))
        return {"anyOf": [{"type": "string"}, full], "description": full.get("description", "")}
