"""What do two-stage training, selection and batches by length gain on text, against a shorter run at equal visits?

Two worked examples, on text that ships with Python: the docstrings of the standard library.

classifier  a small transformer says which package a docstring is from (the ten largest). Three quarters of the labels are weak:
            `--wrong` of those are wrong. Two stages: everything, then the clean part (`quality=`), against a shorter
            uniform run over everything with as many visits, its schedule fitted. `text_vs_shorter` in points of accuracy. A
            third arm, `weighted`, is the honest other control: the clean part alone, for as many visits.
language    a small GPT on bytes, batches by length (`batch_tokens=`), `select="default"` against a shorter uniform run with as
            many visits. `lm_vs_shorter` is the validation loss of the shorter run minus ours, in nats per byte.

`padding_saved` is the share of tokens that batches of equal numbers of documents would have computed in addition. It would
embarrass us if one of the differences were below 0.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import salience

PAD = 0
LONGEST = 192


def docstrings() -> list[tuple[str, str]]:
    """(package, text) of every docstring of the standard library, each text once, in a fixed order."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 30:
                    found.setdefault(text, parts[0].removesuffix(".py"))
    return [(package, text) for text, package in found.items()]


class Texts(Dataset[Any]):
    """Documents as bytes (1 to 256, 0 is padding), with a class each."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int]) -> None:
        self.tokens = [torch.frombuffer(bytearray(t.encode()[:LONGEST]), dtype=torch.uint8).long() + 1 for t in texts]
        self.labels = list(labels)

    @property
    def lengths(self) -> list[int]:
        return [len(part) for part in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.tokens[i], self.labels[i]


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([part for part, _ in samples], batch_first=True, padding_value=PAD)
    return tokens, torch.tensor([label for _, label in samples])


class Transformer(nn.Module):
    """A small transformer: causal with a head per token (GPT), or with a mean over the tokens and a head per document."""

    def __init__(self, outputs: int, *, causal: bool, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.causal = causal
        self.embed, self.place = nn.Embedding(257, width, padding_idx=PAD), nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, tokens: Tensor) -> Tensor:
        length, hidden = tokens.shape[1], tokens == PAD
        x = self.embed(tokens) + self.place(torch.arange(length))
        mask = torch.full((length, length), float("-inf")).triu(1) if self.causal else None
        if self.causal:
            return self.head(self.blocks(x, mask=mask))
        x = self.blocks(x, src_key_padding_mask=torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")))
        return self.head((x * ~hidden[..., None]).sum(1) / (~hidden).sum(1, keepdim=True))


def fit(model: nn.Module, loader: salience.Loader, *, epochs: int, losses_of: Any, rate: float, visits: int = 0) -> int:
    """Train for `epochs`, or until `visits` were made, with one cycle of the learning rate; returns the visits made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for _ in range(epochs):
        for batch in loader:
            done = min(1.0, loader.visits / visits) if visits else loader.progress
            for group in optimizer.param_groups:
                group["lr"] = rate * min(done / 0.1 + 0.02, max(0.02, (1 - done) / 0.9))
            optimizer.zero_grad()
            losses_of(loader, model, *batch).backward()
            optimizer.step()
            if visits and loader.visits >= visits:
                return loader.visits
    return loader.visits


def classify(loader: salience.Loader, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens)
    return loader.loss(F.cross_entropy(logits, labels, reduction="none"), logits, labels)


def continue_text(loader: salience.Loader, model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    logits, following = model(tokens[:, :-1]), tokens[:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2), following, reduction="none")
    return loader.loss(each, mask=following != PAD)


