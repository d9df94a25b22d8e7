"""Who is refused at the handshake, and in which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.handshake import (
    check_card,
    check_hello,
    check_layers,
    check_pair,
)
from tokenwire.protocol.messages import PROTOCOL_VERSION, Card, Hello, Role

CARD = Card(
    protocol_version=PROTOCOL_VERSION,
    worker_id="decode-0",
    incarnation="i",
    role=Role.DECODE,
    model="m",
    max_model_len=2048,
    vocab_size=100,
    block_size=16,
    engine="sim",
    engine_version="1",
    tokenizer_sha256="a" * 64,
    connector="sim",
    connector_compatibility="c1",
)
PREFILL = msgspec.structs.replace(CARD, worker_id="prefill-0", role=Role.PREFILL)


def changed(card: Card, **changes: Any) -> Card:
    """Return *card* with *changes*."""
    return msgspec.structs.replace(card, **changes)


def test_equals_are_accepted() -> None:
    """The same version, model and tokenizer pass on both sides."""
    check_hello(Hello(PROTOCOL_VERSION, "f", "i"))
    check_card(CARD, model="m", tokenizer_sha256="a" * 64)
    check_pair(PREFILL, CARD)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_refused_on_both_sides(version: int) -> None:
    """An older and a newer peer are refused with both numbers and what to do."""
    words = rf"speaks protocol {version}.*speaks {PROTOCOL_VERSION}.*same tokenwire"
    with pytest.raises(Incompatible, match=words):
        check_hello(Hello(version, "f", "i"))
    with pytest.raises(Incompatible, match=words):
        check_card(
            changed(CARD, protocol_version=version), model="m", tokenizer_sha256=""
        )


def test_a_context_without_tokens_is_refused() -> None:
    """It would make every request of the whole pool too long."""
    with pytest.raises(Incompatible, match="worker decode-0 has a context length of 0"):
        check_card(changed(CARD, max_model_len=0), model="m", tokenizer_sha256="")


def test_another_model_is_refused() -> None:
    """The two names stand in the sentence."""
    with pytest.raises(Incompatible, match=r"serves model 'm', .* serves 'other'"):
        check_card(CARD, model="other", tokenizer_sha256="")


def test_another_tokenizer_is_refused() -> None:
    """Ids of another vocabulary never reach an engine."""
    with pytest.raises(Incompatible, match=r"tokenizer aaaaaaaaaaaa.* bbbbbbbbbbbb"):
        check_card(CARD, model="m", tokenizer_sha256="b" * 64)


@pytest.mark.parametrize(("theirs", "ours"), [("", "b" * 64), ("a" * 64, "")])
def test_an_unknown_tokenizer_is_accepted(theirs: str, ours: str) -> None:
    """A side that has no tokenizer.json cannot be compared."""
    check_card(changed(CARD, tokenizer_sha256=theirs), model="m", tokenizer_sha256=ours)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(CARD, CARD), (PREFILL, PREFILL), (CARD, PREFILL)]
)
def test_a_pair_has_its_roles(prefill: Card, decode: Card) -> None:
    """KV goes from a prefill to a decode worker only."""
    with pytest.raises(Incompatible, match="have the roles"):
        check_pair(prefill, decode)


def test_a_pair_has_one_kv_format() -> None:
    """KV of another layout is not handed over."""
    with pytest.raises(Incompatible, match="'c1' against 'c2'"):
        check_pair(PREFILL, changed(CARD, connector_compatibility="c2"))


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_has_connectors(side: int) -> None:
    """Two workers without a connector are no pair, though they are equal."""
    cards = [PREFILL, CARD]
    cards[side] = changed(cards[side], connector="", connector_compatibility="c1")
    words = f"{cards[side].worker_id} has no KV connector"
    with pytest.raises(Incompatible, match=words):
        check_pair(*cards)


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "words"),
    [
        ("2,30", "", "keeps hidden states of layers 2,30 and decode worker"),
        ("", "2", "keeps no hidden states and decode worker"),
        ("2,30", "2,15", "hidden states of layers 2,15: they exchange KV with the"),
    ],
)
def test_other_hidden_states_are_another_kv(
    of_prefill: str, of_decode: str, words: str
) -> None:
    """Beside the KV they are a layer of it: one sentence says which side has which."""
    kept = [int(one) for one in of_prefill.split(",") if one]
    prefill = changed(PREFILL, hidden_state_layers=kept)
    other = [int(one) for one in of_decode.split(",") if one]
    decode = changed(CARD, hidden_state_layers=other)
    for check in (check_layers, check_pair):
        with pytest.raises(Incompatible, match=words):
            check(prefill, decode)
    check_pair(prefill, changed(decode, hidden_state_layers=kept))
