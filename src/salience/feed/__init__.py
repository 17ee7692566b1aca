"""Feed: the bytes of planned samples, in time."""

from salience.feed.index import Index
from salience.feed.reads import Broken
from salience.feed.source import Source

__all__ = ["Broken", "Index", "Source"]
