"""vLLM's engine arguments parsed by vLLM's own parser, keeping only those that were given."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def parse(arguments: list[str]) -> dict[str, Any]:
    """The AsyncEngineArgs fields that were given, by name. Raises argparse.ArgumentError."""
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = vars(parser.parse_args(arguments))
    for name in given:
        if name not in AsyncEngineArgs.__dataclass_fields__:
            raise argparse.ArgumentError(None, f"{name} is not an engine argument")
    return given
