"""Options of `shoal bench`, in a module of their own so that the help of other commands stays fast."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options; those without help are what the command gives the processes that it starts."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=["machine", "collectives"],
        default="machine",
        help="machine (default): all that `shoal plan` reads; collectives: every all-reduce side by side, and what "
        "`auto` chooses by",
    )
    parser.add_argument("--sizes", metavar="LIST", help="of collectives, in bytes (default: 1K to 256M)")
    parser.add_argument("-o", "--out", metavar="FILE", help="write the cluster file here too (TOML)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples, about 15 s")
    parser.add_argument(
        "--ranks", metavar="N", help="the most processes at once (default: one a GPU, or one a core up to 8)"
    )
    for hidden in ("--into", "--threads", "--seconds", "--exchange-only"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
