"""The command `hopflow`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hopflow import demo
from hopflow.testing import fuzz
from hopflow.testing.requires import missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    0 is success, 1 a demo or programs in which something did not agree, 2 a wrong use
    of the command or a library that is missing.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "demo":
        return _demo(options)
    if options.command == "fuzz":
        return _fuzz(options)
    parser.print_help()
    return 0


def _demo(options: argparse.Namespace) -> int:
    if lacking := demo.missing_libraries():
        return _lacks("demo", ", ".join(lacking), "demo")
    return 0 if demo.run(options.output) else 1


def _fuzz(options: argparse.Namespace) -> int:
    if lacking := [name for name in ("hypothesis", "rich") if missing(name)]:
        return _lacks("fuzz", ", ".join(lacking), "test")
    return 0 if fuzz.show(options.minutes, options.seed, options.output) else 1


def _lacks(command: str, lacking: str, extra: str) -> int:
    print(
        f"hopflow {command}: {lacking} must be installed first:\n"
        f"    pip install 'hopflow[{extra}]'",
        file=sys.stderr,
    )
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hopflow",
        description="Data-dependent control flow, first class in array programs.",
    )
    parser.add_argument(
        "--version", action="version", version=f"hopflow {version('hopflow')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    about = "k-means with the operators: its graph, checks, times and a picture"
    demonstration = commands.add_parser("demo", help=about, description=about)
    demonstration.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        metavar="FOLDER",
        help="where the picture goes (default: %(default)s)",
    )
    about = "draw programs, and compare all their meanings"
    fuzzing = commands.add_parser("fuzz", help=about, description=about)
    fuzzing.add_argument(
        "--minutes",
        type=_minutes,
        default=1.0,
        metavar="N",
        help="how long (default: %(default)s)",
    )
    fuzzing.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="where to start: the same seeds draw the same (default: %(default)s)",
    )
    fuzzing.add_argument(
        "--output",
        type=Path,
        default=Path("fuzz_output"),
        metavar="FOLDER",
        help="where the corpus and failures go (default: %(default)s)",
    )
    return parser


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time.")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
