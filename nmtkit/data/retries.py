"""Decides whether a failed HTTP request is sent again, and how long to wait before the next attempt."""

from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAY_PASS = (408, 409, 425, 429)  # statuses, besides 5xx, after which the same request may succeed later
LONGEST_WAIT = 600.0  # longest wait in seconds before another attempt, even if the server asks for a longer wait
LONGEST_STEP = 120.0  # longest wait in seconds if the server does not ask for a longer wait


def may_pass(status: int) -> bool:
    """Returns whether a request that failed with this HTTP status may succeed later."""
    return status in MAY_PASS or status >= 500


def asked_wait(retry_after: str | None) -> float:
    """Returns the seconds to wait according to the header Retry-After (RFC 9110, section 10.2.3).

    The value of the header is a number of seconds or a date. Returns 0 without the header, and for other values.
    """
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    return 0.0


def wait_after(failures: int, *, asked: float = 0.0) -> float:
    """Returns the seconds between a failed request and its repetition.

    `failures` is the number of failed attempts so far. The wait is 1, 2, 4, … up to LONGEST_STEP seconds. If the server
    asks for a longer wait (`asked`), the wait is as long as the server asks, up to LONGEST_WAIT seconds.
    """
    return min(LONGEST_WAIT, max(asked, min(LONGEST_STEP, 2.0 ** (failures - 1))))
