"""Checks the arguments of the Python interface: texts, and settings, which have the names and types of flags."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from nmtkit.config import COMMAND_LINE, convert, derive, field_types, flag_of, split_settings, suggestion
from nmtkit.text.normalization import check_characters
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request

PathLike = str | Path
Called = TypeVar("Called", bound=Callable[..., Any])
Class = TypeVar("Class")
LANGUAGES = {"source_lang", "target_lang"}  # names that `**languages` accepts


@functools.lru_cache(64)  # each call of `Model.translate` needs these types
def hints_of(*classes: Any) -> Mapping[str, Any]:
    """Maps the flag names of config classes, with underscores for hyphens, to the types of the fields."""
    types = {cls: field_types(cls) for cls in classes}
    return {
        flag_of(field)[2:].replace("-", "_"): types[cls][field.name]
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.metadata.get("is_flag", True)
    }


def named_arguments(function: Called) -> Called:
    """Makes a function raise ValueError for an unknown argument name. The message suggests the most similar name.

    If the function has an argument `settings`, which maps flags to values, the message says that flags belong there.
    Functions with `**settings` or `**options` stay unchanged, because they check these names themselves.
    """
    parameters = inspect.signature(function).parameters
    known = set(parameters) - {"self"}
    if any(parameter.kind is parameter.VAR_KEYWORD and name != "languages" for name, parameter in parameters.items()):
        return function
    names = sorted(known - {"languages"} | (LANGUAGES if "languages" in known else set()))

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        for name in named:
            if name not in names:
                title = function.__name__
                example = f"{title}({{{name!r}: {named[name]!r}}}, …)"
                hint = f"; give flags as a dict: {example}" if "settings" in names else ""
                raise ValueError(f"{title} has no argument {name!r}; {suggestion(name, names)}{hint}")
        return function(*arguments, **named)

    return cast(Called, called)


def named_arguments_of_methods(kind: type[Class]) -> type[Class]:
    """Applies `named_arguments` to the public methods of a class."""
    for name, function in list(vars(kind).items()):
        if inspect.isfunction(function) and not name.startswith("_"):
            setattr(kind, name, named_arguments(function))
    return kind


def configs(title: str, settings: Mapping[str, Any], *classes: Any) -> list[Any]:
    """Returns a config of each class, with the `settings` that are flags of the class.

    An item of `classes` can also be a preset: a config whose fields the settings replace. Raises ValueError for wrong
    settings. The message begins with `title`, the name of the caller.
    """
    kinds = [cls if isinstance(cls, type) else type(cls) for cls in classes]
    *parts, _ = split_settings(checked(title, settings, hints_of(*kinds)), *kinds)
    for cls, part in zip(kinds, parts, strict=True):
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in part:
                raise ValueError(f"{title} needs {flag_of(field)[2:].replace('-', '_')}")
    return [derive(cls, part, COMMAND_LINE) for cls, part in zip(classes, parts, strict=True)]


def translation_options(options: Mapping[str, Any], nbest: int | None) -> tuple[SearchOptions, TextOptions]:
    """Returns the `options` of `Model.translate` as two configs: search (with its logits processors), and text.

    Raises ValueError for options that are unknown, are out of range or cannot be combined.
    """
    for name in ("alignment", "quality"):
        if nbest is None and options.get(name):
            raise ValueError(f"{name} needs nbest: without nbest, a translation is a text, which has no {name}")
    settings = options if nbest is None else {**options, "nbest": nbest}
    named = options.get("logits_processors", ())
    presets = {name: LOGITS_PROCESSORS[name].preset for name in ([named] if isinstance(named, str) else named)}
    for name in settings:
        if name in hints_of(DeviceOptions, TranslatorOptions):
            raise ValueError(f"{name} is a setting of nmtkit.load, not of translate")
    search, text, *processors = configs("translate", settings, SearchOptions, TextOptions, *presets.values())
    if search.score_reference:
        raise ValueError("score_reference is not an option here; call the method score of the model")
    if search.mbr is not None and nbest is None:
        raise ValueError("mbr chooses from nbest translations; give nbest")
    if text.rewriting and search.alignment is not None:
        names = ", ".join(text.rewriting)
        raise ValueError(
            f"alignment refers to the text that the model reads, but {names} changes this text; leave out alignment"
        )
    return dataclasses.replace(search, processor_configs=tuple(processors)), text


def checked(title: str, settings: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Converts each setting to the type in `hints`. A single item may be given for a list of one item.

    Raises ValueError for an unknown name, with the most similar known name, and for a value of a wrong type.
    """
    values = {}
    for name, value in settings.items():
        if name not in hints:
            raise ValueError(f"{title} has no setting {name!r}; {suggestion(name, hints)}")
        single = isinstance(value, str | Path | int | float) and typing.get_origin(hints[name]) is tuple
        try:
            values[name] = convert([value] if single else value, hints[name])
        except ValueError as error:
            raise ValueError(f"{title}: {name}: {error}") from None
    return values


def items(given: Any, argument: str = "source") -> Iterable[Any]:
    """Returns the texts or requests that a caller has given as `argument`. A single text becomes a list of one text.

    Raises ValueError, with the name of the argument, for a value that is neither a text nor iterable, such as None.
    """
    if isinstance(given, str | Request):
        return [given]
    if not isinstance(given, Iterable):
        raise ValueError(f"{argument} is of type {type(given).__name__}; give a text or a list of texts")
    return given


def paths(given: PathLike | Sequence[PathLike]) -> Sequence[PathLike]:
    """Returns the paths that a caller has given. A single path becomes a list of one path."""
    return [given] if isinstance(given, str | Path) else given


def texts(given: str | Iterable[str], argument: str = "source") -> list[str]:
    """Returns a list of texts. Raises ValueError, with the index, for an item that is not a text."""
    listed = list(items(given, argument))
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise ValueError(f"item {index} is of type {type(text).__name__}; give a text or a list of texts")
        check_characters(text, f"item {index}")
    return listed


def pairs(source: str | Sequence[str], target: str | Sequence[str]) -> list[Request]:
    """Returns a request for each text, with its translation as reference.

    Raises ValueError if the lists differ in length, or if only one argument is a list.
    """
    sources, targets = texts(source), texts(target, "target")
    if isinstance(source, str) != isinstance(target, str) or len(sources) != len(targets):
        raise ValueError(
            f"source is {_described(source, sources)}, but target is {_described(target, targets)}; "
            "give two texts, or two lists of the same length"
        )
    return [Request(text, reference=other) for text, other in zip(sources, targets, strict=True)]


def _described(given: object, texts: list[str]) -> str:
    return "one text" if isinstance(given, str) else f"a list of {len(texts)}"


def check_text(method: str, source: object) -> None:
    """Raises ValueError unless `source`, the argument of a method for a single text, is a text."""
    if not isinstance(source, str):
        raise ValueError(f"{method} takes one text, not a {type(source).__name__}; call {method} for each text")
    check_characters(source, f"the text of {method}")
