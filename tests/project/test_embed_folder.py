"""The example that embeds a folder: nothing is lost or there twice, whoever dies, and a second run goes on.

What a worker does is tested in this process; what Ray does needs `make test-offline`.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from tests.support.encoders import load_example

example = load_example("embed_folder")
ROOT = Path(__file__).parent.parent.parent
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


def fill(folder):
    """Images of any size, and one that is none."""
    (folder / "below").mkdir(parents=True)
    dice = numpy.random.default_rng(0)
    for number in range(COUNT):
        pixels = dice.integers(0, 256, (*dice.integers(60, 120, 2), 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / ("below" if number % 2 else "") / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no image")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A folder, its vectors, and what was said, after a worker died and an image could not be read."""
    pytest.importorskip("ray")
    place = tmp_path_factory.mktemp("embed")
    folder, out = place / "images", place / "vectors"
    fill(folder)
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


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """A folder of images of which some cannot be read, its vectors, and the worker that made them."""
    place = tmp_path_factory.mktemp("encode")
    folder, out = place / "images", place / "vectors"
    fill(folder)
    Image.new("RGB", (2, 1000)).save(folder / "thin.png")
    (folder / "huge.png").write_bytes(b"P5 30000 30000 255\n")  # Pillow goes by what is in a file, and not by its name
    shards = example.cut(folder, out, SHARD)
    worker = example.Worker(folder, out)
    worker({"shard": range(len(shards))})
    return folder, out, worker


def test_each_image_has_the_vector_that_it_has_alone(encoded):
    folder, out, worker = encoded
    vectors = example.read(out)
    assert sorted(names_of(out)) == sorted(vectors)
    assert vectors.keys() == {str(path.relative_to(folder)) for path in folder.rglob("[0-9]*.png")}
    for name, vector in vectors.items():
        assert numpy.abs(vector - worker.embed([worker.read(name)])[0]).max() < 1e-5


def test_what_cannot_be_read_stops_nothing_and_says_why(encoded):
    _, out, _ = encoded
    reasons = {}
    for path in out.glob("*.npz"):
        with numpy.load(path) as shard:
            reasons |= zip(shard["broken"].tolist(), shard["reasons"].tolist(), strict=True)
    assert reasons.keys() == {"broken.png", "huge.png", "thin.png"}
    assert reasons["broken.png"].startswith("UnidentifiedImageError: cannot identify image file")
    assert reasons["huge.png"].startswith("DecompressionBombError: Image size (900000000 pixels)")
    assert "aspect ratio must be smaller than 200" in reasons["thin.png"]


def test_memory_that_is_short_is_no_fault_of_an_image(encoded, monkeypatch):
    _, _, worker = encoded

    def read(name):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(worker, "read", read)
    with pytest.raises(MemoryError):
        worker.encode(0)


def test_a_shard_without_any_image_is_done(tmp_path):
    folder, out = tmp_path / "images", tmp_path / "vectors"
    folder.mkdir()
    (folder / "broken.png").write_bytes(b"no image")
    shards = example.cut(folder, out, SHARD)
    example.Worker(folder, out).encode(0)
    assert example.missing(shards, out) == []
    assert example.read(out) == {}


def test_a_shard_is_missing_until_it_is_whole(encoded, monkeypatch):
    folder, out, worker = encoded
    shards = example.cut(folder, out, SHARD)
    assert example.missing(shards, out) == []
    assert example.embed_folder(folder, out, SHARD) == 0  # nothing to do: Ray is not even imported
    example.path_of(out, 2).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", None)  # the worker dies before the end
        with pytest.raises(TypeError):
            worker.encode(2)
    assert example.missing(shards, out) == [2]
    worker.encode(2)
    assert example.missing(shards, out) == []


def test_another_folder_is_not_mixed_in(encoded):
    folder, out, _ = encoded
    Image.new("RGB", (64, 64)).save(folder / "new.png")
    with pytest.raises(SystemExit, match="changed since"):
        example.embed_folder(folder, out, SHARD)
    (folder / "new.png").unlink()


def test_what_cannot_be_embedded_is_told_before_anything_is_written(tmp_path):
    folder, out = tmp_path / "images", tmp_path / "vectors"
    with pytest.raises(SystemExit, match="images is not a folder: expected one with images"):
        example.embed_folder(folder, out)
    folder.mkdir()
    (folder / "notes.txt").write_text("no image")
    with pytest.raises(SystemExit, match=r"images holds no images: expected files named \.jpeg, "):
        example.embed_folder(folder, out)
    fill(folder)
    for size in (0, -1):
        with pytest.raises(SystemExit, match=f"--shard {size}: expected at least 1 image per file"):
            example.embed_folder(folder, out, size)
    assert not out.exists()
    assert len(example.cut(folder, out, SHARD)) == -(-(COUNT + 1) // SHARD)  # so the corrected run goes on
