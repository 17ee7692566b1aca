"""The front doors under other people's training loops: one adapter per file, imported by its name."""
