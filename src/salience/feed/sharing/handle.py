"""A worker's access to a shared feed: it copies what others decoded, decodes what it is assigned, or reads by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from salience.errors import StateError, StoreError
from salience.feed.index import fingerprint
from salience.feed.reads import Broken, Counts
from salience.feed.shared import SERIAL_SHIFT
from salience.feed.sharing import codec
from salience.feed.sharing.wire import Gone, Line, Message
from salience.feed.source import Source
from salience.memory import Memory, Token

SECONDS_BETWEEN_TRIES = 0.5
"""Seconds between the first two attempts to reach a feed that is gone; each later pause is twice as long."""
LONGEST_PAUSE = 120.0
"""Maximum seconds between two attempts: if a feed hangs, every attempt takes the whole time-out."""
ANSWER_SECONDS = 30.0
"""Seconds after which a feed that does not answer counts as gone."""

Decoded = Callable[[Any], Any]


@dataclass(slots=True)
class Taken:
    """The samples of a batch, decoded."""

    samples: list[Any]
    """In the order of the ids; a Broken for a sample that cannot be read."""
    prints: dict[int, int]
    """Fingerprints of samples whose index has no checksums."""
    counts: Counts = field(default_factory=Counts)
    """Requests that this process itself made to the store."""
    fetching: float = 0.0
    decoding: float = 0.0


class SharedHandle:
    """Takes batches from a feed. Usable after a fork, and in spawned workers."""

    def __init__(self, path: str, source: Source, *, shares: bool, patience: float) -> None:
        """`shares`: samples are decoded into a form that other jobs may use; otherwise only their bytes are shared. `patience`:
        seconds for which the feed may hold up this job for slower ones."""
        self._path, self._source, self._shares, self._patience = path, source, shares, patience
        self._memory = Memory(8)
        self._job = self._memory.array("int64", 1)
        """Number of the job at the feed, which changes when the feed is restarted; 0 without a feed."""
        self._here: _Connection | None = None
        self._tried, self._pause = 0.0, SECONDS_BETWEEN_TRIES

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_path", "_source", "_shares", "_patience", "_memory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._job, self._here, self._tried = self._memory.array("int64", 1), None, 0.0
        self._pause = SECONDS_BETWEEN_TRIES

    def belongs_to(self, job: int) -> None:
        """Take batches for this job from now on; 0 = there is no feed."""
        self._job[0] = job

    def take(self, ticket: int, ids: Sequence[int], decode: Decoded) -> Taken:
        """The samples of a batch. `decode` turns bytes into a sample or a Broken."""
        connection = self._connected()
        if connection is not None:
            begin = time.perf_counter()
            try:
                taken = connection.take(ticket, ids, decode, self._shares)
                taken.fetching = time.perf_counter() - begin - taken.decoding
                self._pause = SECONDS_BETWEEN_TRIES
                return taken
            except Gone:
                self._drop()
        return self._alone(ids, decode)

    def _alone(self, ids: Sequence[int], decode: Decoded) -> Taken:
        begin = time.perf_counter()
        data, counts = self._source.read_counted(ids)
        fetching = time.perf_counter() - begin
        prints = {i: _print(self._source, i, part) for i, part in zip(ids, data, strict=True)}
        samples = [decode(part) for part in data]
        return Taken(samples, prints, counts, fetching, time.perf_counter() - begin - fetching)

    def _connected(self) -> _Connection | None:
        """The connection of this process to the feed; None if there is no feed."""
        job, here = int(self._job[0]), self._here
        if here is not None and (here.process, here.job) != (os.getpid(), job):
            if here.process == os.getpid():
                here.line.close()
            here = self._here = None
        if here is None and job and time.monotonic() - self._tried > self._pause:
            try:
                here = self._here = _Connection(self._path, job, self._source, ANSWER_SECONDS + self._patience)
            except (Gone, StateError):
                self._drop()
        return here

    def _drop(self) -> None:
        if self._here is not None:
            self._here.line.close()
        self._here, self._tried = None, time.monotonic()
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)


class _Connection:
    """A worker's connection, and the feed's memory as seen by the worker."""

    def __init__(self, path: str, job: int, source: Source, seconds: float) -> None:
        self.process, self.job, self._source = os.getpid(), job, source
        self.line = Line(path, timeout=seconds)
        answer = self.line.ask("hello", {"role": "worker", "job": job})
        if answer.kind != "welcome":
            self.line.close()
            raise Gone(str(answer.words.get("text")))
        words = answer.words
        self._memory = Memory.open(Token(words["path"], words["size"], words["inode"]))
        self._data = memoryview(self._memory.buffer)

    def take(self, ticket: int, ids: Sequence[int], decode: Decoded, shares: bool) -> Taken:
        """Like `SharedHandle.take`; raises Gone if the feed is not there, or does not deliver a sample."""
        serial, number = ticket >> SERIAL_SHIFT, ticket & ((1 << SERIAL_SHIFT) - 1)
        found: dict[int, Any] = {}
        taken = Taken([], {})
        self.line.tell("take", {"serial": serial, "number": number}, ids=list(dict.fromkeys(ids)))
        wanted = len(set(ids))
        while len(found) < wanted:
            chunk = self.line.hear()
            if "failed" in chunk.words:
                self.line.tell("rest")
                if chunk.words["failed"]:
                    raise StoreError(chunk.words["failed"])
                raise Gone("a sample does not fit into the memory of the feed")
            self._copy(chunk, found, taken, shares, decode)
            written = self._decode(chunk, found, taken, decode)
            if len(found) < wanted:
                self.line.tell("more", written=written)
            else:
                self.line.tell("rest", written=written)
        taken.samples = [found[i] for i in ids]
        return taken

    def _copy(self, chunk: Message, found: dict[int, Any], taken: Taken, shares: bool, decode: Decoded) -> None:
        """Copy samples that are in memory in the wanted form."""
        for i, offset, size, mark in chunk.array("ready").reshape(-1, 4).tolist():
            view = self._data[offset : offset + size]
            if shares:
                found[i] = codec.decode(view)
                taken.prints[i] = mark
            else:
                begin = time.perf_counter()
                data = bytes(view)
                taken.prints[i] = _print(self._source, i, data)
                found[i] = decode(data)
                taken.decoding += time.perf_counter() - begin
        for i, reason in chunk.words.get("broken", {}).items():
            found[int(i)] = Broken(reason)

    def _decode(self, chunk: Message, found: dict[int, Any], taken: Taken, decode: Decoded) -> list[int]:
        """Decode the samples assigned to this worker and put them into memory for others; returns those that were put there."""
        claims = chunk.array("claims").reshape(-1, 3).tolist()
        if not claims:
            return []
        begin = time.perf_counter()
        made = dict[int, codec.Encoded | None]()
        for i, offset, size in claims:
            data = bytes(self._data[offset : offset + size])
            taken.prints[i] = _print(self._source, i, data)
            found[i] = decode(data)
            made[i] = None if isinstance(found[i], Broken) else _encoded(found[i])
        taken.decoding += time.perf_counter() - begin
        sizes = [-1 if one is None else one.size for one in made.values()]
        answer = self.line.ask("made", ids=[*made], sizes=sizes, prints=[taken.prints[i] for i in made])
        written = list[int]()
        for (i, one), place in zip(made.items(), answer.array("places").tolist(), strict=True):
            if one is not None and place >= 0:
                one.write(self._data[place : place + one.size])
                written.append(i)
        return written


def _encoded(sample: Any) -> codec.Encoded | None:
    try:
        return codec.encode(sample)
    except codec.Unshareable:
        return None


def _print(source: Source, i: int, data: bytes | Broken) -> int:
    """The fingerprint of a sample whose index has no checksum, otherwise 0."""
    return 0 if source.index.check[i] or isinstance(data, Broken) else fingerprint(data)
