"""Where a prompt is computed: the rule, and the estimate of what is cached."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tokenwire.frontend.disaggregation import PrefillPlace, RemotePrefill
from tokenwire.frontend.prefixes import CHUNK_TOKENS, Chain, Prefixes
from tokenwire.protocol.tokens import pack_ids


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "num_queued", "place"),
    [
        (100, 0, 0, PrefillPlace.REMOTE),
        (99, 0, 0, PrefillPlace.SHORT),
        (500, 400, 0, PrefillPlace.REMOTE),
        (500, 401, 0, PrefillPlace.CACHED),
        (500, 500, 0, PrefillPlace.CACHED),
        (500, 0, 1_000, PrefillPlace.REMOTE),
        (500, 0, 1_001, PrefillPlace.QUEUE),
        (500, 0, None, PrefillPlace.NO_WORKER),
        (5, 0, None, PrefillPlace.NO_WORKER),
    ],
)
def test_the_rule(
    num_tokens: int, num_cached: int, num_queued: int | None, place: PrefillPlace
) -> None:
    """Each bound is tight."""
    rule = RemotePrefill(min_uncached_tokens=100, max_queued_tokens=1_000)

    assert (
        rule.place(
            num_tokens=num_tokens,
            num_cached_tokens=num_cached,
            num_queued_tokens=num_queued,
        )
        is place
    )


def test_a_threshold_of_zero_is_always_remote() -> None:
    """Also where all is cached."""
    rule = RemotePrefill(min_uncached_tokens=0)
    place = rule.place(num_tokens=9, num_cached_tokens=9, num_queued_tokens=0)

    assert place is PrefillPlace.REMOTE


def chain(ids: list[int], salt: str | None = None, lora: str = "") -> Chain:
    """Return the chain of *ids*."""
    made = Chain(salt, lora)
    made.extend(pack_ids(ids))
    return made


def test_a_prefix_is_known_by_all_tokens_before_it_and_the_salt() -> None:
    """Equal chunks behind other ones, under another salt or adapter, are others."""
    first, second = [1] * CHUNK_TOKENS, [2] * CHUNK_TOKENS
    prefixes = Prefixes()
    prefixes.add(chain(first + second))

    assert prefixes.num_cached_tokens(chain(first + second)) == 2 * CHUNK_TOKENS
    assert prefixes.num_cached_tokens(chain(first + first)) == CHUNK_TOKENS
    assert prefixes.num_cached_tokens(chain(second + first)) == 0
    assert prefixes.num_cached_tokens(chain(first, salt="tenant")) == 0
    assert prefixes.num_cached_tokens(chain(first, lora="adapter")) == 0
    assert prefixes.num_cached_tokens(chain(first[:-1])) == 0


def test_the_oldest_is_forgotten_from_its_tail() -> None:
    """A head is worth something without its tail, not the other way round."""
    first = chain(list(range(3 * CHUNK_TOKENS)))
    second = chain([7] * 2 * CHUNK_TOKENS)
    prefixes = Prefixes(max_chunks=4)
    prefixes.add(first)
    prefixes.add(second)

    assert len(prefixes) == 4
    assert prefixes.num_cached_tokens(first) == 2 * CHUNK_TOKENS
    assert prefixes.num_cached_tokens(second) == 2 * CHUNK_TOKENS


@given(
    st.lists(st.integers(0, 1), max_size=4 * CHUNK_TOKENS),
    st.lists(st.integers(0, 4 * CHUNK_TOKENS), max_size=5),
)
def test_a_chain_grows_as_its_sequence_does(ids: list[int], cuts: list[int]) -> None:
    """In any pieces, to the same hashes."""
    grown = Chain()
    for cut in [*sorted(cuts), len(ids)]:
        grown.extend(pack_ids(ids[:cut]))

    assert grown.hashes == chain(ids).hashes
