"""Secure links, with real sockets: who comes in, who does not, and what each side says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from support.stack import MODEL_NAME, SimWorker, Stack, eventually, frontend
from tokenwire.deploy.keys import main as keys_command, make_pair
from tokenwire.frontend import link as link_module
from tokenwire.frontend.config import parse_config as frontend_config
from tokenwire.frontend.keyring import Keyring
from tokenwire.frontend.link import Link, LinkState
from tokenwire.frontend.pool import Pool
from tokenwire.protocol.keys import KeyFiles
from tokenwire.protocol.messages import Role
from tokenwire.worker.config import parse_config as worker_config
from tokenwire.worker.gate import MAX_LINES, WINDOW_S, Complaints, Gate

STEP = ("--step-ms", "0")
DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


@dataclass
class Keys:
    """Key files of a frontend and a worker that know each other."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Keys:
        """Make two pairs, and the two lists."""
        for name in ("frontend", "worker", "stranger"):
            make_pair(folder / name)
        keys = cls(folder)
        keys.allow("frontend")
        keys.trust("worker")
        return keys

    def allow(self, *names: str) -> None:
        """Let the frontends of these names into the worker."""
        self._list("allowed", names)

    def trust(self, *names: str) -> None:
        """Have the frontend take the owners of these keys for its workers."""
        self._list("workers", names)

    def _list(self, file: str, names: tuple[str, ...]) -> None:
        lines = [(self.folder / f"{name}.public").read_text() for name in names]
        draft = self.folder / "draft"
        draft.write_text("".join(lines))
        draft.replace(self.folder / file)

    @property
    def of_worker(self) -> KeyFiles:
        """The worker's settings."""
        return KeyFiles(
            str(self.folder / "worker.secret"), str(self.folder / "allowed")
        )

    @property
    def of_frontend(self) -> KeyFiles:
        """The frontend's settings."""
        return KeyFiles(
            str(self.folder / "frontend.secret"), str(self.folder / "workers")
        )

    @property
    def arguments(self) -> list[str]:
        """The frontend's settings, as arguments."""
        files = self.of_frontend
        return [
            *("--curve-secret-key", files.secret_key),
            *("--curve-worker-keys", files.peer_keys),
        ]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Keys, and links that try again at once."""
    monkeypatch.setattr(link_module, "HANDSHAKE_AGAIN_S", 0.0)
    monkeypatch.setattr("tokenwire.frontend.pool.TICK_S", 0.05)
    return Keys.make(tmp_path)


@asynccontextmanager
async def working(
    model: Path, keys: KeyFiles | None, name: str = "w"
) -> AsyncGenerator[SimWorker]:
    """Run a worker."""
    worker = SimWorker(model, Role.AGGREGATED, name, STEP, keys=keys)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def pooled(files: KeyFiles, *endpoints: str) -> AsyncGenerator[Pool]:
    """Run a frontend's links."""
    pool = Pool(
        model=MODEL_NAME,
        tokenizer_sha256="",
        frontend_id="f",
        keyring=Keyring.read(files),
    )
    run = asyncio.create_task(pool.run())
    try:
        pool.set_endpoints(endpoints)
        yield pool
    finally:
        run.cancel()
        pool.close()


def only(pool: Pool) -> Link:
    """Return the one link of *pool*."""
    (link,) = pool.links
    return link


async def served(running: Stack) -> None:
    """Ask for something, and get it."""
    reply = await running.complete(prompt=[5] * 20, max_tokens=3)
    assert reply.status == 200
    assert reply.json["usage"]["completion_tokens"] == 3


async def test_those_who_know_each_other_talk(tiny_model: Path, keys: Keys) -> None:
    """A request goes through, over encrypted links."""
    async with (
        working(tiny_model, keys.of_worker) as worker,
        frontend(tiny_model, keys.arguments) as running,
    ):
        await running.know([worker])
        await served(running)


async def test_nothing_readable_is_on_the_wire(tiny_model: Path, keys: Keys) -> None:
    """Neither names nor ids, in either direction; in plain text they are."""
    plain = await overheard(tiny_model, None, [])
    secure = await overheard(tiny_model, keys.of_worker, keys.arguments)
    for secret in (b"wiretapped", b"token_ids", b"\5\0\0\0" * 20):
        assert secret in plain
        assert secret not in secure


