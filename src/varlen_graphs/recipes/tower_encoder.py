"""The part that encoders of recipes share whose calls are not those of their graphs."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from varlen_graphs.encoder import GraphedEncoder


class TowerEncoder(GraphedEncoder):
    """Encoder that is called as its tower is, prepares each call for its graphs, or lets the tower itself answer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call: see `forward`. Runs hooks on the encoder itself, if there are any."""
        if self._forward_hooks or self._forward_pre_hooks:
            return nn.Module.__call__(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets

    def _itself(self, reason: str, items: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the tower itself, and count the call."""
        self.executor.begin()
        self.stats.count_call(items)
        self.stats.count_eager(reason)
        return self.executor.forward.itself(*args, **kwargs)
