"""What can be wrong with a message: you broke the protocol, or they did."""

from __future__ import annotations

__all__ = [
    "Incompatible",
    "LocalProtocolError",
    "MalformedMessage",
    "MessageTooLarge",
    "ProtocolError",
    "RemoteProtocolError",
    "SequenceError",
]


class ProtocolError(Exception):
    """Base class; never raised itself."""


class LocalProtocolError(ProtocolError):
    """This process tried to send what the protocol forbids: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids: count it, log it, drop the link."""


class MalformedMessage(RemoteProtocolError):
    """The bytes are not a message of this protocol; the text names the field."""


class MessageTooLarge(ProtocolError):
    """A message is above its limit; raised before it is sent or decoded."""


class SequenceError(RemoteProtocolError):
    """Tokens repeat, leave a gap, or follow the end of their request."""


class Incompatible(ProtocolError):
    """The peer speaks another version or serves something else; one sentence why."""