def classifier(found: list[tuple[str, str]], *, n: int, epochs: int, wrong: float, seed: int) -> dict[str, float]:
    packages = [name for name, _ in Counter(package for package, _ in found).most_common(10)]
    rng = np.random.default_rng((seed, 1))
    chosen = [(packages.index(package), text) for package, text in found if package in packages]
    chosen = [chosen[i] for i in rng.permutation(len(chosen))][: n + 800]
    true = np.array([label for label, _ in chosen])
    texts = [text for _, text in chosen]
    given, weak = true[800:].copy(), rng.random(len(true) - 800) < 0.75
    flip = weak & (rng.random(len(given)) < wrong)
    given[flip] = (given[flip] + rng.integers(1, 10, int(flip.sum()))) % 10
    test, train = Texts(texts[:800], true[:800].tolist()), Texts(texts[800:], given.tolist())
    quality = (~weak).astype(np.float32)
    last = float(quality.mean()) + 1e-6

    def run(data: Texts, passes: int, visits: int = 0, **options: Any) -> tuple[float, int]:
        loader = salience.Loader(
            data, batch_tokens=4_096, epochs=passes, seed=seed, collate_fn=padded, lengths=data.lengths, **options
        )
        torch.manual_seed(seed)
        model = Transformer(10, causal=False)
        made = fit(model, loader, epochs=passes, losses_of=classify, rate=2e-3, visits=visits)
        model.eval()
        with torch.no_grad():
            right = sum(
                int((model(tokens).argmax(1) == labels).sum())
                for tokens, labels in (padded([test[i] for i in range(k, k + 100)]) for k in range(0, 800, 100))
            )
        return right / 8, made

    stages = {"preset": "uniform", "keep": 1.0, "filters": [{"name": "quality", "switch": 0.4, "last": last}]}
    two, visits = run(train, epochs, quality=quality, select=stages)
    short, made = run(train, epochs, visits)
    clean = Texts([], [])
    clean.tokens = [part for part, good in zip(train.tokens, quality, strict=True) if good]
    clean.labels = [label for label, good in zip(train.labels, quality, strict=True) if good]
    alone, _ = run(clean, -(-visits // len(clean)), visits)
    return {"two_stages": two, "shorter": short, "clean_alone": alone, "visits": visits, "visits_shorter": made}


def language(found: list[tuple[str, str]], *, n: int, epochs: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng((seed, 2))
    texts = [found[i][1] for i in rng.permutation(len(found))][: n + 400]
    test, train = Texts(texts[:400], [0] * 400), Texts(texts[400:], [0] * (len(texts) - 400))

    def run(visits: int = 0, **options: Any) -> tuple[float, int, float]:
        loader = salience.Loader(
            train, batch_tokens=4_096, epochs=epochs, seed=seed, collate_fn=padded, lengths=train.lengths, **options
        )
        torch.manual_seed(seed)
        model = Transformer(257, causal=True)
        made = fit(model, loader, epochs=epochs, losses_of=continue_text, rate=3e-3, visits=visits)
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for k in range(0, 400, 100):
                tokens, _ = padded([test[i] for i in range(k, k + 100)])
                logits, following = model(tokens[:, :-1]), tokens[:, 1:]
                each, mask = F.cross_entropy(logits.transpose(1, 2), following, reduction="none"), following != PAD
                total, count = total + float((each * mask).sum()), count + float(mask.sum())
        saved = [event["padding_saved"] for event in loader.events.recent if event.kind == "lengths"]
        return total / count, made, statistics.mean(saved)

    full, full_visits, _ = run()
    ours, visits, saved = run(select="default")
    short, made, _ = run(visits)
    return {
        "full": full, "selected": ours, "shorter": short, "visits_full": full_visits, "visits": visits, "visits_shorter": made,
        "padding_saved": saved,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of few documents, within a minute")
    parser.add_argument("--n", type=int, default=3_000, help="documents to train the classifier on")
    parser.add_argument("--n-language", type=int, default=4_000, help="documents to train the GPT on")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--wrong", type=float, default=0.5, help="share of the weak labels that are wrong")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=["classifier", "language"], help="one of the two examples")
    options = parser.parse_args()
    if options.quick:
        options.n, options.n_language, options.epochs, options.seeds = 800, 500, 6, 1
    torch.set_num_threads(1)
    begin, found = time.perf_counter(), docstrings()
    print(f"{len(found):,} docstrings, {sum(len(text) for _, text in found):,} characters", flush=True)
    labelled, spoken = [], []
    for seed in range(options.seeds):
        if options.only != "language":
            labelled.append(classifier(found, n=options.n, epochs=options.epochs, wrong=options.wrong, seed=seed))
            print(f"classifier, seed {seed}: {labelled[-1]}", flush=True)
        if options.only != "classifier":
            spoken.append(language(found, n=options.n_language, epochs=options.epochs, seed=seed))
            print(f"language, seed {seed}: {spoken[-1]}", flush=True)

    def mean(rows: list[dict[str, float]], one: str, other: str | None = None) -> float | None:
        values = [row[one] - (row[other] if other is not None else 0) for row in rows]
        return round(statistics.mean(values), 4) if values else None

    print(
        json.dumps({
            "text_vs_shorter": mean(labelled, "two_stages", "shorter"),
            "text_vs_clean_alone": mean(labelled, "two_stages", "clean_alone"),
            "lm_vs_shorter": mean(spoken, "shorter", "selected"),
            "lm_differences": [round(row["shorter"] - row["selected"], 4) for row in spoken],
            "padding_saved": mean(spoken, "padding_saved"),
            **{f"text_{name}": mean(labelled, name) for name in ("two_stages", "shorter", "clean_alone", "visits")},
            **{f"lm_{name}": mean(spoken, name) for name in ("full", "selected", "shorter", "visits", "visits_full")},
            "seeds": options.seeds, "seconds": round(time.perf_counter() - begin, 1),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
