"""What API keys may use, and the memory in which several processes count it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.ledger import MAX_OWED_NS, MINUTE_NS, SLOTS, Ledger
from tokenwire.frontend.quotas import Quotas
from tokenwire.protocol.api_keys import ApiKey, KeyLimits

SECOND = 10**9


def key(name: str = "a", **limits: int) -> ApiKey:
    """Return a key with these limits."""
    return ApiKey(name, b"", KeyLimits(**limits))


@dataclass
class Desk:
    """Quotas whose clock stands still unless it is moved."""

    ledger: Ledger
    now: int = 1000 * SECOND
    counted: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    used: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])

    def __post_init__(self) -> None:
        self.quotas = Quotas(
            self.ledger,
            lambda name, limit: self.counted.append((name, limit)),
            lambda name, kind, number: self.used.append((name, kind, number)),
            lambda: self.now,
        )

    def refusal(self, asking: ApiKey) -> ApiError:
        """Return the error that a request is answered with."""
        with pytest.raises(ApiError) as caught:
            self.quotas.enter(asking)
        assert caught.value.status == 429
        return caught.value


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger for two processes, seen from the first."""
    made = Ledger.create(2)
    yield made
    made.close()


@pytest.fixture
def desk(ledger: Ledger) -> Desk:
    """Quotas of the first process."""
    return Desk(ledger)


def test_a_minutes_worth_of_requests_and_then_one_at_a_time(desk: Desk) -> None:
    """A burst of all of them is taken; then each second brings one."""
    asking = key(requests_per_minute=60)
    for _ in range(60):
        desk.quotas.enter(asking)
    error = desk.refusal(asking)
    assert error.headers["Retry-After"] == "1"
    assert (error.code, error.kind) == ("rate_limit_exceeded", "rate_limit_error")
    desk.now += SECOND
    desk.quotas.enter(asking)
    desk.refusal(asking)
    assert desk.counted == [("a", "requests")] * 2
    desk.now += MINUTE_NS
    assert desk.quotas.headers(asking) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0.000s",
    }


def test_keys_without_limits_are_counted_and_never_refused(desk: Desk) -> None:
    """Their tokens are told, and they get no headers."""
    asking = key()
    for _ in range(1_000):
        desk.quotas.enter(asking).prompt(10**9)
    grant = desk.quotas.enter(asking)
    grant.output(10**9, 10**9, 10**9)
    assert desk.quotas.headers(asking) == {}
    assert desk.used == [("a", "prompt", 10**9), ("a", "generation", 10**9)]


def test_a_request_is_counted_once_whatever_becomes_of_it(desk: Desk) -> None:
    """Also one that is let in, and refused when its prompt is known."""
    asking = key(tokens_per_minute=600, requests_per_minute=3)
    served = desk.quotas.enter(asking)
    served.prompt(500)
    assert desk.counted == []  # it is not over
    desk.quotas.leave(served)
    refused = desk.quotas.enter(asking)
    with pytest.raises(ApiError):
        refused.prompt(500)
    desk.quotas.leave(refused)
    desk.quotas.leave(desk.quotas.enter(asking))
    desk.refusal(asking)
    outcomes = [outcome for _, outcome in desk.counted]
    assert outcomes == ["ok", "tokens", "ok", "requests"]


def test_tokens_are_paid_for_by_prompt_and_by_output(desk: Desk) -> None:
    """An output may be worth more than is left; the requests behind it wait for that."""
    asking = key(tokens_per_minute=600)
    grant = desk.quotas.enter(asking)
    grant.prompt(500)
    grant.output(500, 700, 0)
    assert desk.refusal(asking).headers["Retry-After"] == "61"  # 600 owed, and one more
    assert desk.quotas.headers(asking)["x-ratelimit-remaining-tokens"] == "0"
    desk.now += 61 * SECOND
    grant = desk.quotas.enter(asking)
    with pytest.raises(ApiError) as caught:
        grant.prompt(100)
    assert caught.value.headers["Retry-After"] == "9"
    assert desk.quotas.headers(asking)["x-ratelimit-reset-tokens"] == "59.000s"
    desk.now += 9 * SECOND
    desk.quotas.enter(asking).prompt(100)


