"""Who may use the admin plane, what its routes take, and what trainers find there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.admin import admin_get, admin_post, weights
from support.stack import MODEL_NAME, SimWorker, Stack, frontend, stack
from tokenwire.frontend.admin import MAX_BODY_BYTES
from tokenwire.frontend.admin_key import KEY_VARIABLE, AdminKey
from tokenwire.protocol.files import UnusableFile
from tokenwire.protocol.messages import Role

KEY = "a-key-of-enough-characters"
GIVEN = {"Authorization": f"Bearer {KEY}"}
PAIR = (Role.PREFILL, Role.DECODE)


@pytest_asyncio.fixture
async def pair(tiny_model: Path) -> AsyncIterator[Stack]:
    """A pair without a key."""
    async with stack(tiny_model, PAIR) as running:
        yield running


@pytest_asyncio.fixture
async def locked(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    """A pair whose admin plane has a key."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    async with stack(tiny_model, PAIR, arguments=("--admin-key-file", str(file))) as s:
        yield s


# --- the key -----------------------------------------------------------------------------

POSTS = [
    "/pause", "/resume", "/update_weights", "/init_broadcaster", "/load_lora_adapter",
    "/v1/load_lora_adapter", "/unload_lora_adapter", "/v1/unload_lora_adapter",
    "/collective_rpc", "/reset_prefix_cache", "/sleep", "/wake_up",
]  # fmt: skip
GETS = ["/is_paused", "/is_sleeping", "/weight_version", "/v1/models", "/v1/rl/workers"]


@pytest.mark.pitfall(38)
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        f"Basic {KEY}",
        KEY,
        "Bearer \u00e9",
    ],
)
async def test_nothing_but_health_is_answered_without_the_key(
    locked: Stack, header: str | None
) -> None:
    """Every route, also those that do not exist; nothing happens at the workers."""
    headers = {} if header is None else {"Authorization": header}
    for path in [*POSTS, "/nowhere", "/v1/rl/workers/prefill-0/pause"]:
        reply = await admin_post(locked, path, headers=headers)
        assert reply.status == 401, path
        assert reply.error["code"] == "invalid_api_key"
        assert reply.headers["WWW-Authenticate"] == "Bearer"
    for path in GETS:
        assert (await admin_get(locked, path, headers)).status == 401
    assert (await admin_get(locked, "/health", headers)).status == 200
    assert not locked.pool.is_paused


async def test_the_key_opens_it(locked: Stack) -> None:
    """In any case of the scheme, as HTTP has it."""
    assert (await admin_post(locked, "/pause", headers=GIVEN)).status == 200
    lower = {"Authorization": f"bearer {KEY}"}
    assert (await admin_post(locked, "/resume", headers=lower)).status == 200
    text = (await locked.get("/metrics")).text
    assert 'tokenwire_admin_calls_total{action="pause",outcome="ok"} 1.0' in text


@pytest.mark.pitfall(38)
async def test_the_key_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By ``hmac.compare_digest``, whatever was given."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("tokenwire.frontend.admin_key.hmac.compare_digest", compare)
    key = AdminKey(KEY)
    given = [None, f"Bearer {KEY}", f"Basic {KEY}", "Bearer x"]
    assert [key.fits(one) for one in given] == [False, True, False, False]
    assert [one for one, _ in compared] == [b"", KEY.encode(), KEY.encode(), b"x"]


def test_keys_that_are_none_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty or short key, or a file that cannot be read."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert not AdminKey.read(None).is_set
    with pytest.raises(UnusableFile, match="cannot read"):
        AdminKey.read(str(tmp_path / "none"))
    file = tmp_path / "short"
    file.write_text("short\n")
    file.chmod(0o604)
    with pytest.raises(UnusableFile, match="to everyone"):
        AdminKey.read(str(file))
    file.chmod(0o600)
    with pytest.raises(UnusableFile, match="16 characters or more"):
        AdminKey.read(str(file))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert AdminKey.read(None).fits(f"Bearer {KEY}")


async def test_a_page_in_a_browser_can_do_nothing(pair: Stack) -> None:
    """Without a key, who is on the machine may use it; a page would be, too."""
    reply = await admin_post(pair, "/pause", headers={"Origin": "https://evil.test"})
    assert reply.status == 403
    assert not pair.pool.is_paused


