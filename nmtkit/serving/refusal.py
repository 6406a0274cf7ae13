"""The error that becomes the answer to a request."""

from collections.abc import Mapping

RETRY = {"Retry-After": "2"}  # header of answers with status 429


class Refusal(Exception):  # noqa: N818  # an answer to the client, not an error of this program
    """An error that becomes the answer to a request, with the HTTP status `status`. The message is for the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        # a worker sends the pickled error to the server; unpickling needs all arguments
        super().__init__(status, message, headers)
        self.status, self.message, self.headers = status, message, dict(headers or {})

    def __str__(self) -> str:
        return self.message
