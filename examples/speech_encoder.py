"""A Whisper-like encoder of clips of any length: two convolutions halve the frames before the transformer."""

import torch
import torch.nn.functional as F

import varlen_graphs as vg


def half(frames):
    """Number of rows that the convolution of stride 2 makes of an item."""
    return (frames - 1) // 2 + 1


class Speech(torch.nn.Module):
    def __init__(self, mels=16, dim=64, heads=4, depth=2):
        super().__init__()
        self.conv1 = torch.nn.Conv1d(mels, dim, kernel_size=3, padding=1)
        self.conv2 = torch.nn.Conv1d(dim, dim, kernel_size=3, stride=2, padding=1)
        layer = torch.nn.TransformerEncoderLayer(dim, heads, 2 * dim, batch_first=True, activation="gelu")
        self.layers = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.frequencies = torch.nn.Buffer(10_000 ** -(torch.arange(dim // 2) / (dim // 2)))

    def forward(self, features, frame_mask, key_padding_mask):
        # The second convolution reads past the end of an item, where the first one has left its bias.
        x = F.gelu(self.conv1(features.mT)) * frame_mask[:, None]
        x = F.gelu(self.conv2(x)).mT
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        return self.layers(x + torch.cat([angles.sin(), angles.cos()], -1), src_key_padding_mask=key_padding_mask)


spec = vg.BufferSpec(
    rows=vg.inputs.Rows("features", shape=(16,)),
    layout=vg.Lengths("lengths", padded=True),
    buffers=[
        vg.buffers.Mask("frame_mask"),
        vg.buffers.Mask("key_padding_mask", real=False, of_item=half),
    ],
    outputs=vg.outputs.Entries(half),
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    torch.manual_seed(0)
    module = Speech().to(device).eval()
    encoder = vg.GraphedEncoder(module, vg.budgets.PaddedLadder(batch=4, length=256, step=2), spec, backend=backend)

    features, lengths = torch.randn(3, 201, 16, device=device), [201, 34, 77]
    out = encoder(features, lengths=lengths)
    with torch.no_grad():  # the shortest clip alone, without any padding
        masks = (torch.full((1, rows), real, device=device) for rows, real in ((34, True), (half(34), False)))
        alone = module(features[1:2, :34], *masks)
    print(f"{list(features.shape)} -> {list(out.shape)}", encoder)
    print("largest difference from eager:", (out[1:2, : half(34)] - alone).abs().max().item())
