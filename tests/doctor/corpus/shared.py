"""Sites of the helpers that many towers of transformers call, as read in `vision_utils` and `masking_utils`."""

from tests.doctor.corpus.sites import Site, sites

VISION = "transformers.vision_utils"
MASKS = "transformers.masking_utils"

_IDS = "get_vision_position_ids"
MERGE_SIZE = sites(_IDS, "spatial_merge_size = torch.tensor([spatial_merge_size], device=device)", file=VISION)
IDS = sites(
    _IDS,
    "for (t, h, w), merge_size in zip(grid_thw.tolist(), spatial_merge_size.tolist()):",
    "hpos_ids, wpos_ids = torch.meshgrid(",
    file=VISION,
)
FRAMES = sites(_IDS, "torch.stack([hpos_ids, wpos_ids], dim=-1).repeat(t, 1)", file=VISION)
"""The ids of a frame, once for each frame of a video."""

POSITION_IDS = MERGE_SIZE + IDS
TIME = sites(
    _IDS,
    "tpos_ids = torch.arange(t, device=device).repeat_interleave(h * w)",
    "torch.stack([tpos_ids, hpos_ids.repeat(t), wpos_ids.repeat(t)], dim=-1)",
    file=VISION,
)
RESHAPED = sites(
    _IDS, "hpos_ids = hpos_ids.reshape(block_shape)", "wpos_ids = wpos_ids.reshape(block_shape)", file=VISION
)
"""Shaped by numbers that the list gave: those of the ids' own sides, except where merge sizes differ."""

CU_SEQLENS = sites("get_vision_cu_seqlens", "seqlens = torch.repeat_interleave(", file=VISION)

INTERPOLATION = sites(
    "get_vision_interpolation_indices_and_weights",
    "heights = torch.repeat_interleave(",
    "widths = torch.repeat_interleave(",
    "starts = torch.repeat_interleave(",
    "within = (torch.arange(counts.sum(), device=device)",
    file=VISION,
)

WINDOW_INDEX = sites(
    "get_vision_window_index",
    "in grid_thw.tolist():",
    "cu_window_seqlens = torch.tensor(cu_window_seqlens, device=grid_thw.device",
    "cu_window_seqlens = torch.unique_consecutive(",
    file=VISION,
)
"""All else there is on the host, where no graph looks; the index stays on the host."""

NEAREST = sites(
    "get_vision_nearest_position_ids",
    "for height, width in target_sizes.tolist():",
    "h_coords = torch.arange(height",
    "w_coords = torch.arange(width",
    file=VISION,
)

PADDING_MASK = sites("_ignore_bidirectional_mask_sdpa", "padding_mask.all()", file=MASKS)
MASK_OR_NONE: tuple[Site, ...] = (
    *sites("sdpa_mask", "if allow_is_bidirectional_skip and", "batch_arange = ", "head_arange = ", "q_arange = ",
           "kv_arange = ", "attention_mask = mask_function(*_non_vmap", "attention_mask = attention_mask.expand(",
           file=MASKS),
    *sites("_ignore_bidirectional_mask_sdpa", "if _is_torch_xpu_available:", file=MASKS),
    *sites("padding_mask_function.inner_mask", "return padding_mask[batch_idx, kv_idx]", file=MASKS),
    *sites("create_position_bias_mask", "if attention_mask is None:", with_body=True,
           file="transformers.integrations.sdpa_attention"),
    *sites("sdpa_attention_forward", "attn_output = torch.nn.functional.scaled_dot_product_attention(",
           file="transformers.integrations.sdpa_attention"),
)  # fmt: skip
"""What runs or not, because nothing is padding or something is: consequences of `padding_mask.all()`."""


def attention(name: str, outputs: str = "attn_outputs = [") -> tuple[Site, ...]:
    """Return the sites of an attention that runs segment by segment."""
    return sites(f"{name}.forward", "torch.split(tensor, lengths.tolist(), dim=2)", outputs)


LOOP = "for q, k, v in zip(*splits):"
"""How the outputs of an attention begin that also gives weights."""
