"""What models ask about masks on the host: answered no in a graph, and not asked in compiled code."""

import torch

from varlen_graphs.recipes.modes.masked_conv import MaskedConv
from varlen_graphs.recipes.modes.skip_mask_checks import SkipMaskChecks


def test_code_under_the_modes_compiles_whole():
    def run(mode, mask):
        with mode():
            return torch.nn.functional.softmax(mask.float(), dim=-1) * mask.all()

    mask = torch.ones(3, 4, dtype=torch.bool)
    for mode in (SkipMaskChecks, MaskedConv):
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(mode, mask), run(mode, mask))
