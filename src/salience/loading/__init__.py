"""What a Loader does besides iterating, one class in layers:

Reading     samples of a Source: the cache, what it did, and broken samples
Staging     stages of augmentation, and what of them is reused
Deciding    what `auto` changes between two windows
"""

from salience.loading.deciding import Deciding

__all__ = ["Deciding"]
