"""The command line of a program that is started with `python -m`: a mistake is one line, and exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class CommandLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr, flush=True)
        sys.exit(2)
