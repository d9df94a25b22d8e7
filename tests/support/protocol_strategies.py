"""Hypothesis strategies: every field of every message, and values of any type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings, strategies as st

from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker
from tokenwire.protocol.limits import MAX_REQUEST_ID_CHARS
from tokenwire.protocol.messages import (
    Adapter,
    Admin,
    AdminDone,
    Batch,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    ErrorKind,
    Finished,
    FinishReason,
    FromFrontend,
    FromWorker,
    Hello,
    Leg,
    Load,
    Logprobs,
    MetricsText,
    OrphanedKV,
    Ping,
    Refused,
    ReleaseKV,
    Role,
    Sampling,
    ScrapeMetrics,
    Settled,
    Status,
    StructuredOutput,
    Submit,
    Tokens,
    Told,
    Trace,
)

Decode = Callable[[bytes], FromFrontend | FromWorker]

raw = msgspec.msgpack.encode
DECODERS: list[Decode] = [decode_from_frontend, decode_from_worker]

# The same examples each time; a loaded machine is no failure.
PROPERTY = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
FUZZ = settings(PROPERTY, max_examples=300)
FEW = settings(PROPERTY, max_examples=25)

# --- strategies: every field of every message ----------------------------------------

# What UTF-8 can hold: no lone surrogates.
texts = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=MAX_REQUEST_ID_CHARS)
ints = st.integers(-(2**63), 2**64 - 1)
counts = st.integers(0, 2**63)
floats = st.floats(allow_nan=False)
packed = st.lists(st.binary(min_size=4, max_size=4), max_size=8).map(b"".join)
objects = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | ints | floats | texts | st.binary(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@st.composite
def logprobs_of(draw: st.DrawFn, num_rows: int) -> Logprobs:
    """Draw logprobs for *num_rows* tokens."""
    width = draw(st.integers(1, 4))
    size = num_rows * width * 4
    part = st.binary(min_size=size, max_size=size)
    return Logprobs(width, draw(part), draw(part), draw(part))


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Draw new tokens of one request."""
    ids = draw(packed.filter(bool))
    logprobs = draw(st.none() | logprobs_of(len(ids) // 4))
    return Tokens(draw(texts), draw(counts), ids, logprobs)


samplings = st.builds(
    Sampling,
    max_tokens=ints,
    min_tokens=ints,
    temperature=floats,
    top_p=floats,
    top_k=ints,
    min_p=floats,
    seed=st.none() | ints,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    stop_token_ids=st.lists(ints, max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | ints,
    prompt_logprobs=st.none() | ints,
    logit_bias=st.none() | st.dictionaries(ints, floats, max_size=3),
    allowed_token_ids=st.none() | st.lists(ints, max_size=3),
    bad_words=st.lists(texts, max_size=3),
    structured_output=st.none()
    | st.builds(
        StructuredOutput, kind=texts, spec=texts, whitespace_pattern=st.none() | texts
    ),
)
from_frontend = st.one_of(
    st.builds(Hello, ints, texts, texts, st.lists(texts, max_size=3)),
    st.builds(
        Submit,
        request_id=names,
        token_ids=packed,
        sampling=samplings,
        leg=st.sampled_from(Leg),
        handover=st.none() | objects,
        kv_transfer_params=st.none() | objects,
        priority=ints,
        cache_salt=st.none() | texts,
        echo_prompt=st.booleans(),
        reasoning_ended=st.none() | st.booleans(),
        reasoning_parser_kwargs=st.none() | objects,
        capture_tokens=counts,
        lora=texts,
        handover_update=st.none() | ints,
        trace=st.none() | st.builds(Trace, texts, texts, texts),
    ),
    st.builds(Cancel, names),
    st.builds(ReleaseKV, names, objects),
    st.builds(Settled, names),
    st.builds(Discard, texts),
    st.builds(Told, texts),
    st.builds(Admin, names, texts, objects, st.floats(0, 1e9)),
    st.builds(Ping, texts),
    st.builds(Bye, texts),
    st.just(ScrapeMetrics()),
)
finished = st.builds(
    Finished,
    request_id=texts,
    reason=st.sampled_from(FinishReason),
    num_output_tokens=counts,
    num_prompt_tokens=counts,
    num_cached_tokens=counts,
    stop_reason=st.none() | ints | texts,
    error_kind=st.none() | st.sampled_from(ErrorKind),
    error=texts,
    prompt_token_ids=st.none() | packed,
    handover=st.none() | objects,
    kv_transfer_params=st.none() | objects,
    prompt_logprobs=st.none() | st.integers(0, 3).flatmap(logprobs_of),
    queue_s=floats,
    prefill_s=floats,
)
from_worker = st.one_of(
    st.builds(
        Card,
        protocol_version=ints,
        worker_id=texts,
        incarnation=texts,
        role=st.sampled_from(Role),
        model=texts,
        max_model_len=counts,
        vocab_size=counts,
        block_size=counts,
        engine=texts,
        engine_version=texts,
        tokenizer_sha256=texts,
        revision=texts,
        dtype=texts,
        connector=texts,
        connector_compatibility=texts,
        max_num_seqs=counts,
        num_kv_blocks=counts,
        capabilities=st.lists(texts, max_size=3),
        hidden_state_layers=st.lists(counts, max_size=3),
        weight_version=texts,
        world_size=counts,
    ),
    st.builds(Refused, texts),
    st.builds(Batch, st.lists(tokens(), max_size=3), st.lists(finished, max_size=3)),
    st.builds(
        Load,
        incarnation=texts,
        num_running=counts,
        num_waiting=counts,
        kv_usage=st.floats(0, 1),
        num_waiting_tokens=counts,
        draining=st.booleans(),
        num_requests=counts,
        num_frontends=counts,
    ),
    st.builds(
        Status,
        weight_version=texts,
        update=counts,
        adapters=st.lists(st.builds(Adapter, texts, ints), max_size=3),
        paused=st.booleans(),
        sleep_level=counts,
        busy=texts,
        cache_epoch=counts,
        fault=texts,
    ),
    st.builds(AdminDone, names, texts, texts, objects),
    st.builds(OrphanedKV, names, objects),
    st.builds(EngineDead, texts),
    st.builds(MetricsText, texts),
)

anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | ints | st.floats() | texts | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts | ints, inner, max_size=4)
    ),
    max_leaves=12,
)
