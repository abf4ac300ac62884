"""Command lines of programs started with `python -m`: a mistake is one line, and exit code 2. And a port on them."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class CommandLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def port_number(text: str) -> int:
    """Raises ArgumentTypeError, of which argparse makes a line with the option's name."""
    if text.isascii() and text.isdecimal() and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
