"""Reads the values of a configuration file by key, and checks their types.

A missing or invalid value raises `ConfigError`, because a silent default would give a model that runs and is wrong.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from mlx_llama3.model.config import ConfigError, check_positive, check_whole

Built = TypeVar("Built")


class ConfigKeys:
    """The values of a configuration, checked by type. A `ConfigError` names the file (`source`) and the key."""

    def __init__(self, mapping: Mapping[str, Any], source: str) -> None:
        self.mapping, self.source = mapping, source

    def required(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` if it is absent or null. Raises `ConfigError` if there is no default."""
        value = self.mapping.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.source}: missing key {key!r}")
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number; some programs write 2048 as 2048.0."""
        value = self.required(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        check_whole(f"{self.source}: {key}", value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.required(key, default)
        check_positive(f"{self.source}: {key}", value)
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; False if it is absent or null."""
        value = self.required(key, False)
        if type(value) is not bool:
            raise ConfigError(f"{self.source}: {key} is {value!r:.60}; it must be true or false")
        return value


def build(kind: type[Built], source: str, **fields: Any) -> Built:
    """`kind(**fields)`; its `ConfigError` gets the name of the file."""
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
