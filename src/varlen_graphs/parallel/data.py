"""`DataParallelEncoder`: the items of one call, spread over several GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from varlen_graphs.capture.mode import autocast_dtype
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.span import Span
from varlen_graphs.parallel.assign import Weights, assign
from varlen_graphs.parallel.kinds import Kind, check_form, check_same, check_statics
from varlen_graphs.parallel.ranks import Ranks
from varlen_graphs.routing.packing import Pack
from varlen_graphs.serving.results import Collected
from varlen_graphs.serving.row_checks import check_rows
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.outputs import Parts, flatten, with_padding
from varlen_graphs.spec.reading import read_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DataParallelEncoder:
    """Encodes the items of each call on all ranks of a group, every rank some of them.

    Each rank holds the module and an encoder of it. All ranks make a call at once, and each gets the whole output, in
    the order of the items, as from one encoder; only the gather runs outside of the graphs. Items are spread by what
    they cost, the longest first, each to the rank with least to do. Costs are those that rank 0 measured. Groups of
    items stay together. A rank that gets no items only receives.

    The first call captures on every rank, as does the first with other static arguments, and the ranks compare what
    they were called with. Later calls send nothing but outputs. All ranks must make the same calls in the same order,
    from one thread. What every rank can see to be wrong (items that make no sense, an undeclared argument, an item that
    is too large with `on_miss="error"`) raises on all ranks, before anything is sent. What only one rank meets while it
    encodes, such as memory that is not enough, raises there; the others get NaN for its items, and `RankError`: on the
    CPU from the same call, on GPUs from the first call that ends after the GPU got there, or from `check()`. For a rank
    that is lost they wait until the timeout of the group, and raise `RankError`; over NCCL torch's watchdog then ends
    their processes, unless `TORCH_NCCL_BLOCKING_WAIT=1`.

    Calls for outputs that are not declared, such as `output_hidden_states=True`, run as a whole on every rank.

    Args:
        encoder: The encoder of this rank. All have the same module, budgets and options.
        group: The ranks, of `torch.distributed`; `None` is the default group.
        inputs: `"whole"`: every rank brings all items. `"spread"`: each rank brings its own and encodes these, or has
            none (rows `[0, ...]`, and an empty list); outputs are in the order of the ranks. Each call then tells items
            and errors to all ranks first, which synchronizes with the host.

    Attributes:
        encoder: As given. Its `stats` count what this rank encodes.

    Raises:
        SpecError: There is no process group, or an encoder that lends its outputs.
    """

    def __init__(
        self,
        encoder: GraphedEncoder,
        group: "ProcessGroup | None" = None,
        *,
        inputs: Literal["whole", "spread"] = "whole",
    ) -> None:
        if inputs not in ("whole", "spread"):
            raise SpecError(f"inputs={inputs!r}: expected 'whole' or 'spread'")
        if not isinstance(encoder, GraphedEncoder):
            raise SpecError(f"a {type(encoder).__name__} came as the encoder: expected a GraphedEncoder of the module")
        if encoder.executor.lends:
            raise SpecError("outputs are gathered, which copies them: expected an encoder with outputs='owned'")
        self.encoder = encoder
        self._ranks = Ranks(group)
        self._spread = inputs == "spread"
        self._weights = Weights()
        self._met: set[tuple[bool, Kind]] = set()  # whether graphs answer for them, too
        self._forms: dict[Kind, Parts] = {}

    @property
    def module(self) -> nn.Module:
        """The module of the encoder."""
        return self.encoder.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call, on all ranks together.

        Items that are described on the GPU cost one copy to the host.

        Returns:
            The module's output for all items, on every rank.

        Raises:
            RankError: Another rank raised an error, in this call or while it encoded an earlier one, was called with
                something else, or takes part no more.
            SpecError: A static argument that ranks cannot compare, or an output with Python values that depend on the
                items.
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for `GraphedEncoder`.
        """
        if self._ranks.count == 1:
            return self.encoder(*args, **kwargs)
        with torch.no_grad():
            return self._call_spread(args, kwargs) if self._spread else self._call_whole(args, kwargs)

    def check(self) -> None:
        """Wait for all calls, and raise what went wrong in them on other ranks.

        Raises:
            RankError: Another rank raised an error while it encoded.
        """
        self._ranks.tell(wait=True)

    def _call_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call to which every rank brought all items."""
        bind = partial(self._bind, args, kwargs)
        # A call that cannot be bound is of no kind: that others wait to be told of it is sure of the first one only.
        bound = bind() if self._met else None
        if bound is not None and (bound.beyond is None, kind := self._kind(bound)) in self._met:
            call, layout = bound, self._read_whole(bound)
        else:
            call, kind, layout = self._meet(lambda: bound or bind())
        if layout is None:
            return self.encoder(*args, **kwargs)
        form = self._forms.get(kind) or self._learn(kind, call, layout)
        shares = self._shares(layout)
        return self._run(call, layout, shares, form, lambda: self._rows_of(shares[self._ranks.own], call, layout))

    def _meet(self, bind: Callable[[], Call]) -> tuple[Call, Kind, Layout | None]:
        """The first call of its kind: what is wrong with it on one rank, all are told."""

        def read() -> tuple[tuple[Call, Kind, Layout | None], tuple[Any, Any]]:
            call = bind()
            kind, layout = self._kind(call), self._read_whole(call)
            if layout is None:
                return (call, kind, None), (sorted(call.statics), "items that graphs do not answer for")
            check_statics(call.statics)
            return (call, kind, layout), (kind, layout)

        met, told = self._ranks.exchange(self._device, read)
        check_same(told)
        self._met.add((met[2] is not None, met[1]))
        return met

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Sort the arguments of a call; its items are read later, because errors in them may be told to all ranks."""
        executor = self.encoder.executor
        call = executor.signature.bind(args, kwargs)
        check_rows(executor.store, call.rows.device, call.rows.dtype)
        return call

    def _read_whole(self, call: Call) -> Layout | None:
        """The items of a call; `None` where nothing tells which of its entries belong to which item."""
        if call.beyond is not None:
            return None
        layout = read_layout(self.encoder.spec, call)
        self._check_fits(layout, call)
        return layout

    def _call_spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call to which each rank brought its own items."""

        def read() -> tuple[Call, tuple[Layout, int, Kind]]:
            call = self._bind(args, kwargs)
            if call.beyond is not None:
                raise InputError(f"{call.beyond}: spread inputs have outputs that are declared; bring whole ones")
            check_statics(call.statics)
            kind = self._kind(call)
            return call, (self._read_own(call), call.length, kind)

        call, told = self._ranks.exchange(self._device, read)
        kinds = [kind for _, _, kind in told]
        check_same(kinds)
        layouts = [layout for layout, _, _ in told]
        layout = _joined(layouts, self.encoder.spec.layout)
        if not layout.items:
            raise InputError("no rank brought items: skip the call when there is nothing to encode")
        self._check_fits(layout, call)
        call.length = max(length for _, length, _ in told)
        ends = [sum(map(len, layouts[: rank + 1])) for rank in range(self._ranks.count)]
        shares = [Pack(None, range(end - len(own), end)) for own, end in zip(layouts, ends, strict=True)]
        form = self._forms.get(kinds[0]) or self._learn(kinds[0], call, layout)
        extent, own = self.encoder.spec.row_extent, shares[self._ranks.own]
        # Of a batch as many rows as its longest item has.
        return self._run(call, layout, shares, form, lambda: extent.part(call.rows, Span.of(own.layout(layout))))

    def _read_own(self, call: Call) -> Layout:
        """The items that this rank brought, which may be none."""
        spec = self.encoder.spec
        if call.rows.shape[0] or len(call.description[spec.layout.name]):
            return read_layout(spec, call)
        if spec.packed.padded_by is not None:
            call.rows = call.rows.flatten(0, 1)
        return Layout((), 0, spec.layout.grouped)

    def _run(
        self, call: Call, layout: Layout, shares: Sequence[Pack], form: Parts, own_rows: Callable[[], Tensor]
    ) -> Any:
        """Encode the share of this rank, if it has one, and gather all."""
        parts = [share.layout(layout) if share.items else None for share in shares]
        mine = parts[self._ranks.own]
        own: Sequence[Tensor] | None = None
        failure: Exception | None = None
        if mine is not None:
            try:
                encoded = self._encode(call, own_rows(), mine)
                check_form(encoded, form)
                own = encoded.tensors
            except Exception as error:  # others must not wait for a rank that has failed
                failure = error
        gathered = self._ranks.gather(own, parts, form, call.rows.device)
        if failure is not None:
            raise failure
        collected = Collected(Span.of(layout))
        for share, tensors in zip(shares, gathered, strict=True):
            if tensors:
                collected.take(tensors, form.extents, share.spans(layout, collected.everything))
        self._ranks.tell()
        return form.rebuild(with_padding(collected.tensors, form.extents, layout.rows, call.length))

    def _encode(self, call: Call, rows: Tensor, part: Layout) -> Parts:
        """The outputs of some items of a call; of a batch that was packed on its way in they are packed, too."""
        own = replace(call, rows=rows, layout=part, original={}, length=0)
        return flatten(self.encoder.executor.answer(own), self.encoder.spec.declared)

    def _shares(self, layout: Layout) -> list[Pack]:
        """The items of each rank, the same on all of them."""
        costs, needs = [], self.encoder.spec.needs
        for group in layout.groups:
            one = Layout(layout.items[group.start : group.stop], layout.length, layout.grouped)
            costs.append(self._weights.cost(one.total, needs.squares(one)))
        tasks = assign(costs, self._ranks.count)
        return [Pack(None, [item for task in own for item in layout.groups[task]]) for own in tasks]

    def _rows_of(self, share: Pack, call: Call, layout: Layout) -> Tensor:
        """The rows of these items: a view, or one copy."""
        if len(share.items) == len(layout):
            return call.rows
        extent = self.encoder.spec.row_extent
        views = [extent.part(call.rows, there) for there, _ in share.spans(layout, Span.of(layout))]
        return torch.cat(views) if len(views) > 1 else views[0]

    def _learn(self, kind: Kind, call: Call, layout: Layout) -> Parts:
        """What outputs are like, without entries, found out in the first call of its kind, on every rank.

        By the smallest item of the call over rows of padding, which captures. So a rank that has no items yet knows
        what it will receive, and what rank 0 measured reaches all.
        """

        def learn() -> tuple[Parts, Weights]:
            form = self._encode_smallest(call, layout)
            return form, Weights.of(self.encoder.costs)

        self._forms[kind], weights = self._ranks.exchange(self._device, learn)
        self._weights = weights[0]
        return self._forms[kind]

    def _encode_smallest(self, call: Call, layout: Layout) -> Parts:
        """The output for the smallest item of a call, or group, over rows of padding, without its entries.

        For two of it as well, if a budget holds them: what depends on how many items or rows there are is not the same.

        Raises:
            SpecError: The output has such values, which ranks could not know.
        """
        group = min(layout.groups, key=lambda group: sum(layout.rows[i] for i in group))
        one = Pack(None, group).layout(layout)
        parts, two = self._encode_padding(call, one), replace(one, items=one.items * 2)
        if self.encoder.executor.router.fits(two.items):
            check_form(self._encode_padding(call, two), parts)
        return replace(parts, tensors=[tensor.to("meta") for tensor in parts.tensors])

    def _encode_padding(self, call: Call, part: Layout) -> Parts:
        """The outputs of some items over rows of padding, like those of a call."""
        extent, pad = self.encoder.spec.row_extent, self.encoder.spec.packed.pad
        shape = extent.resize(call.rows.shape, extent.size(Span.of(part)))
        return self._encode(call, call.rows.new_full(shape, pad), part)

    def _kind(self, call: Call) -> Kind:
        """The kind of a call, before its items are read."""
        row_shape = tuple(call.rows.shape[len(self.encoder.spec.call_dims) :])
        device_type = call.rows.device.type
        state = self.encoder.executor.mode.change(device_type)
        return Kind(call.key, row_shape, state, autocast_dtype(device_type))

    def _check_fits(self, layout: Layout, call: Call) -> None:
        """Whether budgets hold all items, also those of other ranks, where one that none holds is an error.

        Raises:
            BudgetError: None holds one.
        """
        executor = self.encoder.executor
        if executor.mode.backend(call.rows.device) is not None:
            executor.router.check_misses(layout)

    @property
    def _device(self) -> torch.device:
        return self.encoder.executor.forward.device or torch.device("cpu")

    def __repr__(self) -> str:
        return f"DataParallelEncoder({self.encoder!r}, rank {self._ranks.own} of {self._ranks.count})"


def _joined(layouts: Sequence[Layout], argument: LayoutArgument) -> Layout:
    """The items of several layouts as those of one call."""
    items = [item for layout in layouts for item in layout.items]
    length = max(layout.length for layout in layouts)
    for at, column in enumerate(argument.columns, start=3):
        if column.function is not None and items:  # it follows from all of them
            values = column.parse(column.function(Layout(tuple([item[:3] for item in items]), length)), len(items))
            items = [(*item[:at], value, *item[at + 1 :]) for item, value in zip(items, values, strict=True)]
    return Layout(tuple(items), length, argument.grouped)
