"""API keys: the keys of a file with their quotas, and the counts of each account.

Each line of the file is a key, optionally followed by settings:

    secret-of-the-website requests=100/minute characters=500000/month
    secret-of-the-office account=office

Keys with the same account share counts and glossaries, so a key can be replaced by another key. A key without the
setting `account` has its own account. Days and months begin at midnight UTC. Saved counts contain the hash of a key,
but never the key.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

from nmtkit.config.files import listed_lines, parse_json, write_atomically

Period = Literal["minute", "day", "month"]
PERIODS: tuple[Period, ...] = get_args(Period)
EXPECTED_SETTINGS = "settings are account=NAME, requests=N/minute, characters=N/month, …; a key has no spaces"

_QUOTA = re.compile(r"(requests|characters)=([1-9][0-9]{0,17})/(minute|day|month)")
_ACCOUNT = re.compile(r"account=([\w.-]{1,100})")


class QuotaExceeded(Exception):  # noqa: N818  # an answer to the client, not an error of this program
    """Raised if a request with `count` units exceeds a quota. `seconds` is the time until the next period.

    If `is_too_large` is true, the request alone exceeds the quota of a whole period, so a repetition never succeeds.
    """

    def __init__(self, quota: "Quota", count: int, seconds: int) -> None:
        self.period, self.seconds, self.is_too_large = quota.period, seconds, count > quota.limit
        fault = f"is smaller than this request ({count})" if self.is_too_large else "is exceeded"
        super().__init__(f"the quota of this key {fault}: {quota.limit} {quota.unit} per {quota.period}")


@dataclass(frozen=True)
class Quota:
    unit: Literal["requests", "characters"]
    limit: int
    period: Period


@dataclass(frozen=True)
class ApiKey:
    """The account and the quotas of a valid key. On a server without keys, all requests have the account ""."""

    account: str = ""
    quotas: tuple[Quota, ...] = ()


@dataclass
class PeriodCounts:
    """Requests and characters of an account in one period, such as the day 2026-11-26."""

    period: str
    requests: int = 0
    characters: int = 0


@dataclass
class Usage:
    """Counts the requests and characters of all accounts, in memory, and in `path` if `path` is not None.

    Raises ValueError if the file exists but does not contain counts.
    """

    path: Path | None = None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    accounts: dict[str, dict[Period, PeriodCounts]] = field(default_factory=dict)
    changed: bool = False

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            for account, periods in parse_json(self.path.read_text(encoding="utf-8")).items():
                self.accounts[account] = {name: PeriodCounts(**periods[name]) for name in PERIODS}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = (
                f"{self.path} does not contain the counts of API keys; restore the file, or remove it to count from 0"
            )
            raise ValueError(message) from error

    def counts(self, key: ApiKey) -> dict[Period, PeriodCounts]:
        """Returns the counts of the account of a key in the current minute, day and month."""
        counts, names = self.accounts.setdefault(key.account, {}), self.period_names()
        for period in PERIODS:
            if period not in counts or counts[period].period != names[period]:
                counts[period] = PeriodCounts(names[period])
        return counts

    def period_names(self) -> dict[Period, str]:
        now = self.now().strftime("%Y-%m-%dT%H:%M")
        return {"minute": now, "day": now[:10], "month": now[:7]}

    def count(self, key: ApiKey, *, requests: int = 0, characters: int = 0) -> list[PeriodCounts]:
        """Adds to the counts of a key, and returns these counts.

        Raises QuotaExceeded, without a change, if a quota would be exceeded.
        """
        self.check(key, requests=requests, characters=characters)
        changed = list(self.counts(key).values())
        for counts in changed:
            counts.requests += requests
            counts.characters += characters
        self.changed = True
        return changed

    def check(self, key: ApiKey, *, requests: int = 0, characters: int = 0) -> None:
        """Raises QuotaExceeded if a request would exceed a quota of the key.

        If a request would exceed several quotas, the error names the quota of the longest period. Quotas that are
        smaller than the request alone take precedence.
        """
        more = {"requests": requests, "characters": characters}
        counts = self.counts(key)
        exceeded = [
            quota
            for quota in key.quotas
            if more[quota.unit] and getattr(counts[quota.period], quota.unit) + more[quota.unit] > quota.limit
        ]
        if exceeded:
            quota = max(exceeded, key=lambda each: (more[each.unit] > each.limit, PERIODS.index(each.period)))
            raise QuotaExceeded(quota, more[quota.unit], self.seconds_left(quota.period))

    def take_back(self, counted: Sequence[PeriodCounts], characters: int) -> None:
        """Subtracts the characters of a failed request from the counts that `count` has returned.

        A period that has begun since then has new counts, which do not change.
        """
        for counts in counted:
            counts.characters -= characters
        self.changed = True

    def seconds_left(self, period: Period) -> int:
        """Returns the number of seconds until the next period begins, rounded up."""
        now = self.now()
        minute = now.replace(second=0, microsecond=0)
        day = minute.replace(hour=0, minute=0)
        ends = {
            "minute": minute + timedelta(minutes=1),
            "day": day + timedelta(days=1),
            "month": (day.replace(day=1) + timedelta(days=32)).replace(day=1),
        }
        return max(1, -int((now - ends[period]).total_seconds() // 1))

    def unsaved(self) -> bytes | None:
        """Returns the counts of this month as contents of the file, or None if all are saved. Forgets past months."""
        if self.path is None or not self.changed:
            return None
        self.changed = False
        month = self.period_names()["month"]
        accounts = self.accounts.items()
        self.accounts = {account: counts for account, counts in accounts if counts["month"].period == month}
        return json.dumps(self.accounts, indent=1, default=asdict).encode()

    def save(self, contents: bytes) -> None:
        """Writes the contents of the file. If this fails, raises OSError, and `unsaved` returns the counts again."""
        assert self.path is not None
        try:
            write_atomically(self.path, contents)
        except OSError:
            self.changed = True
            raise


def longest_quota(key: ApiKey) -> tuple[Period, int | None]:
    """Returns the longest period with a quota of characters, and the lowest limit of this period.

    Without a quota of characters, returns "month" and None.
    """
    limits = [(PERIODS.index(quota.period), -quota.limit) for quota in key.quotas if quota.unit == "characters"]
    if not limits:
        return "month", None
    index, limit = max(limits)
    return PERIODS[index], -limit


Keys = Mapping[bytes, ApiKey]  # SHA-256 of a key -> its account and quotas


def found(keys: Keys, sent: bytes) -> ApiKey | None:
    """Returns the key that a client has sent, or None if no such key exists.

    The time does not depend on the characters of the keys, because only hashes are compared.
    """
    return keys.get(hashlib.sha256(sent).digest())


def read_api_keys(path: Path) -> Keys:
    """Returns the keys of a file. Lines that begin with # are comments.

    Raises ValueError for a file without keys and, with the number of the line, for an unknown setting and a repeated
    key. Messages do not contain keys.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, line in listed_lines(path, "API key").items():
        words = line.split()
        digest = hashlib.sha256(words[0].encode()).digest()
        if digest in keys:
            raise ValueError(f"{path}:{number}: this key is also on a line above; remove one of the lines")
        keys[digest] = _api_key(words[1:], digest.hex()[:32], f"{path}:{number}")
    return keys


def _api_key(settings: Sequence[str], account: str, location: str) -> ApiKey:
    quotas = []
    for number, setting in enumerate(settings, 2):
        if (match := _ACCOUNT.fullmatch(setting)) is not None:
            account = match[1]
        elif (match := _QUOTA.fullmatch(setting)) is not None:
            quotas.append(Quota(match[1], int(match[2]), match[3]))  # type: ignore[arg-type]  # words of _QUOTA
        else:
            raise ValueError(f"{location}: word {number} is not a setting of a key; {EXPECTED_SETTINGS}")
    return ApiKey(account, tuple(quotas))
