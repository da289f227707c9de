"""Where the command ``evenflow`` begins, before anything that an interrupt could fall into."""

import os
import signal


def main() -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # nothing runs yet
    from serving.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
