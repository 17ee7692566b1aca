"""One feed for many jobs of a node: bytes are fetched and samples decoded once, whatever the number of jobs."""
