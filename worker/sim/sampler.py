"""Chooses the ids of one sequence: a rule, a script, and vLLM's stop conditions.

The rule's next id depends on all ids before it (through their CRC-32), on the absolute
position, on the seed and on the weights, and on nothing else. So prefill and decode workers agree, and
a prompt that is an earlier prompt and the beginning of its output goes on as before.
Sampling is greedy whatever the temperature; a seed counts if the temperature does.

With ``--output-draws`` a seed and penalties also count how much output there is, as in a
real engine: then such a prompt goes on as before only if it says how much of it is output
(``EngineRequest.num_prior``), and drifts else.
"""

from __future__ import annotations

from zlib import crc32

from tokenwire.protocol.messages import FinishReason, Leg, Logprobs
from tokenwire.protocol.tokens import pack_floats, pack_ids
from tokenwire.worker.engine import EngineRequest

from .model import SimModel
from .script import DRAWN, Answer

__all__ = ["Rule", "Sampler", "prompt_logprobs"]

_SPREAD = 0x9E3779B1
"""Fibonacci hashing's odd constant: it spreads neighbours apart."""

LOOK_AHEAD = 32
"""Ids decided at once: in one tight loop they cost half of what they cost one by one
(measured); 32 of them take 20 us, which no first token's latency notices."""

_NO_BIAS, _MUST_BIAS = -100.0, 100.0
"""OpenAI's ends of ``logit_bias``: a ban and an exclusive selection. Between them a
bias changes nothing here: there are no logits."""


class Rule:
    """What all sequences of an engine share."""

    __slots__ = (
        "eos_token_id",
        "extra_stop_ids",
        "ids",
        "mean_output_tokens",
        "output_draws",
        "packed",
    )

    def __init__(
        self,
        model: SimModel,
        mean_output_tokens: int = 0,
        *,
        output_draws: bool = False,
    ) -> None:
        self.ids = model.printable
        self.packed = [token_id.to_bytes(4, "little") for token_id in model.printable]
        self.eos_token_id = model.eos_token_id
        self.extra_stop_ids = model.extra_stop_ids
        self.mean_output_tokens = mean_output_tokens  # 0: EOS by script alone
        self.output_draws = output_draws


