"""`DataParallelEncoder`: the items of one call, distributed over several GPUs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from varlen_graphs.calls.results import Collected
from varlen_graphs.calls.row_checks import check_extra_inputs, check_rows
from varlen_graphs.capture.ambient import autocast_dtype
from varlen_graphs.capture.torch_modes import INSTEAD, records, watcher
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.part import part_of
from varlen_graphs.declaration.reading import read_items, read_layout
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import InputError, SpecError
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.parts import Parts, with_padding
from varlen_graphs.parallel.assign import Weights, assign
from varlen_graphs.parallel.form import encode, learn_form, smallest_of_all, smallest_part
from varlen_graphs.parallel.kinds import Kind, check_form, check_same, check_static_args
from varlen_graphs.parallel.ranks import Ranks
from varlen_graphs.parallel.shares import join_layouts
from varlen_graphs.routing.packing import ReplayBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DataParallelEncoder:
    """Encodes the items of each call on all ranks of a group; each rank encodes a part of them.

    Each rank holds the module and its own encoder. All ranks make the same call, and each returns the whole output, in
    the order of the items, as a single encoder does; only the gather runs outside of the graphs. Items are assigned by
    cost, the costliest first, each to the rank with the least load, with the costs measured by rank 0. Groups of items
    stay together. A rank without items only receives.

    The first call, and the first with other static arguments, captures on every rank and checks that all ranks make the
    same call. Later calls send nothing but outputs. All ranks must make the same calls in the same order, from one
    thread.

    An error that every rank can detect (invalid items, an undeclared argument, an item that is too large with
    `on_miss="error"`) raises on all ranks, before anything is sent. An error that only one rank meets while it encodes,
    such as a lack of memory, raises on that rank; the others return NaN for its items, and raise `RankError`: on the
    CPU from the same call, on GPUs from the first call that ends after the GPU reached the error, or from `check()`.
    If a rank is lost, the others wait until the timeout of the group, and raise `RankError`; with NCCL, torch's
    watchdog then ends their processes, unless `TORCH_NCCL_BLOCKING_WAIT=1`.

    Calls for undeclared outputs, such as `output_attentions=True`, and calls that need gradients, as for
    `GraphedEncoder`, run as a whole on every rank, which then has all gradients; `inputs="spread"` refuses both.

    Args:
        encoder: Encoder of this rank, with the same module, budgets and options on all ranks.
        group: Process group of `torch.distributed`; `None` is the default group.
        inputs: `"whole"`: every rank passes all items. `"spread"`: each rank passes its own items and encodes these, or
            passes none (rows `[0, ...]`, and an empty list); outputs are in the order of the ranks. Each call then
            first exchanges items and errors between ranks, which synchronizes with the host.

    Attributes:
        encoder: As given. Its `stats` count the items that this rank encodes.
        weights: Costs by which items are assigned, the same on all ranks.

    Raises:
        SpecError: There is no process group, `encoder` is not a `GraphedEncoder`, or `inputs` is neither
            `"whole"` nor `"spread"`.
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
            raise SpecError(f"encoder is a {type(encoder).__name__}: expected a GraphedEncoder of the module")
        self.encoder = encoder
        self._ranks = Ranks(group)
        self._spread = inputs == "spread"
        self.weights = Weights()
        self._met: set[tuple[bool, Kind]] = set()  # True for calls that graphs encode
        self._forms: dict[Kind, Parts] = {}

    @property
    def module(self) -> nn.Module:
        """The module of the encoder."""
        return self.encoder.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call, on all ranks together.

        A layout on the GPU costs one copy to the host.

        Returns:
            The module's output for all items, on every rank.

        Raises:
            RankError: Another rank raised an error, in this call or while it encoded an earlier one, made a different
                call, or no longer takes part.
            SpecError: Ranks cannot compare a static argument, or the output has Python values that depend on the items.
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for `GraphedEncoder`.
        """
        by = watcher(args, kwargs)
        if self._ranks.count == 1 or (by is not None and records(by) and not self._spread):
            return self.encoder(*args, **kwargs)  # a record of this rank's work would lack that of others
        if by is not None and records(by):
            raise InputError(f"a call with inputs='spread' came under {by}: expected inputs='whole', or {INSTEAD}")
        return self._call_spread(args, kwargs) if self._spread else self._call_whole(args, kwargs)

    def check(self) -> None:
        """Wait for all calls, and raise if another rank failed in one.

        Raises:
            RankError: Another rank raised an error while it encoded.
        """
        self._ranks.tell(wait=True)

    def _call_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for which every rank has all items."""
        bind = partial(self._bind, args, kwargs)
        # A call that cannot be bound has no kind. Other ranks are sure to wait for its error only at the first call.
        bound = bind() if self._met else None
        if bound is not None and (bound.eager_reason is None, kind := self._kind(bound)) in self._met:
            call, layout = bound, self._read_whole(bound, kind)
        else:
            call, kind, layout = self._meet(lambda: bound or bind())
        if layout is None:
            return self.encoder(*args, **kwargs)
        if (form := self._forms.get(kind)) is None:
            form = self._learn(kind, smallest_part(self.encoder.spec, call))
        shares = self._shares(layout)

        def own() -> Call:
            share = shares[self._ranks.own]
            return part_of(self.encoder.spec, call, share.layout(layout), share.slices(layout))

        return self._run(call, layout, shares, form, own)

    def _meet(self, bind: Callable[[], Call]) -> tuple[Call, Kind, Layout | None]:
        """Bind the first call of its kind; an error on one rank raises on all."""

        def read() -> tuple[tuple[Call, Kind, Layout | None], tuple[Any, Any]]:
            call = bind()
            kind = self._kind(call)
            layout = self._read_whole(call, kind)
            if layout is None:
                return (call, kind, None), (sorted(call.static_args), kind.trained or "a call that graphs do not run")
            check_static_args(call.static_args)
            return (call, kind, layout), (kind, layout)

        met, told = self._ranks.exchange(self._device, read)
        check_same(told)
        self._met.add((met[0].eager_reason is None, met[1]))
        return met

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Sort the arguments of a call; its items are read later, because errors in them may be told to all ranks."""
        executor = self.encoder.executor
        call = executor.signature.bind(args, kwargs)
        check_rows(executor.store, call.rows.device, call.rows.dtype)
        if call.inputs:
            check_extra_inputs(executor.store, call)
        return call

    def _read_whole(self, call: Call, kind: Kind) -> Layout | None:
        """Return the items of a call; `None` if only the module itself can run it, as a whole."""
        if call.eager_reason is not None or kind.trained is not None:
            return None
        read_items(self.encoder.spec, call)
        if call.eager_reason is not None:
            return None
        layout = read_layout(self.encoder.spec, call)
        self._check_fits(layout, call)
        return layout

    def _call_spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for which each rank has its own items."""

        def read() -> tuple[Call, tuple[Layout, tuple[int, ...], Kind]]:
            call = self._bind(args, kwargs)
            layout = self._read_own(call)
            if call.eager_reason is not None:
                raise InputError(
                    f"{call.eager_reason}: with inputs='spread' expected a call that graphs can run; use inputs='whole'"
                )
            check_static_args(call.static_args)
            kind = self._kind(call)
            if kind.trained is not None:
                raise InputError(
                    f"{kind.trained}: with inputs='spread' outputs of other ranks would carry no gradient: expected "
                    "inputs='whole', where every rank runs all items with their gradients; or train encoder.module "
                    "itself on the items of each rank; or call under torch.no_grad()"
                )
            return call, (layout, call.padded, kind)

        call, told = self._ranks.exchange(self._device, read)
        kinds = [kind for _, _, kind in told]
        check_same(kinds)
        layouts = [layout for layout, _, _ in told]
        layout = join_layouts(layouts, self.encoder.spec.layout)
        if not layout.items:
            raise InputError("no rank has items: expected items on some rank; skip the call if there are none")
        self._check_fits(layout, call)
        call.padded = tuple(map(max, zip(*filter(None, [padded for _, padded, _ in told]), strict=True)))
        ends = [sum(map(len, layouts[: rank + 1])) for rank in range(self._ranks.count)]
        shares = [ReplayBatch(None, range(end - len(own), end)) for own, end in zip(layouts, ends, strict=True)]
        if (form := self._forms.get(kinds[0])) is None:
            form = self._learn(kinds[0], smallest_of_all(self._ranks, self.encoder.spec, call, layouts))

        def own() -> Call:
            part = shares[self._ranks.own].layout(layout)
            item_slice = ItemSlice.of(part)  # a padded batch keeps as many rows as its longest item has
            return part_of(self.encoder.spec, call, part, [(item_slice, item_slice)])

        return self._run(call, layout, shares, form, own)

    def _read_own(self, call: Call) -> Layout:
        """Return the items of this rank, which may be none."""
        spec = self.encoder.spec
        if call.rows.shape[0] or len(call.description[spec.layout.name]):
            read_items(spec, call)
            return read_layout(spec, call)
        if spec.packs:
            call.rows = spec.rows_form.batch(call.rows).flatten(0, spec.rows_form.padded_dims)
        return spec.layout.layout(())

    def _run(
        self, call: Call, layout: Layout, shares: Sequence[ReplayBatch], form: Parts, own_part: Callable[[], Call]
    ) -> Any:
        """Encode the share of this rank, if it has one, and gather all."""
        parts = [share.layout(layout) if share.items else None for share in shares]
        own: Sequence[Tensor] | None = None
        failure: Exception | None = None
        if parts[self._ranks.own] is not None:
            try:
                encoded = encode(self.encoder.executor, own_part())
                check_form(encoded, form)
                own = encoded.tensors
            except Exception as error:  # other ranks must not wait for a rank that has failed
                failure = error
        gathered = self._ranks.gather(own, parts, form, call.rows.device)
        if failure is not None:
            raise failure
        collected = Collected(ItemSlice.of(layout))
        for share, tensors in zip(shares, gathered, strict=True):
            if tensors:
                collected.take(tensors, form.extents, share.slices(layout, collected.everything))
        self._ranks.tell()
        return form.rebuild(with_padding(collected.tensors, form.extents, layout, call.padded))

    def _shares(self, layout: Layout) -> list[ReplayBatch]:
        """Assign items to ranks; all ranks compute the same assignment."""
        costs, usage = [], self.encoder.spec.usage
        for group in layout.groups:
            one = layout.of(layout.items[group.start : group.stop])
            costs.append(self.weights.cost(one.total, usage.squares(one)))
        tasks = assign(costs, self._ranks.count)
        return [ReplayBatch(None, [item for task in own for item in layout.groups[task]]) for own in tasks]

    def _learn(self, kind: Kind, few: Call) -> Parts:
        """Learn the form of outputs, and the costs measured by rank 0, in the first call of a kind."""

        # Every rank encodes the same few items, which captures: a rank without items then knows what to receive.
        def learn() -> tuple[Parts, Weights]:
            form = learn_form(self.encoder.executor, few)
            return form, Weights.of(self.encoder.costs)

        self._forms[kind], weights = self._ranks.exchange(self._device, learn)
        self.weights = weights[0]
        return self._forms[kind]

    def _kind(self, call: Call) -> Kind:
        """Return the kind of a call, before its items are read."""
        grad = torch.is_grad_enabled()
        trained = self.encoder.executor.mode.why_trained(call.requires_grad) if grad else None
        row_shape = self.encoder.spec.rows_form.row_shape(call.rows.shape)
        state = self.encoder.executor.mode.change()
        return Kind(call.key, row_shape, state, autocast_dtype(call.rows.device.type), trained)

    def _check_fits(self, layout: Layout, call: Call) -> None:
        """Check that budgets hold all items, those of other ranks too, if an item that none holds is an error."""
        executor = self.encoder.executor
        if executor.mode.backend(call.rows.device) is not None:
            executor.router.check_misses(layout)

    @property
    def _device(self) -> torch.device:
        return self.encoder.executor.forward.device or torch.device("cpu")

    def __repr__(self) -> str:
        return f"DataParallelEncoder({self.encoder!r}, rank {self._ranks.own} of {self._ranks.count})"
