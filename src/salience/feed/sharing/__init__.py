"""One feed for many jobs on a node: bytes are fetched and samples decoded once, however many jobs there are."""