class Sampler:
    """The ids of one sequence, one after the other, until ``reason`` is set."""

    __slots__ = (
        "_ahead",
        "_answer",
        "_crc",
        "_draw",
        "_eos",
        "_hold_at",
        "_ids",
        "_last_reason",
        "_last_stop",
        "_limit",
        "_max_tokens",
        "_min_tokens",
        "_mixed",
        "_num_prompt",
        "_packed",
        "_plain",
        "_prompt_crc",
        "_rule",
        "_seed",
        "_stops",
        "_weights",
        "_width",
        "logprobs",
        "num_output",
        "reason",
        "stop_reason",
    )

    def __init__(
        self,
        rule: Rule,
        request: EngineRequest,
        prompt_crc: int,
        max_model_len: int,
        answer: Answer | None = None,
        weights: int = 0,
    ) -> None:
        sampling = request.sampling
        num_prior = request.num_prior
        limit = num_prior + 1 if request.leg is Leg.PREFILL else sampling.max_tokens
        self._rule = rule
        self._answer = answer
        self._prompt_crc = prompt_crc
        self._num_prompt = request.num_prompt_tokens
        self._max_tokens = min(limit, max_model_len - self._num_prompt)
        self._min_tokens = min(sampling.min_tokens, self._max_tokens)
        self._eos = None if sampling.ignore_eos else rule.eos_token_id
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= rule.extra_stop_ids
        self._stops = stops if self._eos is None else stops | {self._eos}
        seeded = sampling.temperature > 0 and sampling.seed is not None
        self._seed = _spread((sampling.seed or 0) + 1) if seeded else 0  # 0 is a seed
        penalized = bool(sampling.presence_penalty or sampling.frequency_penalty)
        drifts = rule.output_draws and (seeded or penalized)
        self._draw = _SPREAD if drifts else 0
        self._weights = 0
        self._width = -1 if sampling.logprobs is None else sampling.logprobs
        self._ids = rule.ids
        self._packed = rule.packed
        restricted = sampling.allowed_token_ids is not None or bool(sampling.logit_bias)
        if restricted:
            self._restrict(request)
        # Then EOS is all that could stop it, and the rule never chooses EOS.
        self._plain = (
            answer is None
            and not restricted
            and self._stops <= {self._eos}
            and self._width < 0
            and not rule.mean_output_tokens
        )
        # The output, as far as it is decided: at first, what there was before.
        self._ahead = (
            request.token_ids[self._num_prompt :] if num_prior else list[int]()
        )
        self._crc = crc32(pack_ids(self._ahead), prompt_crc)
        # Likewise, what the log probabilities come from; those of before are not asked.
        self._mixed = [0] * num_prior
        self._limit = self._max_tokens  # ids in all; lowered when a stop is decided
        self._hold_at = None if answer is None else answer.hold_at
        self._last_reason = FinishReason.LENGTH
        self._last_stop: int | None = None
        self.num_output = num_prior
        self.reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.logprobs: Logprobs | None = None  # of the ids that ``take`` returned last
        self.reweigh(weights)

    def reweigh(self, weights: int) -> None:
        """Choose the ids from here on with these weights."""
        if weights == self._weights:
            return
        self._seed ^= self._weights ^ weights
        self._weights = weights
        if self.reason is not None:
            return
        # What was decided ahead of its time was so with the old ones.
        del self._ahead[self.num_output :]
        del self._mixed[self.num_output :]
        self._crc = crc32(pack_ids(self._ahead), self._prompt_crc)
        self._limit = self._max_tokens
        self._last_reason, self._last_stop = FinishReason.LENGTH, None

    def take(self, count: int) -> list[int]:
        """Return *count* more ids; fewer only if ``reason`` is now set, or on hold."""
        start = self.num_output
        stop = start + count
        ahead = self._ahead
        if stop > len(ahead):
            self._decide(stop + LOOK_AHEAD)
        hold_at = self._hold_at
        if hold_at is not None and start <= hold_at <= min(stop, self._limit):
            stop = hold_at
        elif stop >= self._limit:
            stop = self._limit
            self.reason, self.stop_reason = self._last_reason, self._last_stop
        self.num_output = stop
        if self._width >= 0:
            rows = list(zip(ahead[start:stop], self._mixed[start:stop], strict=True))
            self.logprobs = _logprobs(rows, self._width, self._ids)
        return ahead[start:stop]

    def output(self, start: int, stop: int) -> list[int]:
        """Return ids that were taken before, or were there before."""
        return self._ahead[start:stop]

    def _decide(self, upto: int) -> None:
        """Decide on the ids up to *upto*, or up to the end."""
        upto = min(upto, self._limit)
        if not self._plain:
            self._decide_with_care(upto)
            return
        crc, seed, ahead = self._crc, self._seed, self._ahead
        ids, packed = self._ids, self._packed
        size = len(ids)
        first = self._num_prompt + len(ahead)
        draw = self._draw * len(ahead)
        step = self._draw
        for position in range(first, self._num_prompt + upto):
            index = ((crc ^ seed) + position + draw) % size
            draw += step
            crc = crc32(packed[index], crc)
            ahead.append(ids[index])
        self._crc = crc

    def _decide_with_care(self, upto: int) -> None:
        while len(self._ahead) < min(upto, self._limit):
            num_output = len(self._ahead)
            position = self._num_prompt + num_output
            mixed = (self._crc ^ self._seed) + position + self._draw * num_output
            token_id = self._choose(mixed)
            self._crc = crc32(token_id.to_bytes(4, "little"), self._crc)
            self._ahead.append(token_id)
            if self._width >= 0:
                self._mixed.append(mixed)
            if token_id in self._stops and len(self._ahead) >= self._min_tokens:
                self._limit = len(self._ahead)
                self._last_reason = FinishReason.STOP
                self._last_stop = None if token_id == self._eos else token_id

    def _choose(self, mixed: int) -> int:
        token_id = self._intended(mixed)
        if len(self._ahead) < self._min_tokens and token_id in self._stops:
            for step in range(len(self._ids)):  # as vLLM masks the stops' logits
                token_id = self._ids[(mixed + step) % len(self._ids)]
                if token_id not in self._stops:
                    break
        return token_id

    def _intended(self, mixed: int) -> int:
        answer = self._answer
        if answer is not None:
            at = answer.start + len(self._ahead)
            if at < len(answer.token_ids):
                token_id = answer.token_ids[at]
                if token_id != DRAWN:
                    return token_id
                return answer.drawn[mixed % len(answer.drawn)]
            if answer.then_eos and self._eos is not None:
                return self._eos
        mean = self._rule.mean_output_tokens
        if mean and self._eos is not None and _spread(mixed) % mean == 0:
            return self._eos
        return self._ids[mixed % len(self._ids)]

    def _restrict(self, request: EngineRequest) -> None:
        bias = request.sampling.logit_bias or {}
        allowed = request.sampling.allowed_token_ids
        chosen = self._ids if allowed is None else tuple(allowed)
        must = tuple(sorted(i for i, value in bias.items() if value >= _MUST_BIAS))
        banned = {i for i, value in bias.items() if value <= _NO_BIAS}
        chosen = must or chosen
        self._ids = tuple(i for i in chosen if i not in banned) or chosen


def prompt_logprobs(prompt: list[int], width: int, rule: Rule) -> Logprobs:
    """Return made-up log probabilities of the prompt's ids but the first."""
    rows = [(token_id, token_id) for token_id in prompt[1:]]
    return _logprobs(rows, width, rule.ids)


def _spread(number: int) -> int:
    return (number * _SPREAD >> 16) & 0xFFFF_FFFF


def _logprobs(
    rows: list[tuple[int, int]], width: int, ids: tuple[int, ...]
) -> Logprobs:
    """Return vLLM's rows: the sampled token, then the *width* best, itself among them.

    Args:
        rows: The sampled id and a number that decides its log probability.
        width: Alternatives beside the sampled token, as ``Sampling.logprobs``.
        ids: What the alternatives are taken from.
    """
    token_ids: list[int] = []
    values: list[float] = []
    ranks: list[int] = []
    for token_id, mixed in rows:
        best = -(1 + _spread(mixed) % 255) / 1024
        token_ids.append(token_id)
        values.append(best)
        ranks.append(1)
        other = mixed
        for rank in range(1, width + 1):
            candidate = token_id
            if rank > 1:
                other += 1
                candidate = ids[other % len(ids)]
                if candidate == token_id:
                    other += 1
                    candidate = ids[other % len(ids)]
            token_ids.append(candidate)
            values.append(best - 1.5 * (rank - 1))
            ranks.append(rank)
    return Logprobs(
        width + 1, pack_ids(token_ids), pack_floats(values), pack_ids(ranks)
    )
