"""Speed and accuracy of zyfa_jax: `python -m benchmarks NAME`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = ("accuracy", "cpu", "cuda", "gfx950", "rocm", "scaling")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name in BENCHMARKS:
        module = importlib.import_module(f".{name}", __package__)
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name, help=summary, description=summary, allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