def test_a_prompt_above_the_limit_takes_a_whole_minute(desk: Desk) -> None:
    """It is not refused for ever: it is let in when nothing is owed."""
    asking = key(tokens_per_minute=600)
    desk.quotas.enter(asking).prompt(10_000)
    assert int(desk.refusal(asking).headers["Retry-After"]) > 900


def test_what_is_owed_has_a_bound(desk: Desk) -> None:
    """A day, so that its number has room and a mistake does not ban a key."""
    asking = key(tokens_per_minute=1)
    for _ in range(3):
        desk.quotas.settle(asking, 0, 10**12, 0)
    wait_s = int(desk.refusal(asking).headers["Retry-After"])
    assert wait_s == MAX_OWED_NS // SECOND


def test_a_prompt_that_is_turned_away_is_given_back(desk: Desk) -> None:
    """As a full queue does it."""
    asking = key(tokens_per_minute=600)
    grant = desk.quotas.enter(asking)
    grant.prompt(500)
    grant.give_back(500)
    assert desk.quotas.headers(asking)["x-ratelimit-remaining-tokens"] == "600"
    assert desk.used == []


def test_a_generation_that_is_let_go_is_paid_for(desk: Desk) -> None:
    """What may still come, with nobody there to count it."""
    asking = key(tokens_per_minute=600)
    grant = desk.quotas.enter(asking)
    grant.prompt(10)
    grant.output(10, 5, 585)
    desk.refusal(asking)
    assert desk.used == [("a", "prompt", 10), ("a", "generation", 5)]


def test_requests_at_once_have_a_bound(desk: Desk) -> None:
    """Whoever ends makes room; what frees is not counted."""
    asking = key(concurrency=2)
    grants = [desk.quotas.enter(asking) for _ in range(2)]
    error = desk.refusal(asking)
    assert error.code == "concurrency_limit_exceeded"
    assert error.headers["Retry-After"] == "1"
    freeing = desk.quotas.enter(asking, is_counted=False)
    desk.quotas.leave(freeing)
    desk.refusal(asking)
    desk.quotas.leave(grants[0])
    desk.quotas.enter(asking)
    concurrency, ok = ("a", "concurrency"), ("a", "ok")
    assert desk.counted == [concurrency, ok, concurrency, ok]


def test_a_refused_request_takes_nothing(desk: Desk) -> None:
    """Else a client that hurries would never get in."""
    asking = key(requests_per_minute=2, concurrency=1)
    grant = desk.quotas.enter(asking)
    for _ in range(10):
        desk.refusal(asking)
    desk.quotas.leave(grant)
    desk.quotas.enter(asking)


def test_processes_share_the_limits(desk: Desk, ledger: Ledger) -> None:
    """What one takes is not there for the other, which may also begin later."""
    other = Desk(Ledger(ledger.fd, 2, 1))
    asking, another = key(requests_per_minute=2, concurrency=2), key("b", concurrency=1)
    desk.quotas.enter(asking)
    other.quotas.enter(asking)
    assert desk.refusal(asking).code == "rate_limit_exceeded"
    desk.now = other.now = desk.now + MINUTE_NS
    assert desk.refusal(asking).code == "concurrency_limit_exceeded"
    other.quotas.enter(another)


def test_what_died_with_a_process_counts_no_more(desk: Desk, ledger: Ledger) -> None:
    """Its requests at once do not; the rates it has used do."""
    other = Desk(Ledger(ledger.fd, 2, 1))
    asking = key(requests_per_minute=2, concurrency=2)
    desk.quotas.enter(asking)
    other.quotas.enter(asking)
    ledger.leave(1)
    assert ledger.running("a") == 1
    assert desk.refusal(asking).code == "rate_limit_exceeded"


def test_names_beyond_the_slots_share(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """Names come and go with the file; none of them is without its limits."""
    for number in range(SLOTS):
        ledger.run(f"n{number}", 1)
    assert {ledger.running(f"n{number}") for number in range(SLOTS)} == {1}
    assert not caplog.records
    for _ in range(2):
        ledger.run("more", 1)
    assert ledger.running("more") == 3
    [record] = caplog.records
    assert "more shares its limits" in record.getMessage()
