"""A generation told again, from what its worker keeps: the same events, then live ones.

Laws:
- The events are made anew, from the request and the ids, by the code that made them
  first; those that the client has are not sent.
- Whoever follows a generation leaves it as its own client would: it goes on or ends as
  was asked for when it began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokenwire.protocol.messages import BY_PAUSE, CANCELLED, FinishReason, Recalled
from tokenwire.protocol.tokens import pack_ids

from .calls import Call, chat_call, completion_call
from .checkpoint import Checkpoint
from .choice import Choice
from .job import End
from .journals import ENDED, Found, Journals
from .kept import NOTHING, Context, Known, owner_of, read_context
from .metrics import Metrics
from .policy import Policy
from .pool import Pool
from .reading import parsed_body
from .reply import Reply
from .resumable import Resumable
from .resume_errors import generation_active, mismatch, replay_window_lost
from .resuming import Client
from .schema import ChatRequest, CompletionRequest
from .session import Session
from .tokenizer import TextModel
from .trail import CURRENT

__all__ = ["CHAT", "COMPLETIONS", "Replay", "Replays", "Told"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
"""The routes whose generations are kept."""


@dataclass(slots=True, frozen=True)
class Told:
    """What a client has that was told all that is kept."""

    num_events: int
    num_openings: int  # of these, before the first id
    num_tokens: int
    end: End | None  # None: it is running
    checkpoint: Checkpoint  # of all of it


class Replay:
    """One generation, as its worker keeps it.

    Args:
        found: Which one it is.
        kept: All that its worker has.
        context: Of that, what a frontend has said of it.
        pool: The workers.
        journals: Asks them.
        again: Makes its call, a new one each time.
    """

    def __init__(
        self,
        found: Found,
        kept: Recalled,
        context: Context,
        pool: Pool,
        journals: Journals,
        again: Callable[[], Awaitable[Call]],
    ) -> None:
        self.found = found
        self.kept = kept
        self.context = context
        self._pool = pool
        self._journals = journals
        self._again = again

    async def call(self, told_seq: int = 0) -> Call:
        """Return the generation's call.

        Args:
            told_seq: Of the last event that its client has.

        Raises:
            ApiError: 409, its prompt has other ids here than where it began; others: this
                frontend would not take its request.
        """
        call = await self._again()
        [(job, _)] = call.jobs
        num_prompt = self.context.num_prompt_tokens
        is_same = len(job.prompt_token_ids) == num_prompt
        if not is_same or not self.kept.token_ids.startswith(
            pack_ids(job.prompt_token_ids)
        ):
            theirs, ours = f"{num_prompt} ids", f"{len(job.prompt_token_ids)} others"
            raise mismatch("prompt_mismatch", "prompt_token_ids", theirs, ours)
        resumable_of(call).told_seq = told_seq
        call.keep(self.context.route, self.context.body, self.found.owner)
        return call

    @property
    def is_given_up(self) -> bool:
        """Whether it outlives all but a cancel, and has ended by neither itself nor that.

        The frontend that followed it has had it go on elsewhere, unless a stop string
        had ended it.
        """
        finished = self.kept.finished
        return (
            self.kept.outlives
            and finished is not None
            and finished.reason is FinishReason.ABORT
            and finished.stop_reason not in (BY_PAUSE, CANCELLED)
        )

    async def told(self, seq: int = 0) -> Told:
        """Return what a client has that was told all that is kept, by telling it nobody.

        Args:
            seq: Of the last event that this client has.

        Raises:
            ApiError: 410, it went on elsewhere, where nobody has it any more; others: as
                ``call``.
        """
        call = await self.call(ALL)
        session = Session(call, self._pool, _UNCOUNTED)
        try:
            num_openings, end = await session.silently(self._tell_kept)
            num_tokens = session.num_tokens
        finally:
            session.close()
        resumable = resumable_of(call)
        num_events = resumable.num_events
        is_whole = end is None or end.error is None
        if not is_whole and (self.is_given_up or seq > num_events):
            why = "it went on at another worker, which has it no more"
            raise replay_window_lost(self.found.generation_id, why)
        checkpoint = resumable.checkpoint(num_events)
        return Told(num_events, num_openings, num_tokens, end, checkpoint)

    async def follow(self, choice: Choice) -> None:
        """Have *choice* told what is kept, and what comes from now on.

        Raises:
            ApiError: 404, 410 or 503: it is not there any more.
        """
        if self.kept.state == ENDED:
            self._tell(choice, self.kept)
            return
        await self._journals.follow(self.found, lambda kept: self._tell(choice, kept))

    async def checkpoint(self, seq: int | None) -> Checkpoint:
        """Return the generation's checkpoint.

        Args:
            seq: Of the last event that the client has; None: of all that is kept.

        Raises:
            ApiError: As ``call``.
        """
        told = await self.told(seq or 0)
        if seq is None or seq >= told.num_events:
            return told.checkpoint
        num_tokens = max(0, min(seq - told.num_openings, told.num_tokens))
        call = await self.call()
        session = Session(call, self._pool, _UNCOUNTED)
        choice = session.only_choice
        self._tell_kept(choice)
        resumable = resumable_of(call)
        resumable.add(*choice.held(num_tokens))
        session.close()
        return resumable.checkpoint(seq)

    def _tell_kept(self, choice: Choice) -> None:
        self._tell(choice, self.kept)

    def _tell(self, choice: Choice, kept: Recalled) -> Reply | None:
        return choice.follow(self.found.link, kept, self.context.history)


class Replays:
    """Finds generations for their clients.

    Args:
        pool: The workers.
        model: Makes their calls.
        policy: The operator's.
    """

    def __init__(self, pool: Pool, model: TextModel, policy: Policy) -> None:
        self.journals = Journals(pool)
        self._pool = pool
        self._model = model
        self._policy = policy

    async def find(self, generation_id: str, client: Client) -> Found:
        """Return who keeps a generation.

        Raises:
            ApiError: 404, 410 or 503.
        """
        owner = owner_of(client.authorization)
        return await self.journals.find(generation_id, owner)

    async def read(self, found: Found, client: Client) -> Replay:
        """Return all of it.

        Raises:
            ApiError: 404, 410 or 503.
        """
        kept = await self.journals.read(found)
        context = read_context(kept.context)
        if context is None:
            why = "another release of the frontend began it"
            raise replay_window_lost(found.generation_id, why)
        pool, model, policy = self._pool, self._model, self._policy
        known = Known(context, context.resumed)

        async def again() -> Call:
            body = context.body
            if context.route == CHAT:
                chat = await parsed_body(body, ChatRequest, model, policy)
                return await chat_call(chat, model, pool, policy, client, known)
            completion = await parsed_body(body, CompletionRequest, model, policy)
            return await completion_call(completion, model, pool, policy, client, known)

        return Replay(found, kept, context, pool, self.journals, again)

    async def known(
        self, request: ChatRequest | CompletionRequest, client: Client
    ) -> Known:
        """Return the checkpoint of the generation that a request goes on from by its id.

        Raises:
            ApiError: 404, 410 or 503: it is not there; 409: it is still running.
        """
        given = request.nvext.resume_from if request.nvext is not None else None
        if given is None or given.generation_id is None:
            return NOTHING
        trail = CURRENT.get()
        if trail is not None:
            trail.stage("resume")
        found = await self.find(given.generation_id, client)
        if found.state != ENDED:
            raise generation_active(given.generation_id)
        replay = await self.read(found, client)
        known = Known(checkpoint=await replay.checkpoint(given.seq))
        if trail is not None:
            trail.stage("tokenize")
        return known


def resumable_of(call: Call) -> Resumable:
    """Return what a kept generation says of itself."""
    if call.resumable is None:
        msg = f"{call.response_id} is kept, and its request is not resumable"
        raise RuntimeError(msg)
    return call.resumable


ALL = 2**63
"""As many events as no stream has."""

_UNCOUNTED = Metrics()
"""Of what is told nobody."""