async def test_the_public_listener_has_none_of_it(pair: Stack) -> None:
    """Admin routes are on the admin plane alone."""
    for path in POSTS:
        assert (await pair.post(path, {})).status == 404
    assert (await pair.get("/v1/rl/workers")).status == 404


# --- what routes take --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=maybe", "mode"),
        ("/pause?clear_cache=2", "clear_cache"),
        ("/pause?modus=keep", "modus"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=x", "level"),
        ("/wake_up?tags=all", "tags"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
    ],
)
async def test_bad_parameters_are_refused(pair: Stack, path: str, param: str) -> None:
    """By name; nothing happens."""
    reply = await admin_post(pair, path)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not pair.pool.is_paused


@pytest.mark.parametrize(
    "body",
    [
        {"weight_dir": 3},
        {"weight_dir": ""},
        {"weight_dir": "/x", "weight_version": ""},
        {"weight_dir": "/x", "mode": "maybe"},
        {"update_info": {}},
        [],
        "x",
    ],
)
async def test_bad_updates_are_refused(pair: Stack, body: Any) -> None:
    """400 in OpenAI's shape, and no worker was asked."""
    reply = await admin_post(pair, "/update_weights", body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


async def test_bodies_that_are_none(pair: Stack) -> None:
    """Missing, no JSON, or too large."""
    assert (await admin_post(pair, "/update_weights")).status == 400
    url = pair.admin + "/update_weights"
    for data, kind, status in (
        (b"{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"x=1", "application/x-www-form-urlencoded", 415),
        (b"[" * (MAX_BODY_BYTES + 1), "application/json", 413),
    ):
        headers = {"Content-Type": kind}
        async with pair.client.post(url, data=data, headers=headers) as answer:
            assert answer.status == status
            assert "error" in await answer.json()


async def test_unknown_routes_and_methods(pair: Stack) -> None:
    """As on the other listener."""
    assert (await admin_get(pair, "/pause")).status == 405
    assert (await admin_post(pair, "/nowhere")).status == 404


async def test_collective_rpc_is_off(pair: Stack) -> None:
    """It runs any method; the two that are known are what they are elsewhere."""
    reply = await admin_post(pair, "/collective_rpc", {"method": "echo"})
    assert (reply.status, reply.error["code"]) == (403, "not_allowed")
    assert "--admin-allow-collective-rpc" in reply.error["message"]


async def test_collective_rpc_where_it_is_allowed(tiny_model: Path) -> None:
    """The results of all workers, one after the other; an unknown method is 501."""
    arguments = ("--admin-allow-collective-rpc",)
    async with stack(tiny_model, PAIR, arguments=arguments) as running:
        body = {"method": "echo", "args": [1, "x"], "kwargs": {"a": None}}
        reply = await admin_post(running, "/collective_rpc", body)
        assert reply.json == {"results": [[1, "x", {"a": None}]] * 2}
        unknown = await admin_post(running, "/collective_rpc", {"method": "rm"})
        assert unknown.status == 501
        large = {"method": "echo", "args": ["x" * 30_000] * 2}
        assert (await admin_post(running, "/collective_rpc", large)).status == 413


# --- what trainers find ------------------------------------------------------------------

WORKER_KEYS = {
    "namespace", "component", "endpoint", "instance_id", "transport",
    "request_plane_url", "system_url", "admin_base_url", "world_size", "model",
    "routes", "error",
}  # fmt: skip


async def test_workers_are_found_as_prime_rl_wants_them(pair: Stack) -> None:
    """Its client refuses a key too many, at both levels, and equal addresses."""
    found = (await admin_get(pair, "/v1/rl/workers")).json
    assert found.keys() == {"protocol_version", "namespace", "workers"}
    assert found["protocol_version"] == 1
    assert len(found["workers"]) == 2
    for worker in found["workers"]:
        assert worker.keys() == WORKER_KEYS
        assert worker["model"] == MODEL_NAME
        assert isinstance(worker["instance_id"], int)
        assert worker["world_size"] == 1
    urls = {worker["admin_base_url"] for worker in found["workers"]}
    assert len(urls) == 2
    again = (await admin_get(pair, "/v1/rl/workers")).json
    assert again == found


async def test_one_worker_after_the_other_is_the_same_update(
    pair: Stack, tmp_path: Path
) -> None:
    """As Prime-RL updates what it has found: each by its address, by its method."""
    found = (await admin_get(pair, "/v1/rl/workers")).json["workers"]
    for folder in (weights(tmp_path / "step_1"), weights(tmp_path / "step_2", b"2")):
        paths = [one["admin_base_url"].removeprefix(pair.admin) for one in found]
        for path in paths:
            assert (await admin_get(pair, f"{path}/health")).status == 200
            assert (await admin_post(pair, f"{path}/pause?mode=keep")).status == 200
        call = {"method": "update_weights_from_path", "args": [str(folder)]}
        for path in paths:
            reply = await admin_post(pair, f"{path}/collective_rpc", call)
            assert reply.status == 200, reply.text
        for path in paths:
            assert (await admin_post(pair, f"{path}/resume")).status == 200
        assert len({link.status.update for link in pair.pool.links}) == 1
        assert {link.weight_version for link in pair.pool.links} == {folder.name}
        assert all(link.usable for link in pair.pool.links)
    assert (await admin_post(pair, "/v1/rl/workers/none/pause")).status == 404


async def test_ranks_follow_each_other_over_the_workers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server to the trainer, two engines here: each has its own ranks."""
    workers = [
        SimWorker(tiny_model, Role.AGGREGATED, f"w{n}", ("--step-ms", "0"))
        for n in range(2)
    ]
    asked: dict[str, Any] = {}
    try:
        async with frontend(tiny_model) as running:
            for worker in workers:
                await worker.start(world_size=4)

                def spy(
                    action: Any,
                    *rest: Any,
                    name: str = worker.name,
                    begin: Any = worker.engine.administer,
                ) -> None:
                    asked[name] = action
                    begin(action, *rest)

                monkeypatch.setattr(worker.engine, "administer", spy)
            await running.know(workers)
            body = {
                "host": "10.0.0.1",
                "port": 29500,
                "rank_offset": 8,
                "inference_world_size": 16,
                "timeout": 60,
                "quantize_in_weight_transfer": False,
            }
            reply = await admin_post(running, "/init_broadcaster", body)
            assert reply.json == {"status": "ok"}
    finally:
        for worker in workers:
            await worker.stop()
    assert {name: one.args[2] for name, one in asked.items()} == {"w0": 8, "w1": 12}
    assert [one.args[:2] + one.args[3:] for one in asked.values()] == [
        ["10.0.0.1", 29500, 16, 60.0, False]
    ] * 2


async def test_the_trainers_checks_before_it_begins(pair: Stack) -> None:
    """Health and the model's name, on the plane's own address."""
    assert (await admin_get(pair, "/health")).json["status"] == "ok"
    models = (await admin_get(pair, "/v1/models")).json["data"]
    assert [one["id"] for one in models] == [MODEL_NAME]


DOCUMENT = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()


async def test_the_commands_of_the_page_work(tiny_model: Path, tmp_path: Path) -> None:
    """The sequence of Prime-RL as docs/admin.md shows it."""
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    calls = [line for line in commands if line.startswith("curl ")]
    assert len(calls) == 3
    async with stack(tiny_model, PAIR) as running:
        given = {"$ADMIN": running.admin, "$WEIGHTS": str(weights(tmp_path / "w"))}
        for call in calls:
            text = call
            for name, value in given.items():
                text = text.replace(name, value)
            words = shlex.split(text)
            method, url = words[words.index("-X") + 1 :][:2]
            data = words[words.index("-d") + 1] if "-d" in words else None
            headers = {"Content-Type": "application/json"} if data else {}
            async with running.client.request(
                method, url, data=data, headers=headers
            ) as answer:
                assert answer.status == 200, call
        assert {link.weight_version for link in running.pool.links} == {"w"}
        assert not running.pool.is_paused


async def test_the_page_names_the_routes_that_there_are(pair: Stack) -> None:
    """All of them, by their method; and answers as it says."""
    listed = {
        path
        for line in DOCUMENT.splitlines()
        if line.startswith(("| `POST", "| `GET"))
        for path in re.findall(r"(/[a-z0-9_/]+)`", line.split("|")[1])
    }
    assert listed == {*POSTS, *GETS, "/weight_info", "/health"}
    for line in DOCUMENT.splitlines():
        row = [part.strip() for part in line.split("|")[1:-1]]
        if len(row) == 3 and row[0].startswith("`GET /is_paused"):
            told = (await admin_get(pair, "/is_paused")).json
            assert f"`{json.dumps(told)}`" == row[2]
