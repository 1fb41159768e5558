"""Mutants of the core: how many faults of one token the tests find.

Run with `python -m tests.mutants --number 60`. Each mutant changes one operator, number or condition of a package of
the core in a copy of the project, chosen by the seed; the tests of that package, and then those of all of them, run on
it. A mutant that survives is printed with its line: either no test of these asks for what it changes, or it changes
nothing.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

TESTS = {
    "buffers": ["tests/buffers", "tests/layouts"],
    "calls": ["tests/calls"],
    "graphs": ["tests/graphs", "tests/calls"],
    "layouts": ["tests/layouts", "tests/buffers"],
    "outputs": ["tests/outputs", "tests/layouts"],
    "routing": ["tests/routing", "tests/calls"],
}
"""Tests of each package of the core, the nearest first."""

LAST = ["tests/test_encoder.py", "tests/verify", "tests/declaration"]
"""Tests of what uses all of them."""

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of one place of a file: `text` in the place of the characters from `start` to `end`."""

    path: Path
    line: int
    start: int
    end: int
    text: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file."""
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column  # the sources are ASCII

    def between(before: ast.expr, after: ast.expr, operator: ast.AST) -> Iterator[Mutant]:
        assert before.end_lineno is not None
        assert before.end_col_offset is not None
        first, last = at(before.end_lineno, before.end_col_offset), at(after.lineno, after.col_offset)
        old, new = OPERATORS.get(type(operator), ("", ""))
        place = source.find(old, first, last) if old else -1
        if place >= 0:
            yield Mutant(path, before.end_lineno, place, place + len(old), new)

    tree = ast.parse(source)
    typed = {id(inner) for node in ast.walk(tree) for inner in _types(node)}
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            start = at(node.lineno, node.col_offset)
            end = start + len(ast.get_source_segment(source, node) or "")
            yield Mutant(path, node.lineno, start, end, str(node.value + 1))
        elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
            test = node.test
            start = at(test.lineno, test.col_offset)
            text = ast.get_source_segment(source, test) or ""
            yield Mutant(path, test.lineno, start, start + len(text), f"(not ({text}))")


def _types(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside the annotations of a node."""
    for field in ("annotation", "returns"):
        own = getattr(node, field, None)
        if own is not None:
            yield from ast.walk(own)


def is_found(folder: Path, tests: list[str], seconds: float) -> bool:
    """Return True if a test fails on the copy in a folder, or none ends in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not gpu"]
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}:{folder}", "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ran.returncode != 0


def main() -> None:
    """Make mutants, run the tests on each, and print those that no test finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", choices=TESTS, default=[*TESTS])
    parser.add_argument("--seconds", type=float, default=600, help="until a run of tests counts as hanging")
    options = parser.parse_args()

    draw, found, start = random.Random(options.seed), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for tests in [*map(TESTS.__getitem__, options.packages), LAST]:
            if is_found(folder, tests, options.seconds):
                raise SystemExit(f"{' '.join(tests)} fail without a mutant")
        for number in range(options.number):
            package = options.packages[number % len(options.packages)]
            files = sorted((folder / "src" / "varlen_graphs" / package).glob("*.py"))
            mutant = draw.choice([one for path in files for one in mutants_of(path)])
            own = mutant.path.read_text()
            mutant.path.write_text(own[: mutant.start] + mutant.text + own[mutant.end :])
            try:
                is_dead = any(is_found(folder, tests, options.seconds) for tests in (TESTS[package], LAST))
            finally:
                mutant.path.write_text(own)
            found += is_dead
            line = own.splitlines()[mutant.line - 1].strip()
            change = f"{own[mutant.start : mutant.end]!r} -> {mutant.text!r}"
            place = f"{mutant.path.relative_to(folder)}:{mutant.line}"
            print(f"{'found' if is_dead else 'SURVIVED':>8}  {place}  {change}  in  {line}", flush=True)
    print(f"{found} of {options.number} found in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