async def overheard(
    model: Path, worker_keys: KeyFiles | None, arguments: list[str]
) -> bytes:
    """Return all that went over a link in both directions while it served."""
    seen = bytearray()
    open_taps: list[object] = []
    async with working(model, worker_keys, "wiretapped") as worker:
        real = worker.link.endpoint

        async def listen(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            open_taps.append(reader)
            await _pass(reader, writer, real, seen)
            open_taps.remove(reader)

        tap = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = tap.sockets[0].getsockname()[1]
        worker.link.endpoint = f"tcp://127.0.0.1:{port}"
        async with frontend(model, arguments) as running:
            await running.know([worker])
            await served(running)
        tap.close()
        await eventually(lambda: not open_taps, "the tap is closed")
    return bytes(seen)


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    endpoint: str,
    seen: bytearray,
) -> None:
    port = int(endpoint.rpartition(":")[2])
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                seen.extend(data)
                sink.write(data)
        sink.close()

    await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))
    await writer.wait_closed()
    await there_writer.wait_closed()


async def test_an_unlisted_frontend_is_refused_until_it_is_listed(
    tiny_model: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides name its key, once; the list is read again without a restart."""
    keys.allow("stranger")
    own = (keys.folder / "frontend.public").read_text()[:8]
    async with (
        working(tiny_model, keys.of_worker) as worker,
        pooled(keys.of_frontend, worker.link.endpoint) as pool,
    ):
        link = only(pool)
        await eventually(lambda: link._channel.num_keys_tried >= 3)  # pyright: ignore[reportPrivateUsage]
        assert link.state is LinkState.REFUSED
        assert f"does not allow this frontend's key {own}..." in link.reason
        said = [text for text in caplog.messages if own in text]
        assert len(said) == 2, said
        assert any("127.0.0.1 is refused" in text for text in said)

        keys.allow("stranger", "frontend")
        await eventually(lambda: link.usable, "let in")


async def test_a_key_that_is_struck_off_is_out_at_once(
    tiny_model: Path, keys: Keys
) -> None:
    """Its connection does not live on, and what it runs is aborted."""
    async with (
        working(tiny_model, keys.of_worker) as worker,
        pooled(keys.of_frontend, worker.link.endpoint) as pool,
    ):
        link = only(pool)
        await eventually(lambda: link.usable)
        keys.allow("stranger")
        await eventually(lambda: link.state is LinkState.REFUSED, "thrown out")
        assert "does not allow" in link.reason
        assert not worker.service._frontends  # pyright: ignore[reportPrivateUsage]


async def test_another_worker_than_expected_gets_nothing(
    tiny_model: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker must prove its key; both sides say what is wrong."""
    keys.trust("stranger")
    expected = (keys.folder / "stranger.public").read_text()[:8]
    own = (keys.folder / "worker.public").read_text()[:8]
    async with (
        working(tiny_model, keys.of_worker) as worker,
        pooled(keys.of_frontend, worker.link.endpoint) as pool,
    ):
        link = only(pool)
        await eventually(lambda: link.state is LinkState.REFUSED)
        assert f"its key is not {expected}..." in link.reason
        await eventually(
            lambda: any(f"another key than {own}" in text for text in caplog.messages)
        )
        # The workers' key is being changed: old and new are in the list.
        keys.trust("stranger", "worker")
        await eventually(lambda: link.usable, "the second key is tried")


async def test_a_key_of_one_endpoint_goes_before_that_of_all(
    tiny_model: Path, keys: Keys
) -> None:
    """And an endpoint without any key is not gone to."""
    async with working(tiny_model, keys.of_worker) as worker:
        right = (keys.folder / "worker.public").read_text().split()[0]
        wrong = (keys.folder / "stranger.public").read_text().split()[0]
        lines = f"{wrong}\n{right} {worker.link.endpoint} of this one\n"
        (keys.folder / "workers").write_text(lines)
        async with pooled(keys.of_frontend, worker.link.endpoint) as pool:
            await eventually(lambda: only(pool).usable)
            (keys.folder / "workers").write_text(f"{right} tcp://127.0.0.1:1\n")
            pool.set_endpoints([worker.link.endpoint, "tcp://127.0.0.1:2"])
            reasons = [link.reason for link in pool.links]
            assert reasons[0] == ""
            assert reasons[1].endswith("workers has no key for this worker")


async def test_plain_text_and_curve_do_not_talk(
    tiny_model: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Each side says which option is missing where."""
    async with (
        working(tiny_model, keys.of_worker) as secure,
        pooled(KeyFiles(), secure.link.endpoint) as pool,
    ):
        await eventually(lambda: only(pool).state is LinkState.REFUSED)
        assert "the worker wants CURVE" in only(pool).reason
        await eventually(
            lambda: any("it speaks plain text" in text for text in caplog.messages)
        )
    async with (
        working(tiny_model, None) as plain,
        pooled(keys.of_frontend, plain.link.endpoint) as pool,
    ):
        await eventually(lambda: only(pool).state is LinkState.REFUSED)
        assert "speaks plain text" in only(pool).reason


async def test_without_keys_only_this_machine_is_gone_to(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are refused by a sentence; what is left serves."""
    async with (
        working(tiny_model, None) as worker,
        pooled(KeyFiles(), "tcp://192.0.2.1:5", worker.link.endpoint) as pool,
    ):
        await eventually(lambda: pool.ready)
        far, near = pool.instances()
        assert (far.state, near.state) == ("refused", "ready")
        assert "--insecure-plaintext" in far.reason
        assert sum("192.0.2.1" in text for text in caplog.messages) == 1

    async with pooled(KeyFiles(insecure_plaintext=True), "tcp://192.0.2.1:5") as pool:
        assert only(pool).state is LinkState.CONNECTING


async def test_nobody_comes_in_when_nobody_answers_for_them(
    tiny_model: Path, keys: Keys
) -> None:
    """Without its handler, ZeroMQ would let in everyone who has the public key."""
    async with working(tiny_model, keys.of_worker) as worker:
        gate = worker.link._gate  # pyright: ignore[reportPrivateUsage]
        assert gate is not None
        zap = gate._zap  # pyright: ignore[reportPrivateUsage]
        assert zap is not None
        zap.unbind("inproc://zeromq.zap.01")
        async with pooled(keys.of_frontend, worker.link.endpoint) as pool:
            await eventually(lambda: only(pool)._channel.num_keys_tried >= 3)  # pyright: ignore[reportPrivateUsage]
            assert only(pool).state is LinkState.REFUSED


async def test_garbage_on_the_socket_hurts_nobody(tiny_model: Path, keys: Keys) -> None:
    """A port scanner, or a plain ZeroMQ peer, comes to no message."""
    async with (
        working(tiny_model, keys.of_worker) as worker,
        frontend(tiny_model, keys.arguments) as running,
    ):
        await running.know([worker])
        port = int(worker.link.endpoint.rpartition(":")[2])
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.close()
        await served(running)


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """So many lines in a window, the same one once, and then how many there were."""
    caplog.set_level(logging.WARNING)
    complaints = Complaints()
    for second in range(50):
        complaints.say(f"stranger {second // 2}", float(second))
    assert len(caplog.messages) == MAX_LINES
    complaints.say("stranger 1", WINDOW_S)

    assert caplog.messages[-2:] == [
        "40 more connections were refused in 60 s",
        "stranger 1",
    ]


def test_keys_are_made_privately_and_not_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0600 for the secret; --force is needed to replace; the public keys are printed."""
    keys_command([str(tmp_path / "a"), str(tmp_path / "b")])
    printed = capsys.readouterr().out
    assert printed == "".join(
        (tmp_path / f"{name}.public").read_text() for name in ("a", "b")
    )
    secret = tmp_path / "a.secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.public",
        "a.secret",
        "b.public",
        "b.secret",
    ]

    before = secret.read_text()
    with pytest.raises(SystemExit, match=r"a\.secret is there already; --force"):
        keys_command([str(tmp_path / "a")])
    assert secret.read_text() == before
    keys_command([str(tmp_path / "a"), "--force"])
    key = secret.read_text().split("\n")[1]
    assert zmq.curve_public(key.encode()).decode() in capsys.readouterr().out
    shutil.rmtree(tmp_path)
    with pytest.raises(SystemExit, match="No such file"):
        keys_command([str(tmp_path / "a")])


def test_the_documented_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/security.md makes keys, and its commands take them."""
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    commands = [
        shlex.split(command)
        for block in blocks
        for command in block.replace("\\\n", " ").splitlines()
        if command.startswith("tokenwire-")
    ]
    monkeypatch.chdir(tmp_path)
    names: set[str] = set()
    for name, *arguments in commands:
        names.add(name)
        if name == "tokenwire-keys":
            keys_command(arguments)
        elif name == "tokenwire-worker":
            Gate(worker_config(arguments).keys)
        elif name == "tokenwire-frontend":
            Keyring.read(frontend_config(arguments).keys)
    assert names == {"tokenwire-keys", "tokenwire-worker", "tokenwire-frontend"}
    assert capsys.readouterr().out.count("\n") == 3  # two of CURVE, an API key


def test_what_the_document_quotes_is_what_is_said() -> None:
    """Every sentence in its table of failures is in the sources."""
    rows = re.findall(
        r"^\| (?:frontend|worker), .*? \| `(.*?)`", DOCUMENT.read_text(), re.MULTILINE
    )
    assert len(rows) == 7
    sources = "".join(
        "".join(path.read_text().split('"'))
        for folder in ("frontend", "worker")
        for path in (DOCUMENT.parents[1] / folder).glob("*.py")
    )
    said = " ".join(re.sub(r"\n\s+f?", "", sources).split())
    for row in rows:
        for words in re.split(r"10\.0\.0\.7|\S{8}\.\.\.|\.\.\.", row):
            assert words.strip() in said, words
