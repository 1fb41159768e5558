"""Which buffer would take the place of a line, as its words suggest."""

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
"""By words, those that say most first."""

_TAKES_BUFFER = {
    "host sync", "branch", "copy to host", "copy to device", "host tensor", "data-dependent shape", "frozen value",
    "frozen branch", "cache by layout",
}  # fmt: skip


def declaration_for(kind: str, line: Line, module: str) -> str | None:
    """What to declare in the place of a line: told from the name of its function, what it says, and the submodule's."""
    if kind in _TAKES_BUFFER:
        for words in (line.function, line.source, module):
            for pattern, declaration in _DECLARATIONS.items():
                if re.search(pattern, words):
                    return declaration
    return None
