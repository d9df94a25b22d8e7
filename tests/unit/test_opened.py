"""What waits at a worker of what this frontend has sent there."""

from __future__ import annotations

from typing import cast

import pytest

from tokenwire.frontend.opened import OpenRequests
from tokenwire.frontend.reply import Reply
from tokenwire.protocol.errors import SequenceError
from tokenwire.protocol.messages import Batch, Finished, Sampling, Submit, Tokens
from tokenwire.protocol.tokens import pack_ids

REPLY = cast("Reply", None)


def sent(opened: OpenRequests, request_id: str, num_tokens: int, cached: int) -> None:
    """Send a request."""
    submit = Submit(request_id, pack_ids([1] * num_tokens), Sampling(9))
    opened.add(submit, REPLY, cached)


def test_a_prompt_waits_until_its_first_token() -> None:
    """Then it is computed, whether or not the request goes on; it is not taken off twice."""
    opened = OpenRequests()
    sent(opened, "a", 100, 64)
    sent(opened, "b", 50, 80)  # more than it has: an estimate
    assert (opened.num_prompt_tokens, opened.num_uncached_tokens) == (150, 36)
    opened.began("a")
    opened.began("a")
    opened.began("unknown")
    assert (opened.num_prompt_tokens, opened.num_uncached_tokens) == (50, 0)
    opened.forget("a")
    assert (len(opened), opened.num_prompt_tokens) == (1, 50)
    opened.forget("b")
    assert (opened.num_prompt_tokens, opened.num_uncached_tokens) == (0, 0)


def test_the_share_to_be_computed_follows_what_is_sent() -> None:
    """All of it as long as nothing is known; what was long ago counts less."""
    opened = OpenRequests()
    assert opened.uncached_share == 1.0
    sent(opened, "a", 100, 75)
    assert opened.uncached_share == 0.25
    for number in range(60):
        sent(opened, str(number), 50_000, 50_000)
    assert opened.uncached_share == pytest.approx(0.0, abs=0.001)
    for number in range(60, 120):
        sent(opened, str(number), 50_000, 0)
    assert opened.uncached_share > 0.9


class Heard:
    """A reply that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def tokens(self, item: Tokens, end: Finished | None) -> None:
        """Keep tokens."""
        self.heard += [item] if end is None else [item, end]

    def finished(self, end: Finished) -> None:
        """Keep an end."""
        self.heard.append(end)

    def lost(self, reason: str) -> None:
        """Keep a loss."""
        self.heard.append(reason)


def test_another_reply_hears_what_comes_from_then_on() -> None:
    """In its order still; of what is not open nobody hears."""
    opened, first, second = OpenRequests(), Heard(), Heard()
    opened.add(Submit("a", pack_ids([1]), Sampling(9)), first)
    items = [Tokens("a", n, pack_ids([n])) for n in range(3)]
    opened.take(Batch(items[:1]))
    opened.redirect("a", second)
    opened.redirect("b", second)
    opened.take(Batch(items[1:2]))
    with pytest.raises(SequenceError):
        opened.take(Batch(items[1:2]))
    opened.redirect("a", first)
    opened.take(Batch(items[2:]))
    opened.redirect("a", second)
    opened.lose_all("gone")

    assert first.heard == [items[0], items[2]]
    assert second.heard == [items[1], "gone"]
