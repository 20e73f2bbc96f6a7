"""What all sections of the configuration share."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys, and numbers without an end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads `no` and `off` as false, and pydantic false as 0: a port or a limit that nobody meant.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("must not be true or false")
        return value
