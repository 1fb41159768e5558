"""Every example runs, and agrees with eager."""

import runpy
from pathlib import Path

import pytest
import transformers

from varlen_graphs.recipes import registry

TRANSFORMERS_5 = {"modern_bert.py", "padded_text_encoder.py", "token_types.py"}
"""Models of transformers 4 look at their mask on the host, or pack rows by themselves."""

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(example, capsys, monkeypatch):
    if example.name in TRANSFORMERS_5 and transformers.__version__.startswith("4."):
        pytest.skip("needs transformers 5")
    if example.name == "embed_folder.py":
        pytest.importorskip("ray")
    monkeypatch.setattr(registry, "RECIPES", dict(registry.RECIPES))  # some register their own
    monkeypatch.setattr(registry, "RECIPE_NAMES", {})
    monkeypatch.syspath_prepend(example.parent)
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "largest difference from eager: " in printed
    assert float(printed.rsplit(" ", 1)[1]) < 1e-5


def test_the_text_encoder_is_short():
    assert len((EXAMPLES[0].parent / "text_encoder.py").read_text().splitlines()) <= 65


def test_examples_of_what_can_be_declared_are_short():
    for name in ("diffusion_transformer", "token_types", "speech_encoder", "clip_by_batch"):
        assert len((EXAMPLES[0].parent / f"{name}.py").read_text().splitlines()) < 60
