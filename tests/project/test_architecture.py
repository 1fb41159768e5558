"""Budgets of the architecture: the path of a call, files, classes, private names.

That imports point one way is checked by import-linter (`make check`).
"""

import ast
import gc
import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch

import varlen_graphs as vg
from tests.support.towers import tower_classes

PACKAGE = Path(vg.__file__).parent
ROOT = Path(__file__).parent.parent.parent

MOST_CALLS = 94
MOST_FILES_AT_THE_TOP = 7

ASIDE = ("kernels/", "attention/", "torch_dispatch/", "guards/", "capture/tape.py", "capture/memory.py")
"""Operations of the module, and the stand-in for CUDA: no part of the path of a call on a GPU."""


def file_of(frame, aside=ASIDE):
    """Return the file of a frame of the package, `None` for any other frame and for those aside."""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None
    return None if name is None or name.startswith(aside) else name


# The path of a call


@pytest.fixture(scope="module")
def path_of_a_call():
    """Functions called by one warm call.

    Counted on Python 3.11; later versions inline comprehensions, so there are fewer.
    """
    config, model = tower_classes("qwen3_vl")
    small = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "deepstack_visual_indexes": [0]}
    encoder = vg.recipes.qwen3_vl(model(config(**small)).eval(), budgets=vg.Ladder(256, 1024), backend="tape")
    pixels, grid = torch.randn(1 * 14 * 14 + 4 * 8 * 10, 3 * 2 * 16 * 16), torch.tensor([[1, 14, 14], [4, 8, 10]])
    for _ in range(3):
        encoder(pixels, grid_thw=grid)
    called = []

    def record(frame, event, _):
        if event == "call" and (file := file_of(frame)):
            called.append(f"{file}: {frame.f_code.co_name}")

    before = sys.getprofile()
    gc.disable()  # finalizers are no part of the call
    sys.setprofile(record)
    try:
        encoder(pixels, grid_thw=grid)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert encoder.stats.replays.total() == encoder.stats.calls == 4
    return called


def test_a_warm_call_makes_few_calls_of_functions(path_of_a_call):
    called = path_of_a_call
    counts = "\n".join(f"{count:4} {name}" for name, count in Counter(called).most_common())
    assert len(called) >= 20, counts  # or nothing was measured
    assert len(called) <= MOST_CALLS, f"a warm call makes {len(called)} calls, {MOST_CALLS} at most:\n{counts}"


# Files and classes


@cache
def trees(*folders):
    """Return the syntax trees of all Python files of some folders, by file."""
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return {file: ast.parse(file.read_text()) for file in files}


def test_few_files_lie_at_the_top_level():
    files = sorted(file.name for file in PACKAGE.glob("*.py"))
    assert len(files) <= MOST_FILES_AT_THE_TOP, f"{files}: {MOST_FILES_AT_THE_TOP} at most; put others into a package"


def test_no_two_classes_have_one_name():
    """Names that differ only by an underscore are one name to a reader. Public packages tell theirs apart."""
    places = defaultdict(list)
    for file, tree in trees(PACKAGE).items():
        package = file.relative_to(PACKAGE).parts[0]
        public = getattr(getattr(vg, package, None), "__all__", ())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                name = f"{package}.{node.name}" if node.name in public else node.name.strip("_")
                places[name].append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"several classes of one name: {twice}"


def test_every_package_says_what_it_is_for():
    packages = {file.parent for file in PACKAGE.rglob("*.py")}
    silent = [
        str(package.relative_to(PACKAGE))
        for package in packages
        if not (package / "__init__.py").exists()
        or not ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    ]
    assert not silent, f"folders without a docstring in __init__.py: {silent}"


# Private names


FOREIGN_ROOTS = ("torch", "os", "sys")
"""Modules whose private names are their own business: `torch._dynamo`, `torch.cuda._sleep`, `os._exit`."""

FOREIGN_NAMES = {
    "_apply",  # ParallelStyle of torch, which subclasses define and call
    "_attn_implementation",  # configurations of transformers: which attention a model uses
    "_exit",  # of os
    "_version",  # tensors of torch: how often one was written
    "_fields",  # named tuples of Python
    "_from_config",  # models of transformers without weights to load
    "_is_in_bad_fork",  # of torch.cuda: whether CUDA was used before this process was forked
    "_local_tensor",  # the shard of a DTensor of torch
}

