"""What may differ from window to window, as a value; and the settings of an earlier run, read from its event log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from salience import events
from salience.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How one window is run."""

    workers: int = 0
    cache: int = 0
    """Bytes of the cache; 0 = no cache."""
    treat: bool = False
    """True if intermediates are reused."""
    select: bool = False
    """True if fewer samples are visited."""

    @property
    def lossy(self) -> bool:
        """True if this can change the trained model."""
        return self.treat or self.select

    @property
    def numbers(self) -> list[float]:
        """The settings as numbers, for the other ranks."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Settings:
        workers, cache, treat, select = numbers
        return cls(workers=int(workers), cache=int(cache), treat=bool(treat), select=bool(select))


def recorded(path: str | Path) -> dict[int, Settings]:
    """The `settings` events of a log (or run folder with one): the first window of each setting, and the setting."""
    path = Path(path)
    path = path / "run.jsonl" if path.is_dir() else path
    names = [field.name for field in fields(Settings)]
    try:
        found = {
            int(event["window"]): Settings.of([event[name] for name in names])
            for event in events.read(path)
            if event["kind"] == "settings"
        }
    except OSError as cause:
        raise ConfigError(
            f"auto is {str(path)!r}, which cannot be read ({cause.strerror}); it is True, 'lossy' or the event log of a run."
        ) from cause
    if not found:
        raise ConfigError(f"The event log {str(path)!r} has no settings to replay; it must be of a run with auto.")
    return found
