"""Suggestions of buffers to declare, by the words of a line."""

import re

from varlen_graphs.watch.lines import Line

_DECLARATIONS = {
    r"window_(index|attn|seqlens)": "WindowIndex(Windows(side)) and CuSeqlens(per=Windows(side))",
    r"max_?(seq)?_?len|max_length|longest|\.max\(|\bmax\(": "MaxSeqlen",
    r"cu_?seq|seq_?lens": "CuSeqlens",
    r"interpolat|bilinear|bicubic|upsample|resample": "Interpolation",
    r"rot(ary)?_|_rot|rope|freqs": "RotaryTable",
    r"pos(ition)?_?ids|coordinates": "GridPositions (of grids) or RowPositions (of lengths)",
    r"(padding|attention|sdpa)_mask": "the layout PaddedMask, or the buffer KeyPaddingMask",
    r"attn|attention": "CuSeqlens, and call vg.varlen_attention with it",
}
"""Declaration by pattern, most specific first."""

_REPLACEABLE = {
    "host sync", "branch", "copy to host", "copy to device", "host tensor", "data-dependent shape", "frozen value",
    "frozen branch", "cache by layout",
}  # fmt: skip
"""Kinds of findings that a buffer can resolve."""


def suggest_declaration(kind: str, line: Line, module: str) -> str | None:
    """Suggest what to declare instead of a line, from the name of its function, its source and its submodule's path."""
    if kind in _REPLACEABLE:
        for words in (line.function, line.source, module):
            for pattern, declaration in _DECLARATIONS.items():
                if re.search(pattern, words):
                    return declaration
    return None
