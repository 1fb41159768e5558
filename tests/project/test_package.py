"""The distributions: built from the checkout, and the wheel used from where it is unpacked."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import varlen_graphs as vg

ROOT = Path(__file__).parent.parent.parent


def built(source, target, kind):
    """Build a distribution, and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    ended = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (file,) = target.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The folder of an unpacked source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(ROOT, folder, "sdist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"varlen_graphs-{vg.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The folder of an unpacked wheel, built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(built(sdist, folder, "wheel")) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_package_alone(wheel):
    assert {path.name for path in wheel.iterdir()} == {"varlen_graphs", f"varlen_graphs-{vg.__version__}.dist-info"}
    package = ROOT / "src" / "varlen_graphs"
    sources = {path.relative_to(package) for path in package.rglob("*") if path.suffix in (".py", ".cu", ".typed")}
    assert {path.relative_to(wheel / "varlen_graphs") for path in (wheel / "varlen_graphs").rglob("*.*")} == sources


def test_the_source_distribution_holds_tests_docs_and_examples(sdist):
    for name in ("src", "tests", "examples", "docs", "benchmarks", "README.md", "CHANGELOG.md", "LICENSE"):
        assert (sdist / name).exists(), name


def test_the_metadata_is_that_of_the_release(wheel):
    (folder,) = wheel.glob("*.dist-info")
    metadata = message_from_string((folder / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"]) == ("varlen_graphs", vg.__version__)
    assert {"torch", "einops", "numpy"} <= {re.split(r"[^\w]", one)[0] for one in metadata.get_all("Requires-Dist")}
    entries = (folder / "entry_points.txt").read_text()
    assert "vllm.general_plugins" in entries
    assert "sglang.srt.plugins" in entries


def test_the_wheel_runs_the_snippet_of_the_readme(wheel, tmp_path):
    snippet = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    where = f"\nfrom pathlib import Path\nassert Path(vg.__file__).is_relative_to({str(wheel)!r}), vg.__file__"
    program = f"import sys\nsys.path.insert(0, {str(wheel)!r})\n{snippet}{where}"
    ended = subprocess.run([sys.executable, "-B", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_changelog_has_a_section_of_the_release():
    assert re.search(
        rf"^## \[{re.escape(vg.__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
