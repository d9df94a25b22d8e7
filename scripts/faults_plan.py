"""What one case of the fault suite does: a pure function of a seed and a number.

No time is in a plan. A fault strikes at a point of a request's life, which an event
marks: the frame of a message that passes between frontend and worker, or what a client
has read. The names of points, actions and topologies are explained in docs/faults.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace

from faults_parts import TOPOLOGIES, Ask, Case, Point, Strike, digest

__all__ = ["KINDS", "plan", "plan_digest"]


def plan(seed: int, number: int) -> Case:
    """Return the case *number* of *seed*."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    made = _MAKERS[kind](rng, Case(seed, number, kind, "", (), ()))
    if (
        rng.random() < 0.15 and kind != "clients"
    ):  # short prompts are then prefilled where they are decoded
        made = replace(
            made, frontend=(*made.frontend, "--remote-prefill-min-tokens", "40")
        )
    return replace(
        made, engine={name: made.engine[name] for name in sorted(made.engine)}
    )


def plan_digest(case: Case) -> str:
    """Return the digest of a plan."""
    return digest(asdict(case))


# --- requests --------------------------------------------------------------------------


def _ask(rng: random.Random, **fields: object) -> Ask:
    n = rng.choice((1, 1, 1, 1, 1, 2))
    ask = Ask(
        chat=rng.random() < 0.5,
        stream=rng.random() < 0.7,
        num_prompt=rng.choice((3, 17, 33, 80)),
        max_tokens=rng.randint(12, 48),
        sampling=rng.choice(("greedy", "greedy", "seeded", "unseeded")),
        seed=rng.randrange(1_000),
        ids=n == 1 and rng.random() < 0.8,
        logprobs=rng.random() < 0.4,
        n=n,
        stop_after=rng.randint(4, 10) if rng.random() < 0.2 else None,
    )
    return replace(ask, **fields)  # type: ignore[arg-type]


def _asks(rng: random.Random, least: int = 2, most: int = 6) -> tuple[Ask, ...]:
    return tuple(_ask(rng) for _ in range(rng.randint(least, most)))


def _with(asks: tuple[Ask, ...], index: int, **fields: object) -> tuple[Ask, ...]:
    changed = replace(asks[index], **fields)  # type: ignore[arg-type]
    return (*asks[:index], changed, *asks[index + 1 :])


# --- points ----------------------------------------------------------------------------


def _stage(rng: random.Random, case: Case, request: int) -> Point:
    """Return a point in the life of *request*, in this topology."""
    legs = ["full"] if case.topology in {"single", "twins"} else ["prefill", "decode"]
    early = rng.random() < 0.5
    stages = [Point("submit", request, leg, early=early) for leg in legs]
    if "prefill" in legs:
        stages.append(Point("prefilled", request, early=early))
    ask = case.asks[request]
    last = ask.stop_after or min(ask.max_tokens, 48)
    stages += [
        Point("tokens", request, count=count, early=early)
        for count in (1, 2, rng.randint(3, last), last)
    ]
    stages.append(Point("finished", request, early=early))
    return rng.choice(stages)


def _stage_of_all(rng: random.Random, case: Case, request: int) -> Point:
    """Return a point that comes before the end, whichever workers serve."""
    while True:
        point = _stage(rng, case, request)
        depends = case.topology == "mixed" and point.message != "tokens"
        if point.message != "finished" and not depends:
            return point


def _victim(rng: random.Random, case: Case) -> int:
    return rng.randrange(len(case.asks))


def _any_topology(rng: random.Random) -> str:
    return rng.choice(("twins", "trio", "trio", "quartet", "mixed"))


# --- kinds of cases --------------------------------------------------------------------

LONG, SLOWLY = 1_500, ["--step-ms", "10"]
"""Of requests that nobody will read to their end: they must be ended, for they run for
15 s by themselves."""

LEASE = ["--kv-lease-s", "2"]
"""Where the message that frees KV may itself be lost, the lease bounds the leak."""


def _frames(rng: random.Random, case: Case) -> Case:
    """Do to one frame what TCP never does."""
    case = replace(case, topology=_any_topology(rng), asks=_asks(rng))
    request = _victim(rng, case)
    action = rng.choice(("drop", "repeat", "swap", "truncate", "garble", "hold"))
    value = rng.choice((0.2, 2.6)) if action == "hold" else 0.0
    point = _stage(rng, case, request)
    if rng.random() < 0.4:
        message = rng.choice(("ping", "load", "batch", "submit", "cancel"))
        if message == "cancel":
            case = replace(
                case, asks=_with(case.asks, request, stop_after=5, max_tokens=400)
            )
        point = Point(message, count=1 if message == "cancel" else rng.randint(1, 3))
    strikes = (Strike(point, action, value=value),)
    return replace(case, strikes=strikes, engine={"prefill": LEASE})


def _greeting(rng: random.Random, case: Case) -> Case:
    """Do it to the handshake that follows a cut."""
    case = replace(case, topology=rng.choice(("twins", "trio")), asks=_asks(rng))
    cut = Strike(_stage(rng, case, _victim(rng, case)), "cut")
    action = rng.choice(("drop", "repeat", "swap", "truncate"))
    message = rng.choice(("hello", "card"))
    # The workers' first greetings are over before the requests begin.
    strike = Strike(Point(message), action)
    return replace(case, strikes=(cut, strike), engine={"prefill": LEASE})


