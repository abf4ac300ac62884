"""The orchestrator command: what an operator types, and what is shown."""

import signal


def start() -> None:
    """The console script `orchestrator`. Ctrl-C ends it without a traceback already while its modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from orchestrator.cli.main import main

    main()
