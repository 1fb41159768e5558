"""The table of docs/appendix-faults.md and the tests of this folder are of the same fourteen."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parent.parent / "docs" / "appendix-faults.md").read_text()


def test_every_row_names_the_tests_that_there_are():
    rows = re.findall(r"^\| (\d+) \|.*\| `(\w+)`( \(GPU\))? \|$", PAGE, re.MULTILINE)
    tests, on_gpu = (
        re.findall(r"^class (Test(\d\d)\w+):", (FOLDER / name).read_text(), re.MULTILINE)
        for name in ("test_faults.py", "test_faults_on_gpu.py")
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, 15))
    assert [(name, f"{int(number):02}") for number, name, _ in rows] == tests
    assert [(name, f"{int(number):02}") for number, name, too in rows if too] == on_gpu
