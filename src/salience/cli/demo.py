"""See it work: train on rendered images with all the data, with less of it, and with salience.

Needs no data and no network. --quick is faster and proves less.
"""

from __future__ import annotations

import argparse
from typing import Any

from salience.cli.text import subcommand


def add(commands: Any) -> None:
    parser = subcommand(commands, "demo", __doc__, run)
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="images to render; 0 takes the demo's own")
    parser.add_argument(
        "--epochs", type=int, default=0, metavar="N", help="epochs of the full run; 0 takes the demo's own"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another run (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a small run, to see that everything works")


def run(args: argparse.Namespace) -> int:
    from salience.app import demo

    return demo.main(samples=args.samples, epochs=args.epochs, seed=args.seed, quick=args.quick)
