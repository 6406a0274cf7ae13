"""API keys: the file, quotas for periods of a clock that the test sets, and counts that outlive the server."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from nmtkit.serving.door import refusal_of
from nmtkit.serving.keys import ApiKey, Quota, QuotaExceeded, Usage, found, longest_quota, read_api_keys

KEY = ApiKey("a", (Quota("requests", 2, "minute"), Quota("characters", 10, "day"), Quota("characters", 15, "month")))


class Clock:
    def __init__(self, text: str) -> None:
        self.set(text)

    def set(self, text: str) -> None:
        self.time = datetime.fromisoformat(text).replace(tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time


def test_a_line_is_a_key_with_its_settings(tmp_path: Path) -> None:
    lines = "# of the team\r\nplain\r\n\r\nlimited requests=100/minute\tcharacters=5000/month\r\nold account=office\r\n"
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"new account=office characters=7/day")
    keys = read_api_keys(tmp_path / "keys")
    assert len(keys) == 4 and not any(b"plain" in digest for digest in keys)
    plain, limited, old, new = (found(keys, key) for key in (b"plain", b"limited", b"old", b"new"))
    assert plain is not None and plain.quotas == () and plain.account not in ("", "office")
    assert limited is not None and {(each.unit, each.limit, each.period) for each in limited.quotas} == {
        ("requests", 100, "minute"), ("characters", 5000, "month"),
    }  # fmt: skip
    assert old is not None and new is not None and old.account == new.account == "office"
    assert (old.quotas, len(new.quotas)) == ((), 1)
    for wrong in (b"", b"plai", b"plain ", b"# of the team", b"limited requests=100/minute", b"office"):
        assert found(keys, wrong) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("\n# none\n", "no API key"),
        ("ok\nsecret-key requests=5\n", ":2:"),
        ("secret-key requests=0/day\n", ":1:"),
        ("secret-key characters=5/year\n", ":1:"),
        ("ok\nsecret-key and another\n", ":2:"),
        ("secret-key\nok\nsecret-key requests=5/day\n", ":3:"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_line_but_no_key(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=named) as error:
        read_api_keys(tmp_path / "keys")
    assert "secret-key" not in str(error.value) and "another" not in str(error.value)


def test_quotas_renew_with_their_minute_day_and_month() -> None:
    clock = Clock("2026-12-30T23:58:20")
    usage = Usage(now=clock)
    usage.count(KEY, requests=2)
    with pytest.raises(QuotaExceeded) as error:
        usage.count(KEY, requests=1)
    assert (error.value.period, error.value.seconds) == ("minute", 40)
    clock.set("2026-12-30T23:59:00")
    usage.count(KEY, requests=1, characters=10)
    with pytest.raises(QuotaExceeded) as error:
        usage.check(KEY, characters=1)
    assert (error.value.period, error.value.seconds) == ("day", 60)
    clock.set("2026-12-31T12:00:00")
    counted = usage.count(KEY, characters=5)
    with pytest.raises(QuotaExceeded) as error:
        usage.count(KEY, characters=1)
    assert (error.value.period, error.value.seconds) == ("month", 12 * 3600)
    usage.take_back(counted, 2)
    usage.count(KEY, characters=2)
    clock.set("2027-01-01T00:00:00")
    usage.count(KEY, characters=10)
    assert usage.counts(KEY)["month"].characters == 10


@pytest.mark.parametrize(
    ("time", "days"), [("2027-01-31T00:00:00", 1), ("2028-02-01T00:00:00", 29), ("2027-12-01T00:00:00", 31)]
)
def test_months_have_their_lengths(time: str, days: int) -> None:
    assert Usage(now=Clock(time)).seconds_left("month") == days * 86_400


def test_a_refused_request_counts_nothing() -> None:
    usage = Usage(now=Clock("2026-11-26T00:00:00"))
    usage.count(KEY, characters=8)
    with pytest.raises(QuotaExceeded):
        usage.count(KEY, requests=1, characters=3)
    assert [usage.counts(KEY)["day"].requests, usage.counts(KEY)["day"].characters] == [0, 8]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_the_quotas_in_the_file_does_not_matter(order: tuple[int, ...]) -> None:
    quotas = Quota("characters", 10, "minute"), Quota("characters", 10, "day"), Quota("requests", 1, "minute")
    key = ApiKey("a", tuple(quotas[index] for index in order))
    with pytest.raises(QuotaExceeded) as error:
        Usage(now=Clock("2026-12-30T12:00:00")).check(key, requests=2, characters=11)
    assert (error.value.period, error.value.seconds) == ("day", 12 * 3600)
    assert longest_quota(key) == ("day", 10)


def test_the_lowest_quota_of_the_longest_period_is_shown() -> None:
    quotas = [Quota("characters", limit, "month") for limit in (30, 20, 40)]
    assert longest_quota(ApiKey("a", (Quota("characters", 5, "day"), *quotas))) == ("month", 20)
    assert longest_quota(ApiKey("a", (Quota("requests", 5, "day"),))) == ("month", None)


def test_a_failed_request_gives_back_nothing_to_a_later_period() -> None:
    clock = Clock("2026-12-31T23:59:50")
    usage = Usage(now=clock)
    counted = usage.count(KEY, characters=8)
    clock.set("2027-01-01T00:00:10")
    usage.count(KEY, characters=9)
    usage.take_back(counted, 8)
    assert {period: counts.characters for period, counts in usage.counts(KEY).items()} == dict.fromkeys(
        ("minute", "day", "month"), 9
    )


def test_keys_of_an_account_share_its_counts() -> None:
    usage = Usage(now=Clock("2026-11-26T00:00:00"))
    usage.count(KEY, characters=10)
    with pytest.raises(QuotaExceeded):
        usage.count(ApiKey("a", (Quota("characters", 10, "day"),)), characters=1)
    usage.count(ApiKey("b", (Quota("characters", 10, "day"),)), characters=1)


def test_counts_outlive_the_server_and_last_months_accounts_do_not(tmp_path: Path) -> None:
    clock, path = Clock("2026-11-30T10:00:00"), tmp_path / "usage.json"
    usage = Usage(path, clock)
    assert usage.unsaved() is None
    usage.count(KEY, characters=10)
    usage.count(ApiKey("b"), characters=3)
    contents = usage.unsaved()
    assert contents is not None and usage.unsaved() is None
    usage.save(contents)
    again = Usage(path, clock)
    with pytest.raises(QuotaExceeded):
        again.count(KEY, characters=1)
    clock.set("2026-12-01T00:00:00")
    again.count(KEY, characters=1)
    contents = again.unsaved()
    assert contents is not None
    again.save(contents)
    assert list(Usage(path, clock).accounts) == ["a"]


def test_counts_that_could_not_be_saved_are_saved_later(tmp_path: Path) -> None:
    usage = Usage(tmp_path / "missing" / "usage.json")
    usage.count(KEY, characters=1)
    contents = usage.unsaved()
    assert contents is not None
    with pytest.raises(OSError, match="missing"):
        usage.save(contents)
    assert usage.unsaved() == contents


@pytest.mark.parametrize("text", ["", "[]", '{"a": {}}', '{"a": {"minute": 1}}'])
def test_a_damaged_file_of_counts_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "usage.json").write_text(text)
    with pytest.raises(ValueError, match=r"usage\.json"):
        Usage(tmp_path / "usage.json")


def test_a_request_larger_than_a_whole_quota_is_413_because_no_time_helps() -> None:
    key = ApiKey("a", (Quota("characters", 10, "minute"), Quota("characters", 30, "day")))
    usage = Usage(now=Clock("2026-12-30T12:00:00"))
    usage.count(key, characters=10)
    found = []
    for characters in (1, 11, 21, 31):
        with pytest.raises(QuotaExceeded) as error:
            usage.check(key, characters=characters)
        answer = refusal_of(error.value, deepl=False)
        found.append((answer.status, bool(answer.headers), str(characters) in re.findall(r"\d+", answer.message)))
    assert found == [(429, True, False), (413, False, True), (413, False, True), (413, False, True)]
