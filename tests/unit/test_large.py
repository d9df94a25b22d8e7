"""Large bodies: one at a time, no more tokens than are of use, memory given back."""

from __future__ import annotations

import asyncio

import pytest

from support.awake import within
from tokenwire.frontend import large as module
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.large import (
    LARGE_BODY_BYTES,
    MAX_MEDIUM,
    MEDIUM_BODY_BYTES,
    PIECE_CHARS,
    Large,
    check_length,
    trim_heap,
)


@pytest.mark.parametrize(("text", "sees"), [("a" * PIECE_CHARS, 2), ("\xe9" * 99, 0)])
def test_a_text_far_too_long_is_refused_by_its_beginning(text: str, sees: int) -> None:
    """No more tokens are made than show it: of 100 pieces two."""
    seen: list[int] = []

    def count(piece: str) -> int:
        seen.append(len(piece))
        return len(piece)

    limit = len(text)
    if not sees:  # as long as it may be
        check_length(text, limit, count)
    else:
        with pytest.raises(ApiError, match=f"length is {limit // 2} tokens") as caught:
            check_length(text * 100, limit // 2, count)
        assert caught.value.code == "context_length_exceeded"

    assert seen == [PIECE_CHARS] * sees


def test_a_long_text_of_few_tokens_passes() -> None:
    """Characters say nothing for certain: its tokens count."""
    check_length("a" * PIECE_CHARS * 4, 100, lambda piece: len(piece) // PIECE_CHARS)


def test_what_need_not_fit_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """``/tokenize`` takes texts longer than the context, but not any."""
    monkeypatch.setattr(module, "MAX_TOKENS", 10)

    check_length("a" * 40, None, len)
    with pytest.raises(ApiError, match="may have 10 tokens"):
        check_length("a" * 41, None, len)


async def test_one_large_body_is_prepared_at_a_time() -> None:
    """What the second would take, the first has given back; small ones do not wait."""
    large = Large()
    second = asyncio.Event()

    async def other() -> None:
        async with large.preparing(LARGE_BODY_BYTES + 1):
            second.set()

    async with large.preparing(LARGE_BODY_BYTES + 1):
        task = asyncio.create_task(other())
        for num_bytes in (0, MEDIUM_BODY_BYTES, LARGE_BODY_BYTES):
            async with within(10), large.preparing(num_bytes):
                pass
        assert not second.is_set()
    async with within(10):
        await task

    assert second.is_set()


async def test_some_medium_bodies_are_prepared_at_a_time() -> None:
    """As many as there are turns; the next one waits for any of them."""
    large = Large()
    turns = [large.preparing(MEDIUM_BODY_BYTES + 1) for _ in range(MAX_MEDIUM + 1)]
    for turn in turns[:-1]:
        await turn.__aenter__()
    last = asyncio.ensure_future(turns[-1].__aenter__())
    await asyncio.sleep(0)
    assert not last.done()

    await turns[0].__aexit__(None, None, None)

    async with within(10):
        await last


async def test_memory_is_given_back_once_after_large_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For all that were there within a while together; small ones are not worth it."""
    monkeypatch.setattr(module, "GIVE_BACK_S", 0)
    loop = asyncio.get_running_loop()
    given_back = asyncio.Queue[None]()

    def give_back() -> None:
        loop.call_soon_threadsafe(given_back.put_nowait, None)

    large = Large(give_back)

    large.is_over(LARGE_BODY_BYTES)
    for _ in range(3):
        large.is_over(LARGE_BODY_BYTES + 1)
    async with within(10):
        await given_back.get()
    assert given_back.empty()
    large.is_over(LARGE_BODY_BYTES + 1)  # and again for later ones
    async with within(10):
        await given_back.get()


def test_the_heap_can_be_trimmed_here() -> None:
    """The C library has what is asked for, and takes the call."""
    trim_heap()
