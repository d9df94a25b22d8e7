"""The way to one worker: a socket at a time, and the protocol's order on it."""

from __future__ import annotations

import secrets

from tokenwire.protocol.codec import encode
from tokenwire.protocol.messages import FromFrontend

from .conversation import Conversation
from .dealer import Context, Dealer, Listener
from .keyring import Keyring

__all__ = ["Channel"]


class Channel:
    """Sockets to one endpoint, one after the other.

    Args:
        endpoint: Where the worker listens, ``tcp://host:port``.
        context: The process's ZeroMQ context.
        identity: This frontend's id and incarnation.
        keyring: Says with which keys it connects, if it may.
        timeout_s: After which a silent peer's connection is dropped.
        listener: Hears what happens on the socket.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: Context,
        identity: tuple[str, str],
        keyring: Keyring,
        timeout_s: float,
        listener: Listener,
    ) -> None:
        self.talk = Conversation(*identity)
        self.num_keys_tried = 0
        """Handshakes that failed; the next one is made with the next key."""
        self._endpoint = endpoint
        self._context = context
        self._keyring = keyring
        self._timeout_s = timeout_s
        self._listener = listener
        self._dealer: Dealer | None = None

    def open(self) -> None:
        """Begin to connect.

        Raises:
            Incompatible: There is no key for this endpoint.
        """
        frontend_id = self.talk.hello.frontend_id
        self._dealer = Dealer(
            self._endpoint,
            context=self._context,
            # A new one each time: a ROUTER ignores a second peer with a known one.
            identity=f"{frontend_id}:{secrets.token_hex(4)}".encode(),
            curve=self._keyring.curve_for(self._endpoint, self.num_keys_tried),
            timeout_s=self._timeout_s,
            listener=self._listener,
        )

    def close(self) -> None:
        """Drop the socket, and what was on its way; harmless without one."""
        self.talk.broke()
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close()

    def send(self, message: FromFrontend) -> bool:
        """Number and send *message*; return whether the socket took it.

        Raises:
            MessageTooLarge: It is above the limit; nothing was sent.
        """
        if self._dealer is None:
            return False
        outgoing = self.talk.outgoing
        if not self._dealer.send(encode(outgoing.numbered(message))):
            return False
        outgoing.sent(message)
        return True

    def read(self) -> None:
        """Take what has come, without waiting for the loop's turn."""
        if self._dealer is not None:
            self._dealer.read()
