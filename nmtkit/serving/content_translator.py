"""Translates texts and documents of requests with the workers, and finds their languages."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from nmtkit.serving import reading
from nmtkit.serving.door import Door
from nmtkit.serving.fair_queue import BatchKey, LineResult, Pair
from nmtkit.serving.interface import DetectedLanguage
from nmtkit.serving.keys import ApiKey
from nmtkit.serving.languages import Detector, described, detector_of, served_code
from nmtkit.serving.pool import Pool
from nmtkit.serving.reading import Content, PlainText
from nmtkit.serving.refusal import Refusal
from nmtkit.text.languages import subtags

FILE_SECONDS = 600  # lifetime of a translated file
FILES_BYTES = 64 * 2**20  # maximum bytes of all translated files together
SAME_LANGUAGE = 90.0  # percent; a text that is in the target language with at least this confidence is not translated


class KeptFile(NamedTuple):
    expiry: float  # time of `time.monotonic`
    extension: str
    data: bytes


class KeptFiles:
    """Translated files by their token, in memory for a short time."""

    def __init__(self) -> None:
        self.files: dict[str, KeptFile] = {}

    def keep(self, token: str, extension: str, data: bytes) -> None:
        """Keeps a file. Removes expired files, then the oldest files while all files exceed FILES_BYTES together."""
        now = time.monotonic()
        self.files = {token: file for token, file in self.files.items() if file.expiry > now}
        while self.files and sum(len(file.data) for file in self.files.values()) + len(data) > FILES_BYTES:
            del self.files[next(iter(self.files))]
        self.files[token] = KeptFile(now + FILE_SECONDS, extension, data)

    def get(self, token: str) -> KeptFile | None:
        """Returns a file, or None if it does not exist or has expired."""
        file = self.files.get(token)
        return file if file is not None and file.expiry > time.monotonic() else None

    def remove(self, token: str) -> None:
        self.files.pop(token, None)


@dataclass(frozen=True)
class UploadedFile:
    extension: str
    content: Content
    pair: Pair
    warnings: list[str]  # for the client; rendering the translated file may add warnings


class ContentTranslator:
    """Translates the contents of requests with the workers. The routes of all interfaces use this class."""

    def __init__(self, door: Door, pool: Pool) -> None:
        self.door, self.pool, self.threads = door, pool, door.threads
        self.files = KeptFiles()

    async def translations(
        self, key: ApiKey, pieces: Sequence[Content], pairs: Sequence[Pair], settings: BatchKey
    ) -> list[list[LineResult]]:
        """Returns a list of results for each piece (a text or document): first the translation, then the alternatives.

        `pairs` has the language pair of each piece. A piece whose two languages are equal is not translated.

        Raises Refusal if the pieces together exceed --char-limit or --batch-limit, and QuotaExceeded if they exceed a
        quota of the API key. The characters count only if the translation succeeds, or if the client has disconnected.
        """
        characters = sum(len(piece.text) for piece in pieces)
        self.door.check_size(sum(len(piece.segments) for piece in pieces), characters)
        counted = self.door.usage.count(key, characters=characters)
        try:
            return await self._translated(pieces, pairs, settings)
        except BaseException as error:
            if error.args != (reading.DISCONNECTED,):
                self.door.usage.take_back(counted, characters)
            raise

    async def _translated(
        self, pieces: Sequence[Content], pairs: Sequence[Pair], settings: BatchKey
    ) -> list[list[LineResult]]:
        translated: dict[Pair, Iterator[list[LineResult]]] = {}  # for each pair: the results of all its lines
        for pair in dict.fromkeys(pairs):
            of_pair = [piece for piece, other in zip(pieces, pairs, strict=True) if other == pair]
            lines = [line for piece in of_pair for line in piece.segments]
            if pair[0] == pair[1]:
                translated[pair] = iter([[reading.unchanged(line)] for line in lines])
                continue
            of_lines = await self.pool.translate(replace(settings, pair=pair), lines)
            translated[pair] = iter(of_lines)
            self.door.metrics.count(pair, of_lines, sum(len(piece.text) for piece in of_pair))
        results = []
        for piece, pair in zip(pieces, pairs, strict=True):
            of_lines = [next(translated[pair]) for _ in piece.segments]
            ranks = range(max(map(len, of_lines), default=1))  # a line that is copied has no alternatives
            by_rank = [[line[min(rank, len(line) - 1)] for line in of_lines] for rank in ranks]
            length = len(piece.text)
            results.append([await self.threads.run(length, reading.rendered, piece, lines) for lines in by_rank])
            results[-1][0]["quality"] = [line[0]["quality"] for line in of_lines if "quality" in line[0]]
        return results

    # --- files --------------------------------------------------------------------------------------------------------

    async def read_file(self, file: Any, source: str, target: str, name: str | None = None) -> UploadedFile:
        """Reads an uploaded file. `name` replaces the file's name. Raises Refusal for a wrong file or language."""
        extension, data = await reading.upload(file, self.door.config.char_limit, name)
        target = self.served_target(target)
        warnings: list[str] = []
        read = partial(reading.content_of, extension, data, source=source, target=target, warn=warnings.append)
        content = await self.threads.run(len(data), read)
        (pair,), _ = await self.pairs_of(source, target, [content])
        return UploadedFile(extension, content, pair, warnings)

    async def translated_file(self, key: ApiKey, file: UploadedFile, settings: BatchKey) -> tuple[bytes, list[str]]:
        """Returns the translation of an uploaded file, and warnings. Raises the errors of `translations`."""
        content = file.content
        settings = replace(settings, html=not isinstance(content, PlainText), protect=content.protects)
        ((best, *_),) = await self.translations(key, [content], [file.pair], settings)
        data = await self.threads.run(len(content.text), content.encoded, best["text"])
        return data, file.warnings

    # --- languages ----------------------------------------------------------------------------------------------------

    async def pairs_of(
        self, source: str, target: str, pieces: Sequence[Content]
    ) -> tuple[list[Pair], list[DetectedLanguage] | None]:
        """Returns the language pair of each text, and a list with the detected language of each text.

        The list is None unless `source` is `auto`. With `auto`, a text that is in the target language with at least
        SAME_LANGUAGE percent gets a pair of two equal languages. The detector reads the text without markup, because
        names and addresses in tags are often English.

        Codes may differ from the served codes in case, and in `-` or `_`. For example, pt-BR from Weblate selects
        pt_BR. Raises Refusal for languages that are not served.
        """
        target = self.served_target(target)
        if source.lower() != "auto":
            pair = served_code(source, (source for source, _ in self.pool.pairs)), target
            self.check_pair(pair)
            return [pair] * len(pieces), None
        sources = [source for source, other in self.pool.pairs if other == target]
        if self.detector is None or not sources:
            self.check_pair(("auto", target))

        def code_of(language: str) -> str:
            """Returns the code that the pairs into `target` use for a language. The detector ignores regions."""
            codes = [language] if language in (*sources, target) else [*sources, target]
            return next((code for code in codes if subtags(code)[0] == subtags(language)[0]), language)

        def detected(piece: Content) -> DetectedLanguage:
            languages = self.detected([reading.without_markup(piece)])
            for each in languages:
                each["language"] = code_of(each["language"])
            if languages[0]["language"] == target and languages[0]["confidence"] >= SAME_LANGUAGE:
                return languages[0]
            listed = next((language for language in languages if language["language"] in sources), None)
            return listed or DetectedLanguage(language=sources[0], confidence=0.0)

        length = sum(len(piece.text) for piece in pieces)
        languages = await self.threads.run(length, lambda: list(map(detected, pieces)))
        return [(language["language"], target) for language in languages], languages

    def served_target(self, code: str) -> str:
        """Returns the served target language of a code, or the code itself if it is not served."""
        return served_code(code, (target for _, target in self.pool.pairs))

    def check_pair(self, pair: Pair) -> None:
        """Raises Refusal if no served model translates the pair."""
        pairs = self.pool.pairs
        if pair in pairs:
            return
        known = described(pairs)
        if pair[0] == "auto" and self.detector is None:
            raise Refusal(400, f"source auto needs a language detector, which is not installed; served: {known}")
        for code, side in zip(pair, (0, 1), strict=True):
            if code != "auto" and code not in {languages[side] for languages in pairs}:
                raise Refusal(400, f"{code[:40]} is not supported; served: {known}")
        raise Refusal(400, f"{pair[1]} is not available as a target language from {pair[0]}; served: {known}")

    def detected(self, texts: Sequence[str]) -> list[DetectedLanguage]:
        """Detects the common language of `texts`. Returns the languages that the server translates, most likely first.

        Each language has a confidence from 0 to 100. If no language is found, as in texts without letters, the answer
        is the source language of the first pair, with confidence 0, as in LibreTranslate. Raises Refusal 501 if no
        detector is installed.
        """
        detector = self.detector
        if detector is None:
            raise Refusal(501, "no language detector is installed: pip install 'nmtkit[detect]'")
        languages = detector.detect(texts) or [(self.pool.pairs[0][0], 0.0)]
        return [DetectedLanguage(confidence=confidence, language=code) for code, confidence in languages]

    @property
    def detector(self) -> Detector | None:
        return detector_of(frozenset(code for pair in self.pool.pairs for code in pair))
