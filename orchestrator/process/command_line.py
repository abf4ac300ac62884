"""Command lines of programs started with `python -m`: a mistake is one line, and exit code 2. And a port on them, and
the standard streams that a program may have been started without."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn


def open_standard_streams() -> None:
    """Open those that are closed on /dev/null, in the order of their descriptors: else the next file or socket would
    get the descriptor of one, and with it what C libraries and child processes print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


class CommandLine(argparse.ArgumentParser):
    """Made at the start of a program, which has its standard streams from then on."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        open_standard_streams()
        super().__init__(*args, **settings)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def port_number(text: str) -> int:
    """Raises ArgumentTypeError, of which argparse makes a line with the option's name."""
    if text.isascii() and text.isdecimal() and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
