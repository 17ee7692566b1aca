"""The front doors inside the training loops of other packages: one adapter per file, imported by its name."""
