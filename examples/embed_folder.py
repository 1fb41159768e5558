"""Embed a folder of images on all GPUs of a machine or a cluster. Ray distributes the work; each worker has an encoder.

    python examples/embed_folder.py PHOTOGRAPHS VECTORS     # run again after a stop to resume

The folder is split into shards. A shard is done when its file exists, and files are written atomically. So a stopped
run can be resumed, and a shard whose worker died is encoded by another worker: no image is lost or embedded twice. An
image that cannot be read is listed in its shard as `broken`, with the error in `reasons`; delete the shard's file to
retry. All machines must see both folders. Needs ray[data], pillow and transformers.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy
import torch
import transformers
from PIL import Image
from tqdm import tqdm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

import varlen_graphs as vg

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


class Worker:
    """Ray actor with a tower, its encoder and a processor, on a GPU if there is one."""

    def __init__(self, folder, out):
        self.folder, self.out = Path(folder), Path(out)
        self.shards = json.loads((self.out / "shards.json").read_text())
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        small = {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "deepstack_visual_indexes": [0],
        }
        torch.manual_seed(0)  # yours loads a model: AutoModelForImageTextToText.from_pretrained(...).model.visual
        tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**small if self.device == "cpu" else {})).to(self.device).eval()
        budgets, backend = (vg.Ladder(), "cuda") if self.device == "cuda" else ([256, 1024], "tape")
        self.encoder = vg.recipes.qwen3_vl(tower, budgets, backend=backend)
        name = (
            "Qwen2VLImageProcessorPil" if hasattr(transformers, "Qwen2VLImageProcessorPil") else "Qwen2VLImageProcessor"
        )
        self.processor = getattr(transformers, name)(
            patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3,
            size={"shortest_edge": 56 * 56, "longest_edge": 2048 * 2048},
        )  # fmt: skip

    def __call__(self, batch):
        """Encode the shards with these numbers."""
        for shard in batch["shard"]:
            self.encode(int(shard))
        return batch

    def encode(self, shard):
        images, names, broken, vectors, rows = [], [], {}, [], 0
        for name in self.shards[shard]:
            try:
                images.append(self.read(name))
            except MemoryError:  # a state of the machine, not of the image
                raise
            except Exception as error:  # no image may stop the others, whatever Pillow or the processor raises
                broken[name] = f"{type(error).__name__}: {error}"
                continue
            names.append(name)
            rows += len(images[-1][0])
            if rows >= self.encoder.budgets[-1].rows:
                vectors += self.embed(images)
                images, rows = [], 0
        if images:
            vectors += self.embed(images)
        texts = {"names": names, "broken": [*broken], "reasons": [*broken.values()]}
        arrays = {what: numpy.array(values, dtype=str) for what, values in texts.items()}
        save(path_of(self.out, shard), vectors=numpy.array(vectors), **arrays)

    def read(self, name):
        """Return the patches of an image and its grid."""
        with Image.open(self.folder / name) as image:
            encoded = self.processor(images=[image.convert("RGB")], return_tensors="pt")
        return encoded["pixel_values"], encoded["image_grid_thw"]

    def embed(self, images):
        """Return one vector per image, the mean of its merged patches."""
        pixels = torch.cat([pixels for pixels, _ in images]).to(self.device)
        grid = torch.cat([grid for _, grid in images])
        features = self.encoder(pixels, grid_thw=grid).pooler_output
        return [part.mean(0).float().cpu().numpy() for part in features.split((grid.prod(1) // 4).tolist())]


def path_of(out, shard):
    return out / f"{shard:06d}.npz"


def save(path, **arrays):
    """Write a file atomically."""
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    with unfinished.open("wb") as file:
        numpy.savez(file, **arrays)
    unfinished.replace(path)


def cut(folder, out, size):
    """Return the shards of a folder as lists of names, as cut by the first run."""
    if size < 1:
        raise SystemExit(f"--shard {size}: expected at least 1 image per file")
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder: expected one with images")
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not names:
        raise SystemExit(f"{folder} holds no images: expected files named {', '.join(sorted(SUFFIXES))}")
    shards = [names[i : i + size] for i in range(0, len(names), size)]
    plan = out / "shards.json"
    if not plan.exists():
        out.mkdir(parents=True, exist_ok=True)
        unfinished = plan.with_suffix(".part")
        unfinished.write_text(json.dumps(shards))
        unfinished.replace(plan)
    if json.loads(plan.read_text()) != shards:
        raise SystemExit(f"{folder} or --shard changed since {out} was started: embed new images into another folder")
    return shards


def missing(shards, out):
    """Return the numbers of the shards that are not done yet."""
    return [shard for shard in range(len(shards)) if not path_of(out, shard).exists()]


def embed_folder(folder, out, size=256, workers=None, worker=Worker):
    """Embed the images that are not embedded yet, and return their number."""
    folder, out = Path(folder).resolve(), Path(out).resolve()
    shards = cut(folder, out, size)
    todo = missing(shards, out)
    images = sum(len(shards[shard]) for shard in todo)
    if not todo:
        return 0
    import ray  # slow to import, and not needed inside a worker

    if not ray.is_initialized():
        ray.init()  # the cluster at RAY_ADDRESS, or this machine
    ray.data.DataContext.get_current().enable_progress_bars = False  # the bar below counts images, not shards
    gpus = int(ray.cluster_resources().get("GPU", 0))
    done = ray.data.from_items([{"shard": shard} for shard in todo], override_num_blocks=len(todo)).map_batches(
        worker,
        fn_constructor_args=[str(folder), str(out)],
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(len(todo), workers or gpus or 1)),
        num_gpus=1 if gpus else 0,
    )
    with tqdm(total=sum(map(len, shards)), initial=sum(map(len, shards)) - images, unit="image") as progress:
        for row in done.iter_rows():
            progress.update(len(shards[row["shard"]]))
    return images


def read(out):
    """Return the vectors of all images by name."""
    vectors = {}
    for path in sorted(Path(out).glob("*.npz")):
        with numpy.load(path) as shard:
            vectors |= zip(shard["names"].tolist(), shard["vectors"], strict=True)
    return vectors


def demo():
    """Embed some images of any size, in shards of four."""
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place, "images"), Path(place, "vectors")
        folder.mkdir()
        dice = numpy.random.default_rng(0)
        for number in range(10):
            pixels = dice.integers(0, 256, (*dice.integers(60, 200, 2), 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
        embed_folder(folder, out, size=4)
        vectors, alone, worst = read(out), Worker(folder, out), 0.0
        for name, vector in vectors.items():
            pixels, grid = alone.read(name)
            eager = alone.encoder.eager(pixels.to(alone.device), grid_thw=grid).pooler_output.mean(0)
            worst = max(worst, numpy.abs(vector - eager.float().cpu().numpy()).max().item())
        print(f"{len(vectors)} vectors of {len(vectors['0.png'])} in {len(list(out.glob('*.npz')))} files")
        print("largest difference from eager:", worst)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="images to embed; without it a demo runs")
    parser.add_argument("out", nargs="?", help="folder for the vectors")
    parser.add_argument("--shard", type=int, default=256, help="images per file (256)")
    parser.add_argument("--workers", type=int, help="processes, one per GPU by default")
    args = parser.parse_args()
    if args.folder is None:
        demo()
    elif args.out is None:
        parser.error("the following arguments are required: out")
    else:
        embed_folder(args.folder, args.out, args.shard, args.workers)
