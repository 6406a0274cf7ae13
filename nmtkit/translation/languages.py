"""The language codes that a model needs for a direction, as fields of SearchOptions."""

import dataclasses
from collections.abc import Sequence

from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.translation.search.options import SearchOptions

Codes = tuple[str | None, str | None]  # codes of the source language and of the target language


def codes_for(tokenizer: Tokenizer, source: str | None, target: str | None) -> Codes:
    """Returns the codes of a direction that a model with this tokenizer needs.

    A model without language tokens needs no code. A model with tokens such as >>de<< needs only the target language.
    """
    if not tokenizer.languages:
        return None, None
    return None if tokenizer.has_target_languages_only else source, target


def in_language(search: SearchOptions, tokenizer: Tokenizer, models: Sequence[Architecture]) -> SearchOptions:
    """Returns the options `search`. If all `models` are language models, sets the language codes that they need.

    If `models` is empty, the tokenizer belongs to a translation model. For language models, `source_lang` of the result
    is the code of the target language, too. If the tokenizer has tokens of target languages only, `source_lang` stays
    None, and `target_lang` may be missing. Raises ValueError if a source language is given for language models, or if
    the target language is missing for language models with other language tokens.
    """
    if not models or any(model.reads_source for model in models):
        return search
    if search.source_lang is not None:
        raise ValueError(f"--source-lang {search.source_lang} has no effect: a language model reads no source")
    if not tokenizer.languages:
        return search
    if tokenizer.has_target_languages_only:
        # the token begins the source, which a language model does not read, so any language works
        return dataclasses.replace(search, target_lang=search.target_lang or next(iter(tokenizer.languages)))
    if search.target_lang is None:
        known = ", ".join(sorted(tokenizer.languages))
        raise ValueError(f"the language model has several languages; give --target-lang, one of {known}")
    return dataclasses.replace(search, source_lang=search.target_lang)
