"""The example that embeds a folder: nothing is lost or there twice, whoever dies, and a second run goes on."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

pytest.importorskip("ray")

ROOT = Path(__file__).parent.parent
COUNT, SHARD = 22, 4

DYING = f"""
import os, signal, sys
from pathlib import Path
import embed_folder

class Dies(embed_folder.Worker):
    def encode(self, shard):
        if shard == 2 and not (self.out / "died").exists():
            (self.out / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().encode(shard)

print("embedded", embed_folder.embed_folder(sys.argv[1], sys.argv[2], size={SHARD}, workers=2, worker=Dies))
"""


def run(code, *arguments):
    paths = [str(ROOT / "examples"), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A folder, its vectors, and what was said, after a worker died and an image could not be read."""
    place = tmp_path_factory.mktemp("embed")
    folder, out = place / "images", place / "vectors"
    (folder / "below").mkdir(parents=True)
    dice = numpy.random.default_rng(0)
    for number in range(COUNT):
        pixels = dice.integers(0, 256, (*dice.integers(60, 120, 2), 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / ("below" if number % 2 else "") / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder, out, run(DYING, folder, out)


def names_of(out):
    return [name for path in sorted(out.glob("*.npz")) for name in numpy.load(path)["names"].tolist()]


def test_a_worker_that_dies_loses_nothing_and_doubles_nothing(embedded):
    folder, out, said = embedded
    assert (out / "died").exists()
    assert f"embedded {COUNT + 1}" in said
    expected = {str(path.relative_to(folder)) for path in folder.rglob("*.png")} - {"broken.png"}
    assert len(names_of(out)) == COUNT
    assert set(names_of(out)) == expected
    assert [name for path in out.glob("*.npz") for name in numpy.load(path)["broken"].tolist()] == ["broken.png"]
    assert not [path for path in out.glob("*.npz") if not numpy.isfinite(numpy.load(path)["vectors"]).all()]


def test_a_second_run_does_what_is_missing(embedded):
    folder, out, _ = embedded
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npz")}
    lost = sorted(out.glob("*.npz"))[1]
    lost.unlink()
    assert f"embedded {SHARD}" in run(DYING, folder, out)
    assert len(names_of(out)) == len(set(names_of(out))) == COUNT
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npz")}
    assert [name for name in again if again[name] != kept[name]] == [lost.name]
    assert "embedded 0" in run(DYING, folder, out)  # nothing to do: Ray is not even started


def test_another_folder_is_not_mixed_in(embedded):
    folder, out, _ = embedded
    Image.new("RGB", (64, 64)).save(folder / "new.png")
    with pytest.raises(AssertionError, match="changed since"):
        run(DYING, folder, out)
    (folder / "new.png").unlink()
