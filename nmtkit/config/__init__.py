"""Configs: frozen dataclasses. Each field is declared once and is a flag, a TOML key and a keyword argument."""

from nmtkit.config.fields import (
    LARGEST,
    LIMITS,
    Config,
    FlagRule,
    changed_flags,
    check_flags,
    check_limits,
    check_no_collisions,
    field_types,
    flag_name,
    flag_of,
    option,
)
from nmtkit.config.values import COMMAND_LINE, convert, derive, present, split_settings, suggestion, to_dict, to_toml

__all__ = [
    "COMMAND_LINE",
    "LARGEST",
    "LIMITS",
    "Config",
    "FlagRule",
    "changed_flags",
    "check_flags",
    "check_limits",
    "check_no_collisions",
    "convert",
    "derive",
    "field_types",
    "flag_name",
    "flag_of",
    "option",
    "present",
    "split_settings",
    "suggestion",
    "to_dict",
    "to_toml",
]
