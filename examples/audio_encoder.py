"""Encode audio clips of any length with the recipe for the audio tower of Qwen3-Omni. Random weights."""

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

import varlen_graphs as vg

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {
        "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "output_dim": 64,
        "downsample_hidden_size": 16, "n_window_infer": 200,
    }  # fmt: skip
    torch.manual_seed(0)
    tower = Qwen3OmniMoeAudioEncoder._from_config(Qwen3OmniMoeAudioEncoderConfig(**small if device == "cpu" else {}))
    tower = tower.to(device).eval()  # yours is model.thinker.model.audio_tower
    encoder = vg.recipes.qwen3_omni_audio(
        tower,
        [vg.budgets.Budget(512, items=4), vg.budgets.Budget(1024, items=4)],
        backend="cuda" if device == "cuda" else "tape",
    )

    frames = torch.tensor([580, 131, 97])  # of 10 ms each; a feature extractor returns their number
    input_features = torch.randn(tower.config.num_mel_bins, int(frames.sum()), device=device)
    out = encoder(input_features, feature_lens=frames).last_hidden_state
    eager = encoder.eager(input_features, feature_lens=frames).last_hidden_state
    print(f"{len(frames)} clips, {len(out)} tokens, padding {encoder.stats.padding_share:.0%}", encoder)
    print("largest difference from eager:", (out - eager).abs().max().item())
