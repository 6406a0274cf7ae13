"""Translated files, which the server keeps in memory for a short time."""

import time
from typing import NamedTuple

FILE_SECONDS = 600  # lifetime of a translated file
FILES_BYTES = 64 * 2**20  # maximum bytes of all translated files together


class KeptFile(NamedTuple):
    expiry: float  # time of `time.monotonic`
    extension: str
    data: bytes


class KeptFiles:
    """Files by their token."""

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