def _cut(rng: random.Random, case: Case) -> Case:
    """Cut a connection, or let it stand still, at a stage of a request."""
    case = replace(case, topology=_any_topology(rng), asks=_asks(rng))
    action = rng.choice(("cut", "cut", "still"))
    value = rng.choice((0.3, 3.0)) if action == "still" else 0.0
    strike = Strike(_stage(rng, case, _victim(rng, case)), action, value=value)
    return replace(case, strikes=(strike,), engine={"prefill": LEASE})


def _kill(rng: random.Random, case: Case) -> Case:
    """Kill a worker for good; another of its role is left, or none is needed."""
    case = replace(case, topology=_any_topology(rng), asks=_asks(rng))
    strike = Strike(_stage(rng, case, _victim(rng, case)), "kill")
    # Without any decode worker nothing can be released: the lease is the bound.
    engine = {"prefill": LEASE} if case.topology == "mixed" else {}
    return replace(case, strikes=(strike,), engine=engine)


def _restart(rng: random.Random, case: Case) -> Case:
    """Kill a worker, and start it again at the same address."""
    topology = rng.choice(("single", *TOPOLOGIES))
    case = replace(case, topology=topology, asks=_asks(rng))
    strike = Strike(_stage(rng, case, _victim(rng, case)), "restart", value=0.2)
    return replace(case, strikes=(strike,))


def _freeze(rng: random.Random, case: Case) -> Case:
    """Stop a worker's process and let it go on: shortly, or after it was given up."""
    case = replace(case, topology=_any_topology(rng), asks=_asks(rng))
    value = rng.choice((0.2, 4.0))
    strike = Strike(_stage(rng, case, _victim(rng, case)), "freeze", value=value)
    return replace(case, strikes=(strike,), engine={"prefill": LEASE})


def _engine(rng: random.Random, case: Case) -> Case:
    """Have an engine die, stand still, be slow, or fail reads of KV."""
    topology = _any_topology(rng)
    case = replace(case, topology=topology, asks=_asks(rng))
    role = rng.choice(TOPOLOGIES[topology])
    first = f"{role}-0"
    fault = rng.choice(("die", "die", "freeze", "slow", "fail-handover", "drop-finish"))
    if fault == "fail-handover":
        case = replace(case, topology="trio")
        spec = rng.choice(("fail-handover@1", "fail-handover"))
        return replace(case, engine={"decode-0": ["--fault", spec]})
    step = rng.choice((1, 2, 3, rng.randint(4, 30)))
    if fault == "drop-finish":
        step = rng.choice((1, 2))  # of the ends
    spec = (
        f"slow={rng.choice((50, 300))}@{step}" if fault == "slow" else f"{fault}@{step}"
    )
    engine = {first: ["--fault", spec]}
    if fault == "drop-finish" and role == "prefill":
        engine["prefill"] = LEASE  # nobody was told what is held
    return replace(case, engine=engine)


def _handover(rng: random.Random, case: Case) -> Case:
    """Hurt one of the two workers of a hand-over, or the client, around the transfer."""
    case = replace(case, topology=rng.choice(("trio", "quartet")), asks=_asks(rng))
    request = _victim(rng, case)
    engine = {"decode": ["--transfer-ms", str(rng.choice((0, 20, 60)))]}
    between = rng.choice(
        (
            Point("prefilled", request, early=True),
            Point("prefilled", request),
            Point("submit", request, "decode", early=True),
            Point("submit", request, "decode"),
            Point("tokens", request, count=1),
        )
    )
    what = rng.choice(("prefill", "stale", "output", "strip", "leave", "stop"))
    match what:
        case "prefill":
            target = "here" if between.message == "prefilled" else "prefill"
            strike = Strike(between, "restart", target, 0.2)
        case "stale":
            point = Point("submit", request, "decode", early=True)
            strike = Strike(point, "restart", "prefill", 0.0)
        case "output":
            point = Point("submit", request, "decode", early=between.early)
            strike = Strike(point, rng.choice(("kill", "restart")), "here", 0.2)
        case "strip":
            strike = Strike(Point("prefilled", request), "strip")
            engine["prefill"] = LEASE
        case "leave":
            point = rng.choice(
                (Point("submit", request, "decode"), Point("prefilled", request))
            )
            strike = Strike(point, "leave")
        case _:
            asks = _with(case.asks, request, stop_token_after=1, stop_after=None, n=1)
            return replace(case, asks=asks, engine=engine)
    return replace(case, strikes=(strike,), engine=engine)


def _drain(rng: random.Random, case: Case) -> Case:
    """Drain a worker as SIGTERM does, and start it anew."""
    case = replace(case, topology=_any_topology(rng), asks=_asks(rng))
    patience_s = rng.choice((0.0, 0.05, 5.0))
    point = _stage(rng, case, _victim(rng, case))
    strikes = [Strike(point, "drain", value=patience_s)]
    if rng.random() < 0.3:
        strikes.append(Strike(_stage(rng, case, _victim(rng, case)), "cut"))
        return replace(case, strikes=tuple(strikes), engine={"prefill": LEASE})
    return replace(case, strikes=tuple(strikes))


