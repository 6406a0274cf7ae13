"""The fields of requests to DeepL's routes. The server refuses `Unsupported` fields, and ignores unknown fields."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from nmtkit.serving.interface import Code, RequestFields, Text, TextOrTexts

MAX_TAG_NAMES = 1000  # maximum number of names in a list of tags


def _tag_names(value: Any) -> Any:
    """Returns a list of names. In a form, the names are one text, separated by commas."""
    texts = value if isinstance(value, list) else [value]
    if all(isinstance(text, str) for text in texts):
        value = texts = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if len(texts) > MAX_TAG_NAMES:
        raise ValueError(f"a list of tags has at most {MAX_TAG_NAMES} names")
    return value


def _refuse(value: Any) -> None:
    if value not in (None, [], ""):
        raise ValueError("this server does not support this parameter")


TagNames = Annotated[list[Text], BeforeValidator(_tag_names)]
# type of a field that the server refuses unless the value is empty
Unsupported = Annotated[None, BeforeValidator(_refuse)]
Formality = Literal["default", "more", "less", "prefer_more", "prefer_less"]


class NoFields(RequestFields):
    counts = ()


class LanguagesFields(NoFields):
    type: Literal["source", "target"] = "source"


class TranslationFields(RequestFields):
    """The common fields of requests that translate texts and of requests that translate documents."""

    source_lang: Code | None = None
    target_lang: Code
    formality: Formality = "default"
    glossary_id: Code | None = None

    glossary_ids: Unsupported = None
    style_id: Unsupported = None
    translation_memory_id: Unsupported = None
    custom_instructions: Unsupported = None


class TranslateTextFields(TranslationFields):
    """Fields of /v2/translate.

    The server ignores `context`, `model_type`, `preserve_formatting` and `tag_handling_version`.
    """

    texts_field = "text"

    text: TextOrTexts
    split_sentences: Annotated[Literal["0", "1", "nonewlines"], BeforeValidator(str)] = "1"
    show_billed_characters: bool = False
    tag_handling: Literal["html", "xml"] | None = None
    outline_detection: bool = True
    non_splitting_tags: TagNames = Field(default_factory=list)
    splitting_tags: TagNames = Field(default_factory=list)
    ignore_tags: TagNames = Field(default_factory=list)


class TranslateDocumentFields(TranslationFields):
    file: Any
    filename: Text | None = None
    output_format: Text | None = None


class DocumentKeyFields(NoFields):
    document_key: Code


# --- glossaries -------------------------------------------------------------------------------------------------------


class DictionaryFields(BaseModel):
    """The terms of a glossary for a language pair. A line of `entries` is a source term, a separator, a target term."""

    model_config = ConfigDict(frozen=True)

    source_lang: Code
    target_lang: Code
    entries: Text
    entries_format: Literal["tsv", "csv"] = "tsv"


class ReplaceDictionaryFields(DictionaryFields, RequestFields):
    counts = ("requests",)
    texts_field = "entries"


class GlossaryFields(ReplaceDictionaryFields):
    """A glossary of /v2/glossaries, which has one language pair."""

    name: Annotated[Text, Field(min_length=1, max_length=1024)]


class MultilingualGlossaryFields(RequestFields):
    """A new glossary of /v3/glossaries, or the changes of an existing glossary."""

    counts = ("requests",)

    name: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    dictionaries: list[DictionaryFields] = Field(default_factory=list)

    @classmethod
    def raw_texts(cls, sent: Mapping[str, Any]) -> list[Any]:
        dictionaries = sent.get("dictionaries")
        if not isinstance(dictionaries, list):
            return []
        return [each.get("entries") if isinstance(each, dict) else None for each in dictionaries]


class LanguagePairFields(NoFields):
    """The language pair of a dictionary, in the query string."""

    source_lang: Code
    target_lang: Code
