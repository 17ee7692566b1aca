"""Feed: the bytes of planned samples, in time."""

from salience.feed.index import Index

__all__ = ["Index"]
