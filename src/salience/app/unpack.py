"""The uncompressed twin of a .tar.gz, in which members can be read by offset; it is unpacked once and kept."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from salience.errors import DataError
from salience.files import atomic

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""
GZIP_MAGIC = b"\x1f\x8b"


def plain_tar(tar: Path, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The tar itself, or the plain twin of a gzipped one in `cache` (by default $XDG_CACHE_HOME/salience)."""
    try:
        with tar.open("rb") as file:
            if file.read(len(GZIP_MAGIC)) != GZIP_MAGIC:
                return tar
        status = tar.stat()
    except OSError as cause:
        raise DataError(f"{tar} cannot be read: {cause.strerror or cause}; check its permissions.") from cause
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "salience"
    of_path = _digest(str(tar))
    plain = cache / f"{of_path}-{_digest(f'{status.st_size} {status.st_mtime_ns}')}.tar"
    if not plain.exists():
        try:
            _unpack(tar, plain, status.st_size, progress)
        except (EOFError, zlib.error, gzip.BadGzipFile) as cause:
            raise DataError(f"{tar} is a truncated or damaged archive; download or pack it again.") from cause
        except OSError as cause:
            raise DataError(
                f"{tar} cannot be unpacked into {cache}: {cause.strerror or cause}; free some space there, or set "
                "XDG_CACHE_HOME to another folder."
            ) from cause
    for stale in cache.glob(f"{of_path}-*.tar"):  # of this archive as it was before it changed
        if stale != plain:
            stale.unlink(missing_ok=True)
    return plain


def _unpack(tar: Path, plain: Path, size: int, progress: Progress | None) -> None:
    """Unpack the archive; the twin appears whole or not at all."""
    plain.parent.mkdir(parents=True, exist_ok=True)
    with tar.open("rb") as packed, gzip.open(packed) as stream, atomic(plain, sync=False) as out:
        while block := stream.read(1 << 20):
            out.write(block)
            if progress is not None:
                progress(packed.tell(), size)


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:24]
