"""What the live page is told: one moment of a frontend, as JSON.

Laws:
- No text of a request, nor an id by which its output could be asked for: of a response's
  id there is only enough to know one's own by.
- Each list is bounded; counts are of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from .admission import Gate
from .flows import Flows
from .link import Link, LinkState
from .metrics import Metrics
from .stages import STAGE_NAMES
from .visit import Visit

__all__ = [
    "MAX_REQUESTS",
    "MAX_WORKERS",
    "Frontend",
    "Handovers",
    "Process",
    "RequestView",
    "Snapshot",
    "WorkerView",
    "process_view",
    "shortened",
    "snapshot_of",
    "worker_views",
]

MAX_REQUESTS = 100
"""Those that have been there longest: a page that changes four times a second has room
for a few dozen."""

MAX_WORKERS = 256
"""A page draws dozens, and lists the others."""

MAX_FLOWS = 512
"""The same of pairs of workers."""

ID_CHARS = 8
"""Of the 24 random ones of a response's id: enough to find one's own, and the 64 bits that
are left keep others from following it."""

ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/inference/v1/generate": "generate",
}
"""How requests are called whose output is generated; others are named by ``_kind``."""


class RequestView(msgspec.Struct, omit_defaults=True):
    """One request in flight."""

    id: str  # the beginning of its response's
    kind: str
    stage: str
    age_s: float
    log_id: str = ""  # as the logs name it
    prompt_tokens: int = 0
    tokens: int = 0  # of all outputs so far
    max_tokens: int = 0  # of one output
    cached_tokens: int = 0
    choices: int = 1
    stream: bool = False
    prefill: str = ""  # the workers
    decode: str = ""
    process: int = 0


class WorkerView(msgspec.Struct, omit_defaults=True):
    """One worker, as it has last told."""

    id: str
    endpoint: str
    state: str  # of its link
    role: str = ""  # empty: it has not said yet
    reason: str = ""  # why it gets nothing new
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    slots: int = 0
    kv_usage: float = 0.0  # 0..1
    kv_blocks: int = 0
    block_size: int = 0
    index_blocks: int = 0  # known to be cached
    open: int = 0  # requests of this frontend there
    sent: int = 0  # to it, since somebody watches
    steps: int = 0  # of its engine
    engine: str = ""
    devices: int = 1
    frontends: int = 0
    max_model_len: int = 0
    connector: str = ""
    exactness: str = ""
    weights: str = ""
    adapters: int = 0
    busy: str = ""  # the admin action under way
    draining: bool = False
    leaving: bool = False
    paused: bool = False
    sleeping: bool = False


class Handovers(msgspec.Struct):
    """How many requests one worker has handed over to another, since somebody watches."""

    prefill: str
    decode: str
    count: int


class Process(msgspec.Struct):
    """What one process of a frontend has for itself; all counts only rise, or are of now."""

    process: int
    ready: bool
    draining: bool
    inflight: int
    waiting: int  # sequences, for room at the workers
    waiting_tokens: int  # of their prompts
    admitted: int
    limit: int
    tokens: int  # deliveries of tokens so far; one each, unless steps bring more
    ttft: list[int]  # (num_bounds + 1,) counts of the histogram
    itl: list[int]  # (num_bounds + 1,)
    stages: dict[str, int]
    requests: list[RequestView]
    open: dict[str, int]  # by worker
    sent: dict[str, int]  # by worker
    handovers: list[Handovers]


class Frontend(msgspec.Struct):
    """What does not change while it runs."""

    version: str
    model: str  # the served name
    frontend: str  # its id
    process: int  # which has answered
    num_processes: int
    ttft_bounds: list[float]  # in s, of the histograms' buckets
    itl_bounds: list[float]


class Snapshot(msgspec.Struct):
    """One moment of all processes."""

    at: float  # Unix seconds
    about: Frontend
    processes: list[int]  # those that have told theirs
    ready: bool
    draining: bool
    inflight: int
    waiting: int
    waiting_tokens: int
    admitted: int
    limit: int
    tokens: int
    ttft: list[int]
    itl: list[int]
    stages: dict[str, int]
    requests: list[RequestView]  # the oldest first
    workers: list[WorkerView]
    num_workers: int
    handovers: list[Handovers]


def process_view(
    process: int,
    visits: Collection[Visit],
    gate: Gate,
    links: Iterable[Link],
    metrics: Metrics,
    flows: Flows,
    now: float,
    *,
    ready: bool,
    draining: bool,
) -> Process:
    """Return what this process has for itself.

    Args:
        process: Its number.
        visits: What it serves, the oldest first.
        gate: Where requests wait for their turn.
        links: To all workers.
        metrics: Its own.
        flows: What went where.
        now: On the clock of ``Visit.began_at``.
        ready: Whether it can serve.
        draining: Whether it is about to stop.
    """
    stages = [0] * len(STAGE_NAMES)
    for visit in visits:
        stages[visit.stage] += 1
    ttft, itl = metrics.time_to_first_token.counts, metrics.inter_token_latency.counts
    most = sorted(flows.handovers.items(), key=lambda item: -item[1])[:MAX_FLOWS]
    return Process(
        process=process,
        ready=ready,
        draining=draining,
        inflight=len(visits),
        waiting=gate.num_sequences,
        waiting_tokens=gate.num_tokens,
        admitted=gate.num_admitted,
        limit=gate.limit,
        tokens=sum(ttft) + sum(itl),
        ttft=list(ttft),
        itl=list(itl),
        stages=dict(zip(STAGE_NAMES, stages, strict=True)),
        requests=[
            _request_view(visit, process, now) for visit in islice(visits, MAX_REQUESTS)
        ],
        open={link.worker_id: link.num_open for link in links if link.num_open},
        sent=flows.sent,
        handovers=[Handovers(*pair, count) for pair, count in most],
    )


def _request_view(visit: Visit, process: int, now: float) -> RequestView:
    view = RequestView(
        id="",
        kind=_kind(visit.path),
        stage=STAGE_NAMES[visit.stage],
        age_s=round(now - visit.began_at, 3),
        process=process,
    )
    session = visit.session
    if session is None:
        return view
    call, generations = session.call, session.generations
    view.id = shortened(call.response_id)
    view.log_id = generations[0].request_id
    view.prompt_tokens = call.num_prompt_tokens
    view.tokens = sum(one.num_new_tokens for one in generations)
    view.max_tokens = call.jobs[0][0].sampling.max_tokens
    view.cached_tokens = generations[0].num_cached_tokens
    view.choices = len(generations)
    view.stream = call.stream
    view.prefill, view.decode = generations[0].worker_ids
    return view


def _kind(path: str) -> str:
    """Return a name of a few that says what a request of *path* is."""
    if path.startswith("/v1/generations/"):
        return "replay"  # the rest of it is an id
    return ROUTES.get(path, "tokens")


def shortened(response_id: str) -> str:
    """Return the beginning of a response's id."""
    kind, dash, number = response_id.rpartition("-")
    return f"{kind[:ID_CHARS]}{dash}{number[:ID_CHARS]}"


