"""The words of the wire: capabilities, roles, and why something has ended.

``messages`` has them all, beside the messages that use them.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "ADMIN",
    "AGAIN",
    "BY_PAUSE",
    "CANCELLED",
    "CAPTURE",
    "CAPTURE_TOLD",
    "GOES_ON",
    "GRAMMAR_REJECTS_PREFIX",
    "JOURNAL",
    "KV_EVENTS",
    "METRICS",
    "ORPHANED_KV",
    "STATUS",
    "ErrorKind",
    "FinishReason",
    "Leg",
    "Role",
]

# --- capabilities --------------------------------------------------------------------

ORPHANED_KV = "orphaned_kv"
"""Capability. In Hello: sends Settled, takes OrphanedKV. In Card: takes Settled."""

METRICS = "metrics"
"""Capability. In Card: takes ScrapeMetrics."""

CAPTURE = "capture"
"""Capability. In Hello: takes ``ErrorKind.CAPTURE``. In Card: saves hidden states where
Submit asks for them, takes Discard."""

CAPTURE_TOLD = "capture_told"
"""Capability. In Hello: answers each file that it hears of by Told or Discard. In Card:
takes Told."""

ADMIN = "admin"
"""Capability. In Card: takes Admin."""

STATUS = "status"
"""Capability. In Hello: takes Status. In Card: sends it."""

JOURNAL = "journal"
"""Capability. In Card: keeps what it generates where a Submit asks for it (``Keep``), and takes
Recall and LetGo."""

KV_EVENTS = "kv_events"
"""Capability. In Card: takes WatchKV, and answers it with KVBlocks as long as the
link stands."""

# --- stop reasons --------------------------------------------------------------------

BY_PAUSE = "paused"
"""``Finished.stop_reason`` with ABORT: an Admin has ended it, on purpose. What it has is
its answer, and it does not go on elsewhere."""

GRAMMAR_REJECTS_PREFIX = "grammar_rejects_prefix"
"""``Finished.stop_reason`` with ERROR, of kind INVALID: the output that the sequence has
had (``Submit.num_prior``) is none that its structured output could have begun with."""

AGAIN = "again"
"""``Finished.stop_reason`` with ERROR: an Admin has ended it before it brought a token,
and its worker takes it when it is sent again. An older frontend sends it elsewhere."""

CANCELLED = "cancelled"
"""``Finished.stop_reason`` with ABORT: a client has cancelled the generation, maybe
through another frontend. It does not go on elsewhere."""

GOES_ON = "goes_on"
"""``Finished.stop_reason`` with ABORT: only this request has ended. Its frontend let go
of it, or somebody else follows its generation now, which goes on."""


class Role(StrEnum):
    """What a worker does; also what the frontend may send it."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Leg(StrEnum):
    """Which part of a request this Submit is."""

    FULL = "full"
    """Prefill and decode here; nothing is handed over."""
    PREFILL = "prefill"
    """Compute the prompt, sample one token, keep the KV for a hand-over."""
    DECODE = "decode"
    """Load the prompt's KV by ``handover``, then decode."""


class FinishReason(StrEnum):
    """Why a request ended; ``stop`` and ``length`` are the good ends."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The frontend cancelled it, or its frontend is gone."""
    ERROR = "error"
    """See ``Finished.error_kind``."""


class ErrorKind(StrEnum):
    """Whose fault a failed request is; decides the HTTP status and what is retried."""

    INVALID = "invalid"
    """The caller's: the engine refused the prompt or a parameter."""
    BUSY = "busy"
    """The worker is at its bound; another one, or later, may take it."""
    DRAINING = "draining"
    """The worker takes nothing new."""
    HANDOVER = "handover"
    """KV did not reach the decode worker; prefill again."""
    ENGINE = "engine"
    """The engine failed or died."""
    CAPTURE = "capture"
    """The output ended, but hidden states that it asked for could not be saved. Only to
    frontends with the capability ``CAPTURE``; others are told ``ENGINE``."""