def _clients(rng: random.Random, case: Case) -> Case:
    """Have clients leave at every stage, and read slowly."""
    case = replace(
        case, topology=rng.choice(("single", *TOPOLOGIES)), asks=_asks(rng, 3)
    )
    asks = list(case.asks)
    strikes: list[Strike] = []
    for index, ask in enumerate(asks):
        way = rng.choice(("stay", "early", "stage", "slow"))
        if way == "early":
            asks[index] = replace(
                ask,
                stream=True,
                leaves_after=rng.randint(0, 6),
                max_tokens=LONG,
                stop_after=None,
            )
        elif way == "stage":
            asks[index] = replace(ask, max_tokens=LONG, stop_after=None)
            case = replace(case, asks=tuple(asks))
            strikes.append(Strike(_stage_of_all(rng, case, index), "leave"))
        elif way == "slow":
            asks[index] = replace(ask, reads_slowly=True, stream=True)
    engine = dict.fromkeys(set(TOPOLOGIES[case.topology]), SLOWLY)
    return replace(case, asks=tuple(asks), strikes=tuple(strikes), engine=engine)


def _queues(rng: random.Random, case: Case) -> Case:
    """Send more than a worker, or the frontend, takes: some are refused, cleanly."""
    asks = tuple(_ask(rng, n=1) for _ in range(rng.randint(8, 14)))
    case = replace(case, topology=rng.choice(("single", "twins", "trio")), asks=asks)
    if rng.random() < 0.5:
        return replace(case, max_requests=rng.randint(1, 3), refusals=True)
    bound = str(rng.randint(1, 4))
    return replace(case, frontend=("--max-inflight-requests", bound), refusals=True)


def _clocks(rng: random.Random, case: Case) -> Case:
    """Turn the clock of the day, or let a process sleep: its monotonic clock leaps."""
    case = replace(case, topology=_any_topology(rng), asks=_asks(rng))
    action = rng.choice(("date", "leap"))
    days = rng.choice((-400.0, -1.0, 3_650.0))
    value = days * 86_400 if action == "date" else rng.choice((0.8, 3.0, 30.0))
    strike = Strike(_stage(rng, case, _victim(rng, case)), action, value=value)
    return replace(case, strikes=(strike,), engine={"prefill": LEASE})


def _frontends(rng: random.Random, case: Case) -> Case:
    """Kill one of two frontends: the other's requests do not notice."""
    topology = rng.choice(("twins", "trio", "quartet"))
    case = replace(case, topology=topology, asks=_asks(rng, 4), num_frontends=2)
    victim = _victim(rng, case)
    for index in range(victim % 2, len(case.asks), 2):  # of the same frontend
        case = replace(
            case, asks=_with(case.asks, index, max_tokens=LONG, stop_after=None)
        )
    strike = Strike(_stage(rng, case, victim), "kill frontend")
    engine = dict.fromkeys(set(TOPOLOGIES[topology]), SLOWLY)
    engine["prefill"] = [*SLOWLY, *LEASE]
    return replace(case, strikes=(strike,), engine=engine)


def _two(rng: random.Random, case: Case) -> Case:
    """Two faults at once, or one in the wake of the other."""
    topology = rng.choice(("twins", "trio", "quartet"))
    case = replace(case, topology=topology, asks=_asks(rng, 3))
    request = _victim(rng, case)
    strikes: list[Strike] = []
    for _ in range(2):
        action, value = rng.choice(
            (
                ("restart", 0.2),
                ("cut", 0.0),
                ("freeze", 3.0),
                ("still", 3.0),
                ("drop", 0.0),
                ("repeat", 0.0),
                ("swap", 0.0),
                ("drain", 0.05),
            )
        )
        at = request if rng.random() < 0.6 else _victim(rng, case)
        strikes.append(Strike(_stage(rng, case, at), action, value=value))
    engine = {"prefill": LEASE}
    if rng.random() < 0.2:
        engine["decode-0"] = ["--fault", "fail-handover@1"]
    return replace(case, strikes=tuple(strikes), engine=engine)


_MAKERS: dict[str, Callable[[random.Random, Case], Case]] = {
    "frames": _frames,
    "greeting": _greeting,
    "cut": _cut,
    "kill": _kill,
    "restart": _restart,
    "freeze": _freeze,
    "engine": _engine,
    "handover": _handover,
    "drain": _drain,
    "clients": _clients,
    "queues": _queues,
    "clocks": _clocks,
    "frontends": _frontends,
    "two": _two,
}

KINDS = (
    "frames", "cut", "kill", "handover", "restart", "two", "frames", "freeze", "engine",
    "handover", "drain", "clients", "frames", "queues", "clocks", "frontends", "two",
    "greeting", "frames", "kill",
)  # fmt: skip
"""A row of kinds, repeated: a case's kind follows from its number alone."""
