import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(example):
    done = subprocess.run([sys.executable, str(example)], check=True, capture_output=True, text=True)
    assert "largest difference from eager: " in done.stdout
    assert float(done.stdout.rsplit(" ", 1)[1]) < 1e-5


def test_the_text_encoder_is_short():
    assert len((EXAMPLES[0].parent / "text_encoder.py").read_text().splitlines()) <= 65
