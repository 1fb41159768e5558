"""Wrap modules from outside of transformers by `vg.wrap` alone, and write the table.

Run with `make coverage-outside`, or `python -m benchmarks.coverage.outside` with parts of names where the packages are
installed. Each module is built small with random weights, wrapped on the tape, and called with batches of several sizes
as its users call it; its outputs are compared with those of a copy that is not wrapped, without what pads them.
"""

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import varlen_graphs as vg
from benchmarks.common import table, write_json

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]

TOLERANCE = 1e-3
"""Relative L2 within which outputs are equal, in float32."""

REASON = 160
"""Characters of a reason in the table."""


class Case(NamedTuple):
    """A module: its package and name, what makes it and its calls, and the method that these mean."""

    package: str
    name: str
    make: Callable[[], nn.Module]
    calls: Callable[[], Calls]
    method: str = "forward"


# Calls


def images(*shape: int, batches: tuple[int, ...] = (2, 1, 3, 5)) -> Calls:
    """Batches of inputs of one shape."""
    return [((torch.randn(batch, *shape),), {}) for batch in batches]


def resolutions() -> Calls:
    """Images of several resolutions."""
    return [((torch.randn(batch, 3, *side),), {}) for batch, side in ((2, (64, 64)), (1, (96, 64)), (3, (64, 64)))]


def ids(length: int, most: int = 99) -> Calls:
    """Batches of token ids of one length."""
    return [((torch.randint(4, most, (batch, length)),), {}) for batch in (2, 1, 4)]


def lengths_of(batch: int, length: int) -> Tensor:
    """Lengths of the items of a batch, the first the longest."""
    return torch.tensor([length - 2 * item for item in range(batch)]).clamp(min=1)


def sequences(dim: int, name: str | None = None, real: bool = True, tokens: bool = False) -> Calls:
    """Sequences of several lengths, with a mask."""
    calls: Calls = []
    for batch, length in ((3, 20), (2, 33), (4, 9), (1, 16)):
        rows = torch.randint(4, dim, (batch, length)) if tokens else torch.randn(batch, length, dim)
        mask = torch.arange(length) < lengths_of(batch, length)[:, None]
        calls.append(((rows,), {} if name is None else {name: mask if real else ~mask}))
    return calls


def clips(dim: int) -> Calls:
    """Spectrograms of several lengths, with these."""
    return [((torch.randn(batch, length, dim), lengths_of(batch, length)), {}) for batch, length in ((3, 40), (2, 64))]


def waves(lengths: bool) -> Calls:
    """Samples of sound."""
    made = [torch.randn(batch, count) for batch, count in ((2, 800), (1, 800), (3, 1000))]
    return [((one, lengths_of(*one.shape)) if lengths else (one,), {}) for one in made]


def latents(*shapes: tuple[int, ...], **more: Callable[[int], Any]) -> Calls:
    """Latents of several resolutions, with the other arguments of a step."""
    sizes = [(2, shapes[0]), (1, shapes[0]), (1, shapes[-1])]
    return [
        ((torch.randn(batch, *shape),), {name: of(batch) for name, of in more.items()} | {"return_dict": False})
        for batch, shape in sizes
    ]


