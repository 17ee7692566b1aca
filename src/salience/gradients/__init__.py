"""Gradients across ranks: what travels, how often, and to whom. The function is `salience.sync`."""

from salience.gradients.handle import Handle, sync

__all__ = ["Handle", "sync"]
