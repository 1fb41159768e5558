"""The memory and Python state that graphs depend on, watched for changes."""

from collections.abc import Collection

from varlen_graphs.errors import counted, warn
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.graph_set import GraphSet
from varlen_graphs.watch.attributes import AttributeSnapshot
from varlen_graphs.watch.module_guard import ModuleGuard


class Dependencies:
    """Watches what graphs read and freeze outside of their own memory.

    Args:
        forward: The forward that graphs are captured from.

    Attributes:
        guard: Compares memory and Python state with the last capture; `None` before the first.
        kept: Descriptions of tensors that were made during captures and are still referenced.
    """

    def __init__(self, forward: Forward) -> None:
        self.guard: ModuleGuard | None = None
        self.kept: list[str] = []
        self._forward = forward
        self._attributes: AttributeSnapshot | None = None
        self._unowned: list[str] = []

    @property
    def attributes(self) -> AttributeSnapshot:
        """The Python attributes of the module that graphs freeze, as of the first capture."""
        return self._attributes or AttributeSnapshot(self._forward.module)

    def watch(self, sets: Collection[GraphSet], attributes: AttributeSnapshot) -> None:
        """Watch all that these graphs depend on, once the module's caches are filled; warn of what cannot be."""
        forward = self._forward
        read = [tensor for graphs in sets for tensor in graphs.read]
        if forward.compiled is not None:  # what compiled code reads is not seen
            read += forward.module.buffers()
        own = {address for graphs in sets for address in graphs.own}
        self._attributes = attributes
        self.guard = ModuleGuard(forward.module, forward.beside, read, own, attributes)
        self._warn_of_unowned(self.guard.unowned)
        self._warn_of_kept(sets)

    def forget(self) -> None:
        """Stop watching."""
        self.guard = None
        self.kept = []
        self._attributes = None

    def _warn_of_kept(self, sets: Collection[GraphSet]) -> None:
        before, self.kept = self.kept, [kept for graphs in sets for kept in graphs.kept_outside]
        if set(self.kept).difference(before):
            warn(
                f"something outside of the module keeps {counted(len(self.kept), 'tensor')} made while graphs were "
                f"captured: {'; '.join(self.kept)}; replays overwrite this memory, and no graph can use it for "
                "anything else; return what is needed as an output, and drop the rest"
            )

    def _warn_of_unowned(self, unowned: list[str]) -> None:
        before, self._unowned = self._unowned, unowned
        if set(unowned).difference(before):
            warn(
                f"graphs read {counted(len(unowned), 'tensor')} that neither the module nor a part of it holds: "
                f"{'; '.join(unowned)}; they "
                "are held, but if they are replaced later, graphs go on reading what is held, and nothing reports it; "
                "register them, or the modules they belong to, as parts of the module"
            )
