"""The Redis tier against real servers: with password, with TLS, killed, stopped, restarted, out of memory."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from salience.errors import ConfigError, MissingExtra
from salience.feed import redis_tier
from salience.feed.redis_tier import MAX_VALUE_BYTES, RedisTier, open_redis, parts
from salience.feed.tiers import TierCounts

from conftest import require

SECRET = "hunter2-not-for-anyone"
SIZES = np.full(1000, 5000, dtype=np.int64)


def sample(i: int) -> bytes:
    return bytes([i % 251]) * 5000


def samples(ids: range) -> dict[int, bytes]:
    return {i: sample(i) for i in ids}


class Server:
    """A redis-server on a port of its own; `start()` again after `kill()` comes back empty at the same port."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        self.folder, self.options, self.tls = folder, options, tls
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        for _ in range(20):  # another test may take the free port first
            port = self.port or free_port()
            ports = ["--port", "0", "--tls-port", str(port)] if self.tls else ["--port", str(port)]
            self.process = subprocess.Popen(
                ["redis-server", *ports, "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder), *self.options],
                stdout=subprocess.DEVNULL,
            )
            if self._answers(port):
                self.port = port
                return
        raise RuntimeError("redis-server does not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _answers(self, port: int) -> bool:
        assert self.process is not None
        while self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return self.process.poll() is None
            time.sleep(0.005)
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(folder: Path, *options: str, tls: bool = False) -> Iterator[Server]:
    require(shutil.which("redis-server") is not None, "redis-server")
    server = Server(folder, *options, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def no_password(monkeypatch):
    for name in redis_tier.PASSWORDS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Server]:
    """One server for tests that do it no harm; each has a source of its own."""
    with serving(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


Opened = Callable[..., RedisTier]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def opened(request, said) -> Iterator[Opened]:
    """Opens tiers, with a source named after the test, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_one(url: str, *, timeout: float = 3.0, pause: float = 30.0, sizes=SIZES) -> RedisTier:
            tier = RedisTier(url, request.node.name, sizes, said.append, timeout=timeout, pause=pause)
            stack.callback(tier.close)
            tier.open()
            return tier

        yield open_one


def until(true: Callable[[], object]) -> None:
    """Wait for something that other processes do."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


# ---------------------------------------------------------------- keeping


def test_what_was_put_comes_back_to_every_node_and_nothing_else(shared, opened, said):
    here, there = opened(shared.url), opened(shared.url)
    here.put(samples(range(0, 600, 2)))
    assert there.get(range(600)) == samples(range(0, 600, 2))
    assert here.counts == TierCounts(writes=300, written_bytes=300 * 5000)
    assert there.counts == TierCounts(asked=600, hits=300, hit_bytes=300 * 5000)
    assert said == []


def test_what_is_there_is_not_written_again(shared, opened):
    tier = opened(shared.url)
    tier.put(samples(range(3)))
    tier.put(samples(range(5)))
    assert (tier.counts.writes, tier.counts.refused) == (5, 0)


def test_sources_do_not_mix(shared, opened, said):
    tier = opened(shared.url)
    tier.put({1: sample(1)})
    with contextlib.closing(open_redis(shared.url, "another", SIZES, said.append)) as other:
        assert other.get([1]) == {}


@pytest.mark.parametrize("hurt", [lambda b: b[:-1] + b"?", lambda b: b[:-1], lambda b: b"", lambda b: b"?" + b[1:]])
def test_a_damaged_value_is_removed_and_may_be_written_anew(shared, opened, said, hurt):
    tier = opened(shared.url)
    tier.put(samples(range(3)))
    tier._client.set(tier._key(1), hurt(tier._client.get(tier._key(1))))
    assert tier.get(range(3)) == {0: sample(0), 2: sample(2)}
    assert tier.counts.bad == 1
    tier.put({1: sample(1)})
    assert tier.get(range(3)) == samples(range(3))
    assert said == []


def test_questions_are_split_by_keys_and_bytes():
    assert parts([]) == []
    assert parts([1] * 5, most=100, keys=2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert parts([60, 40, 1, 300, 5], most=100, keys=9) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]


def test_a_sample_too_large_for_redis_is_left_to_the_store(shared, opened, said):
    sizes = np.array([MAX_VALUE_BYTES, 5000])
    tier = opened(shared.url, sizes=sizes)
    tier.put({0: bytes(MAX_VALUE_BYTES), 1: sample(1)})
    assert tier.get([0, 1]) == {1: sample(1)}
    assert (tier.counts.writes, tier.counts.refused) == (1, 1)
    assert said == []


# ---------------------------------------------------------------- trouble


def test_a_server_killed_under_several_threads_is_one_warning_and_used_again_when_it_is_back(server, opened, said):
    tier = opened(server.url, pause=0.05)
    tier.put(samples(range(100)))
    stop, wrong = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            for i, data in tier.get(range(150)).items():
                if data != sample(i):
                    wrong.append(i)
            tier.put(samples(range(20)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: tier.counts.hits > 200)
        server.kill()
        until(lambda: said)
        server.start()
        hits = tier.counts.hits
        until(lambda: tier.counts.hits > hits)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(said) == 1
    assert "is not used for now (no connection); samples come from the store" in said[0]


def test_a_lost_server_is_left_alone_for_a_while(server, opened, said):
    tier = opened(server.url)
    tier.put(samples(range(3)))
    server.kill()
    assert tier.get(range(3)) == {}
    server.start()
    tier.put(samples(range(3)))
    assert tier.get(range(3)) == {}
    assert (tier.counts.writes, tier.counts.refused, len(said)) == (3, 3, 1)


def test_a_server_that_is_away_at_the_start_is_used_when_it_comes(server, opened, said):
    server.kill()
    tier = opened(server.url, pause=0.01)
    assert tier.get([1]) == {}
    assert len(said) == 1
    server.start()
    time.sleep(0.02)
    tier.put({1: sample(1)})
    assert tier.get([1]) == {1: sample(1)}
    assert len(said) == 1


def test_a_connection_that_was_closed_for_being_idle_is_made_anew(shared, opened, said):
    tier = opened(shared.url)
    tier.put({1: sample(1)})
    with contextlib.closing(opened(shared.url)) as other:
        other._client.client_kill_filter(skipme=True)
    assert tier.get([1]) == {1: sample(1)}
    assert said == []


def test_a_server_that_does_not_answer_is_waited_for_once(server, opened, said):
    tier = opened(server.url, timeout=0.1, pause=0.2)
    tier.put({1: sample(1)})
    server.process.send_signal(signal.SIGSTOP)
    assert tier.get([1]) == {}
    server.process.send_signal(signal.SIGCONT)
    assert len(said) == 1
    assert "no answer within 0.1 s" in said[0]
    until(lambda: tier.get([1]) == {1: sample(1)})
    assert len(said) == 1


def test_a_server_out_of_memory_is_one_warning_and_still_read(server, opened, said):
    tier = opened(server.url, pause=0.01)
    tier._client.config_set("maxmemory", tier._client.info("memory")["used_memory"] + 500_000)
    for first in range(0, 300, 20):
        tier.put(samples(range(first, first + 20)))
    kept = tier.get(range(300))
    assert 0 < len(kept) < 300
    assert kept == {i: sample(i) for i in kept}
    assert (tier.counts.writes, tier.counts.refused) == (len(kept), 300 - len(kept))
    assert len(said) == 1
    assert "takes no more samples (it is out of memory); it is read from" in said[0]
    tier._client.config_set("maxmemory", 0)
    time.sleep(0.02)
    tier.put({299: sample(299)})
    assert tier.get([299]) == {299: sample(299)}


# ---------------------------------------------------------------- opening


def test_the_password_comes_from_the_url_or_the_environment(tmp_path, opened, said, monkeypatch):
    with serving(tmp_path, "--requirepass", SECRET) as server:
        opened(server.url.replace("//", f"//:{SECRET}@")).put({1: sample(1)})
        for name in redis_tier.PASSWORDS:
            with monkeypatch.context() as patch:
                patch.setenv(name, SECRET)
                assert opened(server.url).get([1]) == {1: sample(1)}
        assert said == []


def test_a_wrong_or_missing_password_is_an_error_without_it(tmp_path, opened, monkeypatch):
    with serving(tmp_path, "--requirepass", "right") as server:
        with pytest.raises(ConfigError, match=r"refuses the user or password.*SALIENCE_REDIS_PASSWORD"):
            opened(server.url)
        for url in (server.url.replace("//", f"//:{SECRET}@"), server.url.replace("//", f"//me:{SECRET}@")):
            with pytest.raises(ConfigError, match="refuses the user or password") as caught:
                opened(url)
            assert SECRET not in "".join(traceback.format_exception(caught.value))
        monkeypatch.setenv("REDIS_PASSWORD", SECRET)
        with pytest.raises(ConfigError, match="refuses the user or password"):
            opened(server.url)


def test_a_lost_server_is_named_without_its_password(tmp_path, opened, said):
    with serving(tmp_path, "--requirepass", SECRET) as server:
        tier = opened(server.url.replace("//", f"//:{SECRET}@"))
        server.kill()
        tier.get([1])
        assert f"The Redis at 127.0.0.1:{server.port}/0 is not used" in said[0]
        assert SECRET not in said[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    require(shutil.which("openssl") is not None, "openssl")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=salience", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


def test_tls_with_an_authority_that_is_named_and_a_password(tmp_path, certificate, opened, said):
    made, key = certificate
    tls = ("--tls-cert-file", str(made), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with serving(tmp_path, *tls, "--requirepass", SECRET, tls=True) as server:
        url = server.url.replace("//", f"//:{SECRET}@")
        tier = opened(f"{url}?ssl_ca_certs={made}")
        tier.put(samples(range(300)))
        assert tier.get(range(300)) == samples(range(300))
        with pytest.raises(ConfigError, match=r"certificate.*is not trusted.*ssl_ca_certs") as caught:
            opened(url)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        with pytest.raises(ConfigError, match="certificate"):  # it is for another name
            opened(f"{url}?ssl_ca_certs={made}".replace("127.0.0.1", "localhost"))
        with pytest.raises(ConfigError, match="names a file as ssl_ca_certs that is not there"):
            opened(f"{url}?ssl_ca_certs={tmp_path}/none.pem")
        assert said == []


def test_a_database_the_server_has_not_is_an_error(shared, opened):
    with pytest.raises(ConfigError, match=r"/99 refuses to be used; see that it has this database"):
        opened(shared.url.removesuffix("0") + "99")


@pytest.mark.parametrize(
    ("url", "said_of_it"),
    [
        ("host:6379", "is not the URL of a Redis server; write for example redis://host:6379/0"),
        (f":{SECRET}@host:6379", "is not the URL"),
        (f"redsi://:{SECRET}@host", "Did you mean 'redis'"),
        (f"redis://:{SECRET}?x@host:6379/0", "cannot be read"),
        (f"redis://:{SECRET}/x@host:6379/0", "cannot be read"),
        (f"redis://:{SECRET}@host:port/0", "cannot be read"),
        (f"redis://:{SECRET}@127.0.0.1:1/0?unknown={SECRET}", "has an option that the redis package does not know"),
    ],
)
def test_a_url_that_cannot_be_meant_is_one_sentence_without_secrets(url, said_of_it, said):
    with pytest.raises(ConfigError, match=said_of_it) as caught:
        open_redis(url, "x", SIZES, said.append)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_without_the_redis_package_the_extra_is_named(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"pip install 'salience\[redis\]'"):
        open_redis("redis://127.0.0.1:1", "x", SIZES, said.append)
