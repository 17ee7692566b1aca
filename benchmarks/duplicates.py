"""How many short documents per second are searched for near-duplicates, and are they found?

Documents of 20 to 40 words are made up; a tenth of them are near-copies (one or two words changed) of earlier ones. Ours is
`salience.select.duplicates.near_duplicates`; the peer is `datasketch` (MinHash with 64 permutations over the same eight-byte
shingles by `update_batch`, and its LSH index at the same threshold), on `--peer` of the documents. Embeddings need a model;
they are not compared.

`documents_per_second`, `speedup` over the peer, `recall` of planted copies of true similarity from 0.8 on, `wrong`
(copies of nothing that were given a group), and the largest memory of the process. It would embarrass us if the peer were
faster or found more.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator

import numpy as np

from salience.select.duplicates import SHINGLE, near_duplicates

THRESHOLD = 0.7


def documents(n: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Documents, and of which earlier one each is a near-copy (-1 = none)."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(3, 10, 20_000)]
    texts: list[str] = []
    origin = np.where(rng.random(n) < 0.1, rng.integers(0, np.maximum(1, np.arange(n))), -1)
    origin[0] = -1
    sizes, changes = rng.integers(20, 41, n), rng.integers(1, 3, n)
    drawn = rng.integers(0, len(words), int(sizes.sum()))
    at = 0
    for i in range(n):
        if origin[i] >= 0:
            parts = texts[origin[i]].split()
            for place in rng.integers(0, len(parts), changes[i]).tolist():
                parts[place] = words[drawn[at]]
        else:
            parts = [words[k] for k in drawn[at : at + sizes[i]].tolist()]
        texts.append(" ".join(parts))
        at += sizes[i]
    return texts, origin


def jaccard(one: str, other: str) -> float:
    a, b = ({text[i : i + SHINGLE] for i in range(len(text) - SHINGLE + 1)} for text in (one, other))
    return len(a & b) / len(a | b)


def by_datasketch(texts: list[str]) -> Iterator[tuple[int, int]]:
    """Pairs that datasketch says are near-copies."""
    from datasketch import MinHash, MinHashLSH

    index, made = MinHashLSH(threshold=THRESHOLD, num_perm=64), []
    for i, text in enumerate(texts):
        data = text.encode()
        sketch = MinHash(num_perm=64)
        sketch.update_batch([data[k : k + SHINGLE] for k in range(len(data) - SHINGLE + 1)])
        made.append(sketch)
        yield from ((int(other), i) for other in index.query(sketch) if made[int(other)].jaccard(sketch) >= THRESHOLD)
        index.insert(str(i), sketch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 documents, within a minute")
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--peer", type=int, default=10_000, help="documents for datasketch")
    options = parser.parse_args()
    if options.quick:
        options.n, options.peer = 20_000, 2_000
    texts, origin = documents(options.n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    begin = time.perf_counter()
    found = near_duplicates(texts, threshold=THRESHOLD)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    rng = np.random.default_rng(1)
    planted = rng.permutation(np.flatnonzero(origin >= 0))[:5_000]
    alike = np.array([jaccard(texts[i], texts[origin[i]]) >= 0.8 for i in planted])
    together = (found.group[planted] == found.group[origin[planted]]) & (found.group[planted] >= 0)
    recall = float(together[alike].mean())
    family = np.zeros(options.n, dtype=bool)
    family[np.flatnonzero(origin >= 0)] = family[origin[origin >= 0]] = True
    wrong = int(((found.group >= 0) & ~family).sum())

    part = texts[: options.peer]
    begin = time.perf_counter()
    pairs = list(by_datasketch(part))
    peer_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    ours_on_part = near_duplicates(part, threshold=THRESHOLD)
    part_seconds = time.perf_counter() - begin
    alone = [
        i for i in np.flatnonzero(origin[: options.peer] >= 0).tolist() if jaccard(part[i], part[origin[i]]) >= 0.8
    ]
    peer_found = {(one, other) for one, other in pairs}
    print(
        json.dumps({
            "documents_per_second": round(options.n / seconds), "speedup": round(peer_seconds / part_seconds, 1),
            "recall": round(recall, 4), "wrong": wrong,
            "recall_on_part": round(float(np.mean([ours_on_part.group[i] == ours_on_part.group[origin[i]] for i in alone])), 4),
            "recall_of_datasketch_on_part": round(float(np.mean([(int(origin[i]), i) in peer_found for i in alone])), 4),
            "datasketch_per_second": round(options.peer / peer_seconds), "seconds": round(seconds, 1), "documents": options.n,
            "gib_before": round(before, 2), "gib_at_most": round(peak, 2),
            "groups": len(np.unique(found.group[found.group >= 0])),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
