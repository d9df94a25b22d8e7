"""A client of resumable generations: streams one, survives what breaks, goes on exactly.

    async with ResumableStream(urls, "/v1/chat/completions", body) as stream:
        async for chunk in stream:
            ...

It needs aiohttp alone; copy it, or read it as what a client has to do. What it keeps is
``Progress``; how it gets on after a failure is ``ResumableStream._open``:

- a stream that broke: the rest of its events, from any frontend;
- where nobody has them: the same request, to go on behind the ids so far;
- before the first chunk: the request anew.

``python scripts/resume_client.py --url http://A:8000 --url http://B:8000 "Tell me ..."``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Self

import aiohttp
from resume_state import (
    BadStream,
    EventParser,
    GaveUp,
    Json,
    Outcome,
    Patience,
    Progress,
    Refused,
    ResumeError,
    Retries,
    member,
)

__all__ = [
    "BadStream", "GaveUp", "Outcome", "Patience", "Progress", "Refused",
    "ResumableStream", "ResumeError",
]  # fmt: skip

TRANSIENT = {408, 425, 429}
"""Beside all 5xx: the same request may succeed later, or at another frontend."""

GONE = {404, 410}
"""To who asks for events: nobody has these any more."""

CANCELLED, DRAINING, TAKEN_OVER = "cancelled", "draining", "taken_over"
"""Reasons of an interruption. The first and the last are final: somebody has ended it, or
reads it now."""

MAX_LOG = 100
"""Lines of what happened; a link that breaks all the time would make ever more."""


class _Broken(Exception):
    """What another attempt may mend."""

    def __init__(self, why: str, wait_s: float = 0.0, *, everywhere: bool = False):
        super().__init__(why)
        self.wait_s = wait_s  # asked for
        self.everywhere = everywhere  # not this frontend's trouble alone


class ResumableStream:
    """One generation, through whatever breaks; iterates over the JSON of its chunks.

    Args:
        urls: Frontends of one stack, the first one first.
        route: ``/v1/chat/completions`` or ``/v1/completions``.
        body: The request; ``nvext.resumable`` is added if it has none.
        api_key: Sent as ``Authorization: Bearer``.
        progress: What another object of this class has kept of the same request.
        patience: Bounds.

    Raises, while iterated:
        Refused: A server has said that this cannot be; ``code`` says why.
        GaveUp: Too many attempts in a row have failed.
        BadStream: A server breaks the rules of such streams.
    """

    def __init__(
        self,
        urls: Sequence[str],
        route: str,
        body: Json,
        api_key: str | None = None,
        *,
        progress: Progress | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.num_reconnects = self.num_resumes = 0
        self.log = deque[str](maxlen=MAX_LOG)
        self._route = route
        self._body = body
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._patience = patience or Patience()
        self._retries = Retries([url.rstrip("/") for url in urls], self._patience)
        self._retry_s = 0.0  # what the last stream has asked for
        kept = member(member(body, "nvext"), "resumable")
        self._outlives = kept.get("on_disconnect") == "continue"
        self._chunks = self._run()

    @property
    def url(self) -> str:
        """The frontend that serves it now, or is tried next."""
        return self._retries.url

    async def __aenter__(self) -> Self:
        """Open nothing yet."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._patience.connect_s
        )
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection; a generation that outlives that is cancelled."""
        async with self._session:
            await self._chunks.aclose()
            kept = self.progress
            if self._outlives and kept.generation_id and not kept.is_done:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with asyncio.timeout(self._patience.connect_s):
                        (await self._session.post(self._generation("cancel"))).close()

    def __aiter__(self) -> AsyncIterator[Json]:
        """Iterate over chunks, the usage's too; can be gone on with after a ``break``."""
        return self._chunks

    async def complete(self) -> Outcome:
        """Read to the end."""
        async for _ in self:
            pass
        kept = self.progress
        return Outcome(
            kept.token_ids, kept.message, kept.finish_reason, kept.usage, kept.claims,
            self.num_reconnects, self.num_resumes, list(self.log),
        )  # fmt: skip

    async def _run(self) -> AsyncGenerator[Json]:
        kept = self.progress
        while not kept.is_done:
            try:
                await asyncio.sleep(self._retries.turn(time.monotonic()))
                answer = await self._open()
                if answer is None:
                    break
                async with answer, contextlib.aclosing(self._bodies(answer)) as bodies:
                    async for body in bodies:
                        yield body
            except (_Broken, aiohttp.ClientError, TimeoutError) as error:
                options = member(self._body, "stream_options")
                if kept.finish_reason is not None and not options.get("include_usage"):
                    break  # [DONE] alone is missing
                self._failed(error)
        kept.is_done = True

    async def _bodies(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[Json]:
        """Yield what a stream brings that is new, until it is done.

        Raises:
            _Broken: It is not.
        """
        kept, parser = self.progress, EventParser()
        while not kept.is_done:
            async with asyncio.timeout(self._patience.silence_s):
                data = await answer.content.readany()
            if not data:
                msg = "the stream ended early"
                raise _Broken(msg)
            for event in parser.feed(data):
                num_before = len(kept.token_ids)
                body = kept.take(event)
                self._retry_s = parser.retry_s
                if len(kept.token_ids) > num_before:
                    self._retries.progressed()
                if body is not None and "error" in body:
                    raise self._interruption(body)
                if body is not None:
                    yield body

    def _failed(self, error: Exception) -> None:
        why = f"{self.url}: {str(error) or type(error).__name__}"
        self.log.append(f"{why}; {len(self.progress.token_ids)} ids have come")
        asked_s, everywhere = self._retry_s, False
        if isinstance(error, _Broken):
            asked_s, everywhere = error.wait_s or asked_s, error.everywhere
        try:
            self._retries.failed(time.monotonic(), asked_s, everywhere=everywhere)
        except GaveUp:
            raise GaveUp(why) from error

    def _generation(self, what: str) -> str:
        return f"{self.url}/v1/generations/{self.progress.generation_id}/{what}"

    async def _open(self) -> aiohttp.ClientResponse | None:
        """Return a stream that goes on where we are; None: all has come.

        Raises:
            _Broken: Not now, or not here.
            Refused: Never.
        """
        kept = self.progress
        if kept.generation_id and not kept.is_gone:
            seen = {"Last-Event-ID": f"{kept.generation_id}:{kept.seq}"}
            async with asyncio.timeout(self._patience.answer_s):
                url = self._generation("stream")
                answer = await self._session.get(url, headers=seen)
            if answer.status == 200:
                self.num_reconnects += 1
                self.log.append(f"{self.url}: goes on after event {kept.seq}")
                return answer
            if answer.status == 204 and kept.finish_reason:
                answer.close()
                return None
            if answer.status not in {204, *GONE}:
                raise await self._failure(answer)
            await self._failure(answer)  # it may have a checkpoint
        request = kept.request(self._body)
        async with asyncio.timeout(self._patience.answer_s):
            answer = await self._session.post(self.url + self._route, json=request)
        if answer.status != 200:
            raise await self._failure(answer)
        kept.begin(answer.headers.get("X-Generation-Id", ""))
        resume_from = request["nvext"].get("resume_from")
        if resume_from is not None:
            self.num_resumes += 1
            by = " and ".join(resume_from)
            self.log.append(
                f"{self.url}: goes on behind {len(kept.token_ids)} ids, by {by}"
            )
        return answer

    async def _failure(self, answer: aiohttp.ClientResponse) -> Exception:
        """Return what an answer that is no stream means; take its checkpoint."""
        async with asyncio.timeout(self._patience.answer_s):
            text = await answer.text()
        try:
            body: Json = json.loads(text)
            error: Json = body["error"]
        except (ValueError, TypeError, KeyError):
            body, error = {}, {"message": text[:200]}
        self._keep(body)
        refused = Refused(answer.status, error)
        if answer.status < 500 and answer.status not in TRANSIENT:
            return refused
        asked = answer.headers.get("Retry-After", "")
        return _Broken(str(refused), float(asked) if asked.isdecimal() else 0.0)

    def _interruption(self, body: Json) -> Exception:
        """Return what an error event means; take its checkpoint."""
        self._keep(body)
        nvext = member(body, "nvext")
        reason, refused = nvext.get("reason"), Refused(200, body["error"])
        if not nvext.get("resumable") or reason in {CANCELLED, TAKEN_OVER}:
            return refused
        # A frontend that leaves lets go on what outlives it: it can be followed.
        self.progress.is_gone = reason != DRAINING or not self._outlives
        wait_s = nvext.get("retry_after_ms", 0) / 1000
        return _Broken(f"{refused} ({reason})", wait_s, everywhere=reason != DRAINING)

    def _keep(self, body: Json) -> None:
        nvext = member(body, "nvext")
        self.progress.checkpoint = nvext.get("checkpoint") or self.progress.checkpoint


async def main() -> int:
    """Print the text of a chat as it comes; return 1 if it does not come to its end."""
    parser = argparse.ArgumentParser(description="Stream a chat through failures.")
    parser.add_argument("text", nargs="?", help="what is said; without: stdin")
    parser.add_argument("--url", action="append", help="a frontend; repeat it")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--body", type=json.loads, default={}, help="more of the request"
    )
    given = parser.parse_args()
    text = sys.stdin.read() if given.text is None else given.text
    body = {"messages": [{"role": "user", "content": text}], **given.body}
    urls = given.url or ["http://127.0.0.1:8000"]
    async with ResumableStream(
        urls, "/v1/chat/completions", body, given.api_key
    ) as stream:
        try:
            async for chunk in stream:
                for choice in chunk["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
        except ResumeError as error:
            print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        finally:
            print("", *stream.log, sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