def worker_views(
    links: Iterable[Link], opened: Mapping[str, int], sent: Mapping[str, int]
) -> list[WorkerView]:
    """Return the workers, those that work before those that do not, by role and name.

    Args:
        links: To all of them.
        opened: Requests at each, of all processes.
        sent: The same of all since somebody watches.
    """
    chosen = sorted(links, key=_rank)[:MAX_WORKERS]
    return [_worker_view(link, opened, sent) for link in chosen]


def _rank(link: Link) -> tuple[bool, str, str]:
    role = link.card.role.value if link.card is not None else ""
    return link.state is not LinkState.READY, role, link.worker_id


def _worker_view(
    link: Link, opened: Mapping[str, int], sent: Mapping[str, int]
) -> WorkerView:
    load, status = link.load, link.status
    view = WorkerView(
        id=link.worker_id,
        endpoint=link.endpoint,
        state=link.state.value,
        reason=link.obstacle,
        running=load.num_running,
        waiting=load.num_waiting,
        waiting_tokens=load.num_waiting_tokens,
        kv_usage=round(load.kv_usage, 4),
        open=opened.get(link.worker_id, 0),
        sent=sent.get(link.worker_id, 0),
        steps=load.num_steps or 0,
        frontends=load.num_frontends,
        index_blocks=link.blocks.num_blocks if link.blocks is not None else 0,
        exactness=link.exactness,
        weights=link.weight_version or "",
        adapters=len(status.adapters),
        busy=status.busy,
        draining=load.draining,
        leaving=link.is_leaving,
        paused=status.paused,
        sleeping=bool(status.sleep_level),
    )
    card = link.card
    if card is not None:
        view.role = card.role.value
        view.slots = card.max_num_seqs
        view.kv_blocks = card.num_kv_blocks
        view.block_size = card.block_size
        view.engine = f"{card.engine} {card.engine_version}"
        view.devices = card.world_size
        view.max_model_len = card.max_model_len
        view.connector = card.connector
    return view


def snapshot_of(
    about: Frontend, processes: Sequence[Process], links: Collection[Link], at: float
) -> Snapshot:
    """Return one moment of all *processes*; there is one at least.

    Args:
        about: Who says it.
        processes: What each has told.
        links: To all workers, of the process that answers: all see the same.
        at: Unix seconds.
    """
    opened, sent = Counter[str](), Counter[str]()
    pairs, stages = Counter[tuple[str, str]](), Counter[str]()
    for one in processes:
        opened.update(one.open)
        sent.update(one.sent)
        stages.update(one.stages)
        for flow in one.handovers:
            pairs[flow.prefill, flow.decode] += flow.count
    requests = [request for one in processes for request in one.requests]
    requests.sort(key=lambda request: -request.age_s)
    return Snapshot(
        at=at,
        about=about,
        processes=[one.process for one in processes],
        ready=any(one.ready for one in processes),
        draining=all(one.draining for one in processes),
        inflight=sum(one.inflight for one in processes),
        waiting=sum(one.waiting for one in processes),
        waiting_tokens=sum(one.waiting_tokens for one in processes),
        admitted=sum(one.admitted for one in processes),
        limit=sum(one.limit for one in processes),
        tokens=sum(one.tokens for one in processes),
        ttft=_added(one.ttft for one in processes),
        itl=_added(one.itl for one in processes),
        stages=dict(stages),
        requests=requests[:MAX_REQUESTS],
        workers=worker_views(links, opened, sent),
        num_workers=len(links),
        handovers=[
            Handovers(*pair, count) for pair, count in pairs.most_common(MAX_FLOWS)
        ],
    )


def _added(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]
