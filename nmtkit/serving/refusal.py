"""The error that becomes the answer to a request."""

from collections.abc import Mapping

RETRY = {"Retry-After": "2"}  # header of answers with status 429


class Refusal(Exception):  # noqa: N818  # an answer to the client, not an error of this program
    """An error that becomes the answer to a request, with this status. The message is for the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers)  # a worker sends the error to the server, which needs all arguments
        self.status, self.message, self.headers = status, message, dict(headers or {})

    def __str__(self) -> str:
        return self.message
