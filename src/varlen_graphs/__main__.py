"""Commands of varlen_graphs, which runs variable-length encoders as CUDA graphs."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from varlen_graphs import __version__

NEEDS = {
    "demo": (
        "transformers, pillow and scikit-image, and matplotlib for a picture: "
        "try pip install 'transformers>=4.57' pillow scikit-image matplotlib"
    ),
    "plan": "matplotlib for a plot: try pip install matplotlib",
    "serve": "transformers 5.23 and what its server needs: try pip install 'transformers[serving]'",
}
"""Packages that commands need beyond those of the library, and how to install them."""

EXAMPLES = """examples:
  python -m varlen_graphs demo                             photographs through a Qwen3-VL tower, eager and graphed
  python -m varlen_graphs doctor package.module:factory    what prevents a capture of the module that factory() makes
  python -m varlen_graphs plan trace.json --max-graphs 16  budgets for the calls that encoder.record() has seen
  python -m varlen_graphs serve --port 8000                the server of transformers, with graphs
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m varlen_graphs",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"varlen_graphs {__version__}, torch {version('torch')}")
    commands = parser.add_subparsers(dest="command")
    demo = commands.add_parser("demo", help="run photographs and a clip through a Qwen3-VL tower, eager and graphed")
    demo.add_argument("--device", help="cuda, cpu, cuda:1, ...; default: cuda if available")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    demo.add_argument("--picture", type=Path, metavar="FILE", help="draw times (on a CPU errors); needs matplotlib")
    demo.add_argument("--inputs", type=Path, metavar="FILE", help="preprocessed inputs, from --save-inputs")
    demo.add_argument("--save-inputs", type=Path, metavar="FILE", help="write the preprocessed inputs")
    doctor = commands.add_parser(
        "doctor", help="find code that cannot be captured, or whose values a graph would freeze"
    )
    doctor.add_argument(
        "factory",
        metavar="package.module:factory",
        help="called without arguments, returns the module and example calls",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    plan = commands.add_parser("plan", help="plan budgets for a trace of `encoder.record()`, and show their costs")
    plan.add_argument("trace", type=Path, help="a file written by `Trace.save`")
    plan.add_argument("--max-graphs", type=int, default=32, metavar="N", help="largest number of budgets (default: 32)")
    plan.add_argument("--max-memory", metavar="SIZE", help="memory limit for the graphs, such as 2GiB")
    plan.add_argument("--costs", type=Path, metavar="FILE", help="a trace with the costs of the machine to plan for")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="also plot it, as .png, .svg or .pdf; needs matplotlib")
    serve = commands.add_parser(
        "serve",
        help="`transformers serve`, with the models that it loads wrapped",
        epilog="All other arguments are those of `transformers serve`; see its --help.",
        allow_abbrev=False,
    )
    serve.add_argument("--backend", choices=["cuda", "tape"], default="cuda", help="tape: on a CPU, to try it out")
    options, others = parser.parse_known_args(arguments)
    if others and options.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.command is None:
        parser.print_help()
        return 0

    try:
        return _run(options, others, commands.choices[options.command])
    except ImportError as error:
        if options.command not in NEEDS:
            raise
        print(f"{options.command} needs {NEEDS[options.command]} ({error})", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, others: list[str], command: argparse.ArgumentParser) -> int:
    """Run a command and return the exit status."""
    if options.command == "doctor":
        from varlen_graphs.doctor.command import FactoryError, run_doctor

        try:
            return run_doctor(options.factory, options.json)
        except FactoryError as error:
            command.error(str(error))
    if options.command == "serve":
        from varlen_graphs.huggingface.serve import ServerError, run_serve

        try:
            return run_serve(others, options.backend)
        except ServerError as error:
            command.error(str(error))
    if options.command == "plan":
        from varlen_graphs.traffic.command import run_plan

        return run_plan(options.trace, options.max_graphs, options.max_memory, options.costs, options.plot)

    from varlen_graphs.demo.run import run_demo

    return run_demo(options.device, options.inputs, options.save_inputs, options.json, options.picture)


if __name__ == "__main__":
    sys.exit(main())
