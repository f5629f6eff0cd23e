"""Which adapter a request runs with."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, array_like=True, frozen=True):
    """An adapter in the folder `lora_path`, as PEFT saves it. `lora_int_id`, from 1 on, stands for it in the engine: the
    same id with another path is another adapter from then on."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, got {value!r}.")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"lora_int_id must be an integer of at least 1, got {number!r}.")
