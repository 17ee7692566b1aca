"""Report: show it. Everything here reads events and nothing live."""