PRIVATE = re.compile(r"_(?!_)\w*")


def root_of(node):
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


def private_uses(tree):
    """Yield the line and text of each use of a private name of another object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            of_its_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            of_base = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "super"
            if not (of_its_own or of_base or node.attr in FOREIGN_NAMES or root_of(node) in FOREIGN_ROOTS):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("varlen_graphs"):
            yield from ((node.lineno, name.name) for name in node.names if PRIVATE.fullmatch(name.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")).endswith("attr"):
            strings = (one.value for one in node.args[:2] if isinstance(one, ast.Constant))
            for string in strings:  # monkeypatch.setattr("varlen_graphs.package._name", ...), getattr(x, "_name")
                last = str(string).rpartition(".")[2]
                if PRIVATE.fullmatch(last) and last not in FOREIGN_NAMES:
                    yield node.lineno, ast.unparse(node)


def test_a_private_name_is_found():
    found = [text for _, text in private_uses(ast.parse("encoder.store._ring; patch.setattr(x, '_name', 1); self._a"))]
    assert found == ["encoder.store._ring", "patch.setattr(x, '_name', 1)"]


def test_nothing_outside_of_a_class_uses_its_private_names():
    folders = [ROOT / "tests", ROOT / "benchmarks", ROOT / "examples", ROOT / "src" / "varlen_graphs" / "parallel"]
    uses = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file, tree in trees(*filter(Path.exists, folders)).items()
        for line, text in private_uses(tree)
    ]
    listed = "\n  ".join(uses)
    assert not uses, f"private names of other objects; use or add a public one:\n  {listed}"


FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def test_every_tensor_that_the_library_makes_is_on_a_named_device():
    """A default device is for the user's own tensors."""
    unnamed = []
    for path, tree in trees(PACKAGE).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and not {"device", None} & {keyword.arg for keyword in node.keywords}:
                    unnamed.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not unnamed


# The pages about it


def page(name):
    """Return the text of a page of the docs."""
    return (ROOT / "docs" / f"{name}.md").read_text()


EXCERPT = re.compile(r"^```(?:py|text)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def missing_part(excerpt, text):
    """Return the first lines of an excerpt that do not follow in a text; `...` stands for left-out lines.

    Indentation does not count.
    """
    lines = [line.strip() for line in text.splitlines()]
    for part in re.split(r"^\s*\.\.\.\s*$", excerpt, flags=re.MULTILINE):
        wanted = [line.strip() for line in part.strip().splitlines()]
        starts = (at for at in range(len(lines) - len(wanted) + 1) if lines[at : at + len(wanted)] == wanted)
        start = next(starts, None)
        if start is None:
            return "\n".join(wanted)
        lines = lines[start + len(wanted) :]
    return None


def test_a_line_that_is_not_in_the_code_is_found():
    text = "def f():\n    a = 1\n    b = 2\n    return a + b\n"
    assert missing_part("def f():\n...\nb = 2\nreturn a + b", text) is None
    assert missing_part("a = 1\nreturn a + b", text) == "a = 1\nreturn a + b"
    assert missing_part("b = 2\n...\na = 1", text) == "a = 1"


def test_excerpts_on_the_page_are_in_the_code():
    excerpts = EXCERPT.findall(page("architecture"))
    assert len(excerpts) >= 4
    for file, excerpt in excerpts:
        assert (missing := missing_part(excerpt, (ROOT / file).read_text())) is None, f"{file} has not:\n{missing}"


def test_files_on_the_page_exist():
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", page("architecture")))
    assert named
    gone = [one for one in named if "/my_" not in one and not ((PACKAGE / one).exists() or (ROOT / one).exists())]
    assert not gone


def test_the_map_on_the_page_names_every_package():
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    _, table = page("architecture").split("## The packages", 1)
    missing = {one for one in packages - {"__init__"} if f"`{one}`" not in table.split("\n## ", 1)[0]}
    assert not missing


def test_the_page_of_recipes_names_every_recipe():
    recipes = {name for name in vg.recipes.__all__ if name.islower()} - {"register"}
    assert not [name for name in recipes if f"`{name}`" not in page("recipes")]
