"""Who may talk to whom: one sentence for each reason to refuse a peer."""

from __future__ import annotations

from .errors import Incompatible
from .messages import PROTOCOL_VERSION, Card, Hello, Role

__all__ = ["check_card", "check_hello", "check_layers", "check_pair"]


def check_hello(hello: Hello) -> None:
    """Accept a frontend, on the worker's side.

    Raises:
        Incompatible: It speaks another version of the protocol.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        msg = (
            f"frontend {hello.frontend_id} speaks protocol {hello.protocol_version}, "
            f"this worker speaks {PROTOCOL_VERSION}: run the same tokenwire release "
            "on both sides"
        )
        raise Incompatible(msg)


def check_card(card: Card, *, model: str, tokenizer_sha256: str) -> None:
    """Accept a worker, on the side of a frontend that serves *model*.

    Raises:
        Incompatible: Another protocol version, model or tokenizer.
    """
    who = f"worker {card.worker_id}"
    if card.protocol_version != PROTOCOL_VERSION:
        msg = (
            f"{who} speaks protocol {card.protocol_version}, this frontend speaks "
            f"{PROTOCOL_VERSION}: run the same tokenwire release on both sides"
        )
        raise Incompatible(msg)
    if not card.max_model_len:
        # The pool's shortest context is what requests are checked against.
        msg = f"{who} has a context length of 0 tokens"
        raise Incompatible(msg)
    if card.model != model:
        msg = f"{who} serves model {card.model!r}, this frontend serves {model!r}"
        raise Incompatible(msg)
    if (
        card.tokenizer_sha256
        and tokenizer_sha256
        and card.tokenizer_sha256 != tokenizer_sha256
    ):
        msg = (
            f"{who} has tokenizer {card.tokenizer_sha256[:12]}, this frontend has "
            f"{tokenizer_sha256[:12]}: point both at the same model revision"
        )
        raise Incompatible(msg)


def check_pair(prefill: Card, decode: Card) -> None:
    """Accept a hand-over of KV from *prefill* to *decode*.

    Raises:
        Incompatible: The two cannot exchange KV.
    """
    pair = f"prefill worker {prefill.worker_id} and decode worker {decode.worker_id}"
    if prefill.role is not Role.PREFILL or decode.role is not Role.DECODE:
        msg = f"{pair} have the roles {prefill.role.value} and {decode.role.value}"
        raise Incompatible(msg)
    for card in (prefill, decode):
        if not card.connector:
            msg = f"{pair} cannot exchange KV: {card.worker_id} has no KV connector"
            raise Incompatible(msg)
    check_layers(prefill, decode)
    if prefill.connector_compatibility != decode.connector_compatibility:
        msg = (
            f"{pair} cannot exchange KV: {prefill.connector_compatibility!r} against "
            f"{decode.connector_compatibility!r}"
        )
        raise Incompatible(msg)


def check_layers(prefill: Card, decode: Card) -> None:
    """Accept the hidden states that two workers keep beside the KV they exchange.

    Raises:
        Incompatible: They differ, so that their KV has another shape.
    """
    if prefill.hidden_state_layers != decode.hidden_state_layers:
        msg = (
            f"prefill worker {prefill.worker_id} keeps {_states(prefill)} and decode "
            f"worker {decode.worker_id} {_states(decode)}: they exchange KV with the same "
            "--capture-layers alone"
        )
        raise Incompatible(msg)


def _states(card: Card) -> str:
    layers = ",".join(map(str, card.hidden_state_layers))
    return f"hidden states of layers {layers}" if layers else "no hidden states"
