"""Reads model files of other toolkits. Every error is a ValueError or OSError that names the file and the entry."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nmtkit.config.files import parse_json

T = TypeVar("T")


def check_file(path: Path, purpose: str = "") -> None:
    """Raises FileNotFoundError if `path` is missing, and ValueError if `path` is not a regular file.

    The message of FileNotFoundError ends with `purpose`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file{purpose and '; '}{purpose}")
    if not path.is_file():  # reading a named pipe could block forever
        raise ValueError(f"{path} is not a regular file")


def read_bytes(path: Path, purpose: str = "") -> bytes:
    """Returns the contents of a file after `check_file`."""
    check_file(path, purpose)
    return path.read_bytes()


def read_text(path: Path, purpose: str = "") -> str:
    try:
        return read_bytes(path, purpose).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path, purpose: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file."""
    text = read_text(path, purpose)
    try:
        contents = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or is damaged: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return contents


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns errors caused by a wrong structure, such as KeyError, into a ValueError that names `path`."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or of an unknown format: {type(error).__name__} {error}") from error


class ModelSettings:
    """The settings of a model by name. Each method raises ValueError with the file, the setting and its value."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def value(self, name: str, default: Any = None) -> Any:
        """Returns a value of any type. Raises ValueError if the value is missing and there is no default."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.path}: {name} is missing")
        return value

    def wrong(self, name: str, expected: str) -> ValueError:
        return ValueError(f"{self.path}: {name} is {str(self.values.get(name))[:60]!r}, not {expected}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.value(name, default)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)  # Marian writes numbers as text
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.wrong(name, "a whole number")
        return value

    def fraction(self, name: str, default: float | None = None) -> float:
        value = self.value(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise self.wrong(name, "a number from 0 to 1")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.value(name, default)
        if value not in (True, False, "true", "false") or not isinstance(value, bool | int | str):
            raise self.wrong(name, "true or false")
        return value in (True, "true")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def one_of(self, name: str, supported: Collection[str], default: str | None = None) -> str:
        """Returns the text of a setting, which must be in `supported`."""
        value = self.value(name, default)
        if not isinstance(value, str) or value not in supported:
            shown = f"{name} {str(value)[:60]!r}"
            raise ValueError(f"{self.path}: {shown} is not supported; supported: {', '.join(supported)}")
        return value

    def same(self, read: Callable[[str, Any], T], *names: str, default: Any = None) -> T:
        """Returns the common value of the settings in `names`. `read` is a method of this class, such as `integer`."""
        values = [read(name, default) for name in names]
        if len(set(values)) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
            raise ValueError(f"{self.path} has {shown}; nmtkit's Transformer needs one value for all these settings")
        return values[0]
