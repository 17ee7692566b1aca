"""Gradients across ranks: what travels, how often, and to whom. The function is `salience.sync`."""

from salience.gradients.handle import Handle, sync
from salience.gradients.hybrid import serve

__all__ = ["Handle", "serve", "sync"]
