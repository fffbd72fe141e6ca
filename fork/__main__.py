"""Command line: `python -m fork VERB`; each verb is the module of its name."""

import argparse
import importlib
import os
import signal
import sys

from fork.errors import ForkError

VERBS = (
    *("apply", "bases", "build", "check-rebinds", "check-writes", "develop", "docs", "export", "install"),
    *("lint", "lock", "revert", "status", "tree", "trial"),
)


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Exit status: 0 done, 1 a rule was broken, 2 bad usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m fork", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in VERBS:
        try:
            module = importlib.import_module(f"fork.{name.replace('-', '_')}")
        except ModuleNotFoundError as error:
            if str(error.name).startswith("fork."):
                raise
            print(f"fork: {error.name} is not installed; `make setup`, then run .venv/bin/python", file=sys.stderr)
            return 1
        verb = verbs.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        return int(args.run(args))
    except ForkError as error:
        print(f"fork: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # Whoever read the output has enough; point it away, or Python complains once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(
            f"fork: {error.filename or 'the system'}: {error.strerror or error}; mend that and try again",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("fork: interrupted", file=sys.stderr)
        return 130


def _end(number: int, _frame: object) -> None:
    """End as an error does, so that half-written folders are removed and half-patched trees restored."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