def flux() -> Calls:
    """Packed latents of several resolutions, with their places."""
    calls: Calls = []
    for batch, height, width in ((1, 4, 4), (2, 4, 4), (1, 4, 6)):
        places = torch.zeros(height * width, 3)
        places[:, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        more = {"img_ids": places, "txt_ids": torch.zeros(6, 3), "encoder_hidden_states": torch.randn(batch, 6, 32)}
        more |= {"pooled_projections": torch.randn(batch, 24), "timestep": torch.full((batch,), 0.5)}
        calls.append(((torch.randn(batch, height * width, 4),), more | {"return_dict": False}))
    return calls


def qwen_image() -> Calls:
    """Packed latents of several resolutions, with these as a list."""
    calls: Calls = []
    for height, width in ((4, 4), (4, 4), (4, 6)):
        more = {"encoder_hidden_states": torch.randn(1, 6, 24), "timestep": torch.full((1,), 0.5)}
        more |= {"encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.int64)}
        calls.append(
            ((torch.randn(1, height * width, 16),), more | {"img_shapes": [(1, height, width)], "return_dict": False})
        )
    return calls


IMAGE, SMALL = partial(images, 3, 64, 64), partial(images, 3, 56, 56)


# Modules


def of(path: str, *args: Any, **sizes: Any) -> Callable[[], nn.Module]:
    """What makes a module by the path of its class or function."""
    package, _, name = path.rpartition(".")
    return lambda: getattr(import_module(package), name)(*args, **sizes)


def timm(name: str, calls: Callable[[], Calls] = IMAGE, **sizes: Any) -> Case:
    """A model of timm."""
    whole = f"{name}, dynamic size" if "dynamic_img_size" in sizes else name
    return Case("timm", whole, of("timm.create_model", name, pretrained=False, **sizes), calls)


def torchvision(name: str, *shape: int, **sizes: Any) -> Case:
    """A model of torchvision."""
    make = of("torchvision.models.get_model", name, weights=None, **sizes)
    return Case("torchvision", name, make, partial(images, *(shape or (3, 64, 64))))


def open_clip() -> nn.Module:
    """A small CLIP."""
    model = import_module("open_clip.model")
    vision = model.CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=16, image_size=64)
    text = model.CLIPTextCfg(context_length=16, vocab_size=100, width=64, heads=4, layers=2)
    return model.CLIP(64, vision, text)


def whisper() -> nn.Module:
    """A small Whisper."""
    model = import_module("whisper.model")
    return model.Whisper(model.ModelDimensions(80, 50, 64, 4, 2, 100, 20, 64, 4, 2))


def x_transformers(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A wrapper of x-transformers around an encoder."""

    def make() -> nn.Module:
        package = import_module("x_transformers")
        layers = package.Encoder(dim=32, depth=2, heads=4)
        return getattr(package, name)(attn_layers=layers, **sizes)

    return make


def layers(**options: Any) -> nn.Module:
    """Layers of torch."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, **options)


def wav2vec2() -> nn.Module:
    """A small wav2vec 2.0 of torchaudio."""
    make = import_module("torchaudio.models").wav2vec2_model
    return make(
        "group_norm", [(32, 10, 5), (32, 3, 2)], False, 32, 0.0, 9, 4, 2, 4, 0.0, 64, 0.0, 0.0, False, 0.0, None
    )


VIT = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 64, "heads": 4, "mlp_dim": 64}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
SPEECHBRAIN = "speechbrain.lobes.models"


def embedded(dim: int, batch: int) -> Tensor:
    """Embeddings of a prompt."""
    return torch.randn(batch, 6, dim)


def step(batch: int) -> Tensor:
    """The time of a step."""
    return torch.full((batch,), 5)


PADDING_MASK = "src_key_padding_mask"
CASES = [
    timm("vit_tiny_patch16_224", img_size=64),
    timm("vit_tiny_patch16_224", resolutions, img_size=64, dynamic_img_size=True),
    timm("eva02_tiny_patch14_224", SMALL, img_size=56),
    timm("convnext_atto"),
    timm("swin_tiny_patch4_window7_224", SMALL, img_size=56, window_size=7),
    timm("vit_base_patch16_siglip_224", img_size=64, depth=2),
    timm("deit3_small_patch16_224", img_size=64),
    timm("beit_base_patch16_224", img_size=64, depth=2),
    timm("efficientnet_b0"),
    timm("maxvit_rmlp_pico_rw_256", img_size=64),
    timm("naflexvit_base_patch16_gap", depth=2),
    torchvision("vit_b_16", image_size=64),
    torchvision("swin_t"),
    torchvision("resnet18"),
    torchvision("convnext_tiny"),
    torchvision("r3d_18", 3, 4, 32, 32),
    Case("open_clip", "CLIP.encode_image", open_clip, IMAGE, "encode_image"),
    Case("open_clip", "CLIP.encode_text", open_clip, partial(ids, 16), "encode_text"),
    Case("open_clip", "CLIP.visual", lambda: open_clip().visual, IMAGE),
    Case("whisper", "encoder", lambda: whisper().encoder, partial(images, 80, 100)),
    Case("whisper", "embed_audio", whisper, partial(images, 80, 100), "embed_audio"),
    Case("vit_pytorch", "ViT", of("vit_pytorch.ViT", depth=2, **VIT), IMAGE),
    Case("vit_pytorch", "SimpleViT", of("vit_pytorch.SimpleViT", depth=2, **VIT), IMAGE),
    Case("vit_pytorch", "CaiT", of("vit_pytorch.cait.CaiT", depth=2, cls_depth=1, **VIT), IMAGE),
    Case(
        "vit_pytorch",
        "CrossFormer",
        of("vit_pytorch.crossformer.CrossFormer", num_classes=10),
        partial(images, 3, 224, 224, batches=(2, 1)),
    ),
    Case(
        "x_transformers",
        "ContinuousTransformerWrapper",
        x_transformers("ContinuousTransformerWrapper", dim_in=24, dim_out=16, max_seq_len=64),
        partial(sequences, 24),
    ),
    Case(
        "x_transformers",
        "ContinuousTransformerWrapper, mask",
        x_transformers("ContinuousTransformerWrapper", dim_in=24, dim_out=16, max_seq_len=64),
        partial(sequences, 24, "mask"),
    ),
    Case(
        "x_transformers",
        "TransformerWrapper",
        x_transformers("TransformerWrapper", num_tokens=100, max_seq_len=64),
        partial(sequences, 99, tokens=True),
    ),
    Case(
        "x_transformers",
        "TransformerWrapper, mask",
        x_transformers("TransformerWrapper", num_tokens=100, max_seq_len=64),
        partial(sequences, 99, "mask", tokens=True),
    ),
    Case(
        "x_transformers",
        "ViTransformerWrapper",
        x_transformers("ViTransformerWrapper", image_size=64, patch_size=16, num_classes=10),
        IMAGE,
    ),
    Case("esm", "ESM2", of("esm.model.esm2.ESM2", num_layers=2, embed_dim=40, attention_heads=4), partial(ids, 16, 24)),
    Case("torch", "TransformerEncoder", layers, partial(sequences, 32)),
    Case("torch", "TransformerEncoder, mask", layers, partial(sequences, 32, PADDING_MASK, False)),
    Case(
        "torch",
        "TransformerEncoder, mask, enable_nested_tensor=False",
        partial(layers, enable_nested_tensor=False),
        partial(sequences, 32, PADDING_MASK, False),
    ),
    Case("torchaudio", "Conformer", of("torchaudio.models.Conformer", 32, 4, 64, 2, 5), partial(clips, 32)),
    Case("torchaudio", "Emformer", of("torchaudio.models.Emformer", 32, 4, 64, 2, 4), partial(clips, 32)),
    Case("torchaudio", "wav2vec2_model", wav2vec2, partial(waves, lengths=False)),
    Case("torchaudio", "wav2vec2_model, lengths", wav2vec2, partial(waves, lengths=True)),
    Case(
        "speechbrain",
        "TransformerEncoder, mask",
        of(f"{SPEECHBRAIN}.transformer.Transformer.TransformerEncoder", 2, 4, 64, d_model=32),
        partial(sequences, 32, PADDING_MASK, False),
    ),
    Case(
        "speechbrain",
        "ConformerEncoder, mask",
        of(f"{SPEECHBRAIN}.transformer.Conformer.ConformerEncoder", 2, 32, 64, 4, 5, attention_type="regularMHA"),
        partial(sequences, 32, PADDING_MASK, False),
    ),
    Case(
        "speechbrain",
        "ECAPA_TDNN",
        of(
            f"{SPEECHBRAIN}.ECAPA_TDNN.ECAPA_TDNN", 40, channels=[64] * 4 + [192], attention_channels=32, lin_neurons=32
        ),
        partial(images, 60, 40),
    ),
    Case(
        "diffusers",
        "DiTTransformer2DModel",
        of(
            "diffusers.DiTTransformer2DModel",
            in_channels=4,
            out_channels=8,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
            **HEADS,
        ),
        partial(latents, (4, 8, 8), timestep=step, class_labels=torch.arange),
    ),
    Case(
        "diffusers",
        "PixArtTransformer2DModel",
        of(
            "diffusers.PixArtTransformer2DModel",
            in_channels=4,
            out_channels=8,
            sample_size=8,
            patch_size=2,
            cross_attention_dim=32,
            caption_channels=24,
            use_additional_conditions=False,
            **HEADS,
        ),
        partial(
            latents,
            (4, 8, 8),
            (4, 8, 12),
            timestep=step,
            encoder_hidden_states=partial(embedded, 24),
            added_cond_kwargs=lambda batch: {"resolution": None, "aspect_ratio": None},
        ),
    ),
    Case(
        "diffusers",
        "SD3Transformer2DModel",
        of(
            "diffusers.SD3Transformer2DModel",
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=24,
            pos_embed_max_size=16,
            **HEADS,
        ),
        partial(
            latents,
            (4, 8, 8),
            (4, 8, 12),
            timestep=step,
            encoder_hidden_states=partial(embedded, 32),
            pooled_projections=lambda batch: torch.randn(batch, 24),
        ),
    ),
    Case(
        "diffusers",
        "FluxTransformer2DModel",
        of(
            "diffusers.FluxTransformer2DModel",
            patch_size=1,
            in_channels=4,
            num_single_layers=1,
            joint_attention_dim=32,
            pooled_projection_dim=24,
            axes_dims_rope=(4, 4, 8),
            **HEADS,
        ),
        flux,
    ),
    Case(
        "diffusers",
        "WanTransformer3DModel",
        of(
            "diffusers.WanTransformer3DModel",
            patch_size=(1, 2, 2),
            in_channels=4,
            out_channels=4,
            text_dim=24,
            freq_dim=16,
            ffn_dim=32,
            **HEADS,
        ),
        partial(latents, (4, 2, 8, 8), (4, 2, 8, 12), timestep=step, encoder_hidden_states=partial(embedded, 24)),
    ),
    Case(
        "diffusers",
        "QwenImageTransformer2DModel",
        of(
            "diffusers.QwenImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            out_channels=4,
            joint_attention_dim=24,
            axes_dims_rope=(8, 4, 4),
            **HEADS,
        ),
        qwen_image,
    ),
    Case(
        "diffusers",
        "AutoencoderKL.encoder",
        lambda: import_module("diffusers").AutoencoderKL(block_out_channels=(32,)).encoder,
        partial(images, 3, 32, 32),
    ),
]


# The table


def run(case: Case) -> dict[str, Any]:
    """The row of a module."""
    torch.manual_seed(0)
    module = case.make().eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() > 1:  # some begin as zeros, with which all outputs are equal
            nn.init.normal_(parameter, std=0.1)
    own, errors, calls = copy.deepcopy(module), [], case.calls()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vg.wrap(module, backend="tape")
        for args, kwargs in calls:
            ours, expected = (getattr(one, case.method)(*args, **kwargs) for one in (module, own))
            mask = next((one for one in kwargs.values() if isinstance(one, Tensor) and one.dtype == torch.bool), None)
            errors += [*differences(ours, expected, mask)]
    found = vg.encoders(module)
    encoders = [each for one in found.values() for each in (one, *one.others)]
    replays, error = sum(one.stats.replays.total() for one in encoders), max(errors)
    eager = sum(sum(stats.eager.values()) for stats in found.stats.values())
    state = "wrong" if error > TOLERANCE else "replayed" if replays >= len(calls) and not eager else "eager"
    told = [str(one.message) for one in caught if "runs eager" in str(one.message)]
    why = "; ".join(" ".join(message.split("call takes it:")[-1].split()).removeprefix("- ") for message in told[:1])
    return {
        "package": case.package, "module": case.name, "encoder": ", ".join(path or "itself" for path in found),
        "outcome": state, "error": error, "seconds": time.perf_counter() - start, "why": why,
    }  # fmt: skip


def differences(ours: Any, expected: Any, mask: Tensor | None) -> Iterator[float]:
    """Relative L2 errors of the tensors of an output, without what pads them."""
    pairs = zip(tensors_of(ours), tensors_of(expected), strict=True)
    for got, right in pairs:
        if got.shape != right.shape:
            yield float("inf")
            continue
        if mask is not None and right.shape[:2] == mask.shape:
            real = mask if bool(mask[0, 0]) else ~mask
            got, right = got[real], right[real]
        if right.is_floating_point():
            yield ((got - right).norm() / right.norm().clamp(min=1e-12)).item()
        else:
            yield 0.0 if torch.equal(got, right) else float("inf")


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of an output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def versions() -> dict[str, str]:
    """The versions of the packages."""
    names = {"open_clip": "open_clip_torch", "whisper": "openai-whisper", "esm": "fair-esm"}
    return {package: version(names.get(package, package)) for package in dict.fromkeys(one.package for one in CASES)}


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of packages or modules")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"versions": versions(), "rows": []}
    for case in CASES:
        if options.names and not any(name in f"{case.package} {case.name}" for name in options.names):
            continue
        with torch.no_grad():
            row = run(case)
        row["why"] = row["why"].replace(str(Path(torch.__file__).parent.parent), "")[:REASON]
        result["rows"].append(row)
        print(row, flush=True)
        write_json(options.json, result)
    columns = ("package", "module", "encoder", "outcome", "why")
    print(table(columns, [[row[column] for column in columns] for row in result["rows"]]))


if __name__ == "__main__":
    main()
