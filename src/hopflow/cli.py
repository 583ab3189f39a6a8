"""The command `hopflow`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hopflow import demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    0 is success, 1 a demo in which something did not agree, 2 a wrong use of the
    command or a library that is missing.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command != "demo":
        parser.print_help()
        return 0
    if missing := demo.missing_libraries():
        print(
            f"hopflow demo: {', '.join(missing)} must be installed first:\n"
            "    pip install 'hopflow[demo]'",
            file=sys.stderr,
        )
        return 2
    return 0 if demo.run(options.output) else 1


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
    return parser


if __name__ == "__main__":
    sys.exit(main())
