"""The one forward that eager calls, warm-up and capture run, so that they cannot drift."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.buffers import Buffer
from varlen_graphs.capture.compiled import CompiledForward
from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.capture.parts import HOOK_ATTRIBUTES
from varlen_graphs.capture.pool import on_device
from varlen_graphs.checks.values import as_tensor
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import EMPTY_ITEM, Call
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES, check_hidden_states
from varlen_graphs.declaration.reading import exact_table, read_layout
from varlen_graphs.declaration.signature import Signature
from varlen_graphs.declaration.static_args import StaticKey
from varlen_graphs.errors import LayoutError, VarlenGraphsError, counted, warn
from varlen_graphs.inputs.extra import Input
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.layouts.dtypes import module_dtype
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.declared import extents
from varlen_graphs.outputs.entries import filled
from varlen_graphs.outputs.parts import Parts, check_extents, clear_gaps, flatten, with_padding
from varlen_graphs.shadows.shadow import Shadow
from varlen_graphs.shadows.shared_writes import SharedWrites
from varlen_graphs.shadows.snapshot import Snapshot, alike

MODULE = "the module itself"
"""Reference that is the module, run with the caller's own arguments or with no computed one."""

DECLARATION = (
    "an eager run of the declared forward (the module itself cannot take these calls, so what the declaration means, "
    "such as per='item' or per='frame', is not verified)"
)
"""Reference for calls that the module does not take."""


class Reference(NamedTuple):
    """The expected output of a call, and its reference in words: `MODULE` or `DECLARATION`."""

    output: Any
    against: str


@dataclass
class Verdict:
    """Findings of checks about a forward, shared with its shadows.

    Attributes:
        wrong: True if it was found to differ from the module itself in service; until a release.
        differs_without: True if it was found to differ in calls that leave arguments out: the module answers those.
        verified: True if graphs passed the check, which includes eager runs, by static keys; `None` if there is none.
        agreed: Static keys of calls in which it was found to compute what the module does.
        changed_outside: Why no call may be answered until a release: captures have changed what the module keeps where
            no copy reaches, and its outputs depend on that.
    """

    wrong: bool = False
    differs_without: bool = False
    verified: dict[StaticKey, bool] | None = None
    agreed: set[StaticKey] = field(default_factory=set)
    changed_outside: str | None = None


class Forward:
    """Computes the declared buffers and runs a module with them.

    Args:
        module: The module.
        function: Function that runs in its place, called as `function(module, **arguments)`; `None` runs the module.
        spec: The declaration.
        signature: The arguments of the encoder.
        compile: If True, graphs capture the output of torch's compiler, which sees the forward behind the buffers.
        method: Name of the module's method that calls mean: it runs where no function does.

    Attributes:
        module: As given.
        module_forward: The method, that of the module itself even if an encoder is put in its place.
        function, method: As given.
        spec: As given.
        compiled: The compiled forward, if there is one.
        verdict: Findings of checks.
        random: The random numbers of runs of a shadow; `None` for the module itself.
        kept: What the module keeps, while graphs depend on it; its own runs are compared with that.
        changed: Places of what the module itself has changed in its runs since; the store empties it.
        check_claim: Called with a call and the module's own output before that answers in place of the function, once
            for each set of static arguments; raises if the function computes something else. `None` lets it answer.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any] | None,
        spec: BufferSpec,
        signature: Signature,
        compile: bool,
        method: str = "forward",
    ) -> None:
        self.module = self._encoded = module
        self.method = method
        self.module_forward: Callable[..., Any] = getattr(module, method)
        self._threads: set[int] = set()  # those that run the function
        self.function, self.spec = function, spec
        self._signature = signature
        self.verdict = Verdict()
        self.kept: Snapshot | None = None
        self.changed: set[str] = set()
        self.check_claim: Callable[[Call, Any], None] | None = None
        self._buffers = spec.buffers
        self._guard: Callable[[Callable[[], Any]], Any] | None = None  # of eager runs of a shadow
        self.compiled = CompiledForward(self._run, module) if compile else None

    def on(self, shadow: Shadow) -> "Forward":
        """Return this forward over a shadow of its module, for runs beside those of calls."""
        own = copy(self)
        own.module = shadow.module
        own.module_forward = shadow.of(self.module_forward)
        shadow.give(dict.fromkeys(self._places, own.module_forward))
        own.function = shadow.of(self.function, "forward")
        own._buffers = tuple(shadow.of(buffer, buffer.name) for buffer in self._buffers)
        own._threads = set()
        own.check_claim = own.kept = None
        own._guard = partial(SharedWrites.guard, shadow)
        own.compiled = None if self.compiled is None else CompiledForward(own._run, own.module)
        return own

    @property
    def device(self) -> torch.device | None:
        """The device of the module's first parameter or buffer; `None` if it has none."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return None if first is None else first.device

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of rows in the arena: the one the module gets, unless rows are normalised."""
        return self.spec.row_input.dtype or self.module_dtype

    @property
    def module_dtype(self) -> torch.dtype:
        """The dtype of the module's first floating matrix, see `module_dtype`."""
        return module_dtype(self.module)

    def input_dtype(self, declared: Input) -> torch.dtype:
        """Return the dtype in which the module receives a tensor beside the rows."""
        return declared.dtype or self.module_dtype

    @property
    def beside(self) -> dict[str, Any]:
        """Callables and objects that run beside the module, by name."""
        others = {"normalize": self.spec.row_input.normalize, "outputs": extents(self.spec.declared)}
        return {buffer.name: buffer for buffer in self._buffers} | others | {"forward": self.function}

    def __call__(self, rows: Tensor, table: ItemTable, given: dict[str, Tensor], static_args: dict[str, Any]) -> Any:
        """Run rows at the capacity of `table.budget`, padding included; see `arguments`."""
        return self.run(self.arguments(rows, table, given, static_args))

    def arguments(
        self,
        rows: Tensor,
        table: ItemTable,
        given: dict[str, Tensor],
        static_args: dict[str, Any],
        keeps_padding: bool = False,
    ) -> dict[str, Any]:
        """Return the arguments for rows, `[rows, ...]` or `[batch, length, ...]`, with all buffers computed.

        `given` holds the host buffers and the tensors beside the rows, by name. With `keeps_padding`, what a call
        brought past the end of items stays.
        """
        spec, takes = self.spec, self._signature.takes
        if not keeps_padding:
            rows = spec.row_extent.clear(rows, table, spec.row_input.pad)
        if not spec.row_extent.gaps and (spec.clears_padding or not rows.is_floating_point()):
            rows = filled(rows, ~table.row_active, spec.row_input.pad)
        if spec.row_input.normalize is not None:
            rows = self._normalized(rows, table, spec.row_extent.dims)
        packed = spec.row_input.as_argument(rows).contiguous()
        arguments: dict[str, Any] = {spec.row_input.name: packed, **given, **static_args}
        arguments |= {one.name: one.prepare(given[one.name], table, spec.clears_padding) for one in spec.inputs}
        if spec.layout.has_argument and not spec.layout.packed and takes(spec.layout.name):
            arguments[spec.layout.name] = spec.layout.argument(table.values, table.budget)
        arguments |= {c.name: table.column(c.name) for c in spec.layout.columns if takes(c.name)}
        return arguments | {b.name: b.produce(table, self.module) for b in self._buffers if isinstance(b, Buffer)}

    def run(self, arguments: dict[str, Any], budget: Budget | None = None, positional: int = 0) -> Any:
        """Run the module, or the function in its place; with a budget, what torch's compiler made of it if it did.

        `positional` is as in `Call`.
        """
        captured = partial(self.compiled, budget) if budget and self.compiled else None
        if self.function is None:
            args, arguments = self._signature.as_passed(positional, arguments)
            return self._running(partial(captured or self.itself, *args, **arguments))
        return self._running(partial(captured or partial(self.function, self.module), **arguments))

    def _running(self, run: Callable[[], Any]) -> Any:
        """Run the module, or the function in its place: what calls the encoder inside means the module itself."""
        if self.is_running:
            return self._noting_changes(run)
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            return self._noting_changes(run)
        finally:
            self._threads.discard(thread)

    def _noting_changes(self, run: Callable[[], Any]) -> Any:
        """Run the module, and note what it changes of what it keeps; what others change between runs is not noted."""
        if (kept := self.kept) is None:
            return run()
        before = kept.now()
        try:
            return run()
        finally:
            now = before if self.kept is None else kept.now()  # another thread may have released all graphs
            for one, (place, value) in (before | now).items():
                changed = one not in before or one not in now or not alike(before[one][1], value)
                if changed and place.rpartition(".")[2] not in HOOK_ATTRIBUTES:
                    self.changed.add(place)

    @property
    def is_running(self) -> bool:
        """True while the module runs, or the function in its place, in this thread."""
        return bool(self._threads) and threading.get_ident() in self._threads

    def exact(
        self,
        call: Call,
        grad: bool = False,
        buffers: Mapping[str, Any] = MappingProxyType({}),
        keeps_padding: bool = False,
    ) -> Any:
        """Run the items of a call without padding; return a batch if its rows are those of one.

        Without gradients, unless `grad` asks for them. `buffers` are taken instead of the declared ones of these names.
        Rows past the end of the items of a padded batch are those that the call brought if `keeps_padding`, or if
        the module `reads_padding`.

        Raises:
            LayoutError: Impossible items, if they were not read before; or items without rows that have no answer.
            SpecError: The output is not as declared (not checked if only the module can answer).
        """
        spec, layout = self.spec, read_layout(self.spec, call)
        if not layout.total or (call.eager_reason == EMPTY_ITEM and spec.layout.prefix):
            self._raise_empty(layout)
        budget, device = spec.exact_budget(layout), call.rows.device
        with torch.set_grad_enabled(grad), on_device(device):
            items = exact_table(spec, layout, device)
            arguments = self._exact_arguments(call, layout, items, budget, keeps_padding)
            output = self._guarded(partial(self.run, {**arguments, **buffers}, positional=call.positional))
            if call.eager_reason not in (None, EMPTY_ITEM):
                return output
            parts = self.take_apart(output, call.static_args, budget)
            if not (spec.changes_outputs or call.padded):
                return output
            clear_gaps(parts, items)
            active = parts.active(ItemSlice.of(layout))
            return parts.rebuild(with_padding(active, parts.extents, layout, call.padded, call.gather_indices))

    def exact_buffers(self, call: Call) -> dict[str, Any]:
        """Return the declared buffers of a call without padding, by name."""
        spec, layout = self.spec, read_layout(self.spec, call)
        with torch.no_grad(), on_device(device := call.rows.device):
            items = exact_table(spec, layout, device)
            arguments = self._exact_arguments(call, layout, items, spec.exact_budget(layout))
        return {buffer.name: arguments[buffer.name] for buffer in spec.buffers}

    def _exact_arguments(
        self, call: Call, layout: Layout, items: ItemTable, budget: Budget, keeps_padding: bool = False
    ) -> dict[str, Any]:
        """Return all arguments of a call without padding. As with graphs, they are no tensors of the caller's."""
        spec, device = self.spec, call.rows.device
        given = {b.name: b.compute(layout, budget, spec.layout.merge).to(device) for b in spec.host_buffers}
        for one, extent in spec.input_extents:
            sizes, dtype = extent.shape(budget), self.input_dtype(one)
            given[one.name] = one.copied(call.inputs.get(one.name), sizes, dtype, device)
        rows = call.rows.to(self.row_dtype, copy=True)
        return self.arguments(rows, items, given, call.static_args, keeps_padding or self.reads_padding(call.key))

    def _raise_empty(self, layout: Layout) -> NoReturn:
        """Raise that an item without rows has no answer: without any rows, or where each item has prefix rows."""
        name, prefix = self.spec.layout.name, self.spec.layout.prefix
        why = f"each item has {counted(prefix, 'prefix row')} of its own" if prefix else "the call has no rows at all"
        raise LayoutError(
            f"{name}[{layout.rows.index(0)}] has no rows, while {why}: expected at least one; drop empty items, or "
            "skip the call when there is nothing to encode"
        )

    def take_apart(self, output: Any, static_args: Mapping[str, Any], budget: Budget) -> Parts:
        """Flatten the output of a run at a budget.

        Raises:
            SpecError: It is not as declared.
        """
        parts = flatten(output, self.spec.declared)
        check_extents(parts, budget)
        if self.function is not None and static_args.get(OUTPUT_HIDDEN_STATES):
            check_hidden_states(parts)
        return parts

    def eager(self, call: Call, hooked: bool, trusts: bool = True, changed: bool = False) -> Any:
        """Run a call eager: by the original module if the function in its place would miss something, or is wrong.

        Until that is known, and where the state of the module is `changed` since, the original runs if it can, unless
        the caller trusts the declared forward.
        """
        if self._signature.original_takes_call and (call.eager_reason or (hooked and call.original)):
            return self.original(call)
        if (is_right := self._is_right(call.key)) is False and not call.eager_reason:
            return self.checked(call, self.answer(call), changed)
        if (is_right is None or changed) and not trusts and not call.eager_reason and self.answers_itself(call):
            try:
                own = self.answer(call)
            except Exception:  # it may need more than these arguments
                return self.exact(call)
            return self.checked(call, own, changed)
        if hooked and self.function is not None:
            warn(
                f"{type(self.module).__name__} has forward hooks, but the function that runs in its place takes other "
                "arguments: hooks on parts that this function does not call see nothing"
            )
        return self.exact(call)

    def checked(self, call: Call, own: Any, changed: bool = False) -> Any:
        """Return the module's own output, if the function in its place claims to compute the same and does so.

        Raises:
            SpecError: It does not, so nobody knows which of the two the caller means.
        """
        if self.check_claim is not None and call.key not in self.verdict.agreed and not (changed or self.verdict.wrong):
            self.check_claim(call, own)
            self.verdict.agreed.add(call.key)
        return own

    def _is_right(self, key: StaticKey) -> bool | None:
        """Return True or False if it is known, or if nothing will check it."""
        if self.verdict.wrong or self.verdict.verified is None:
            return not self.verdict.wrong
        return self.verdict.verified.get(key)

    def reads_padding(self, key: StaticKey) -> bool:
        """Return True if the module may read the padding of calls, because graphs in which it is cleared were wrong."""
        return self.spec.layout.padded and self.is_module and self._is_right(key) is False

    @property
    def is_module(self) -> bool:
        """True if the module itself runs, with no computed argument."""
        return self.function is None and not self.spec.computes_arguments

    def answers_itself(self, call: Call) -> bool:
        """Return True if the module itself can run with the arguments of a call."""
        return self._signature.original_answers(call)

    def reference(self, call: Call) -> Reference:
        """Return the expected output of a call: the module's own if it can run with these arguments.

        Raises:
            VarlenGraphsError: Neither can run, and the declared forward says why.
            Exception: The module's own, if neither can run.
        """
        leaves_out = self.is_module and self._signature.leaves_out(call)
        if not (self.answers_itself(call) or leaves_out):
            return (
                Reference(self._as_it_came(call), MODULE)
                if self.is_module
                else Reference(self.exact(call), DECLARATION)
            )
        try:
            return Reference(self.without(call) if leaves_out else self.answer(call), MODULE)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            of_module = error
        try:
            return Reference(self.exact(call), DECLARATION)  # the module may need more than these arguments
        except VarlenGraphsError:
            raise
        except Exception as error:
            raise error if is_out_of_memory(error) else of_module from None

    def _as_it_came(self, call: Call) -> Any:
        """Run the module with the padding that a call brought, which it may read; without it if that may hold anything.

        Syncs, if there is padding.
        """
        if not self.spec.layout.padded or self.reads_padding(call.key):
            return self.exact(call)
        with suppress(Exception):  # such as of ids that are none
            output = self.exact(call, keeps_padding=True)
            tensors = flatten(output, self.spec.declared).tensors
            if not any(bool(tensor.isnan().any()) for tensor in tensors):
                return output
        return self.exact(call)

    def answer(self, call: Call, grad: bool = False) -> Any:
        """Return the correct output of a call: by the module itself if it takes the call, else by the forward.

        The rows are copied first: the module may write into them. Without gradients, unless `grad` asks for them.

        Raises:
            Exception: That of the module.
        """
        if self.verdict.differs_without and self._signature.leaves_out(call):
            return self.without(call)
        if not (self.answers_itself(call) or (call.eager_reason and self._signature.original_takes_call)):
            return self.exact(call, grad)
        name = self.spec.row_input.name
        return self.original(replace(call, original=call.original | {name: call.original[name].clone()}), grad)

    @property
    def may_leave_out(self) -> bool:
        """True if calls may leave an argument out that the encoder then adds."""
        return bool(self._signature.optional)

    def leaving_out(self, call: Call) -> Call:
        """Return a call without the arguments that calls may leave out; those that the module needs are `None`."""
        return self._signature.leaving_out(call)

    def without(self, call: Call) -> Any:
        """Run the module itself on a call that leaves arguments out.

        Raises:
            Exception: The module cannot run without them.
        """
        takes, rows = self._signature.takes, self.spec.row_input.name
        given = {name: value for name, value in call.original.items() if not self.is_module or takes(name)}
        return self.original(replace(call, original=given | {rows: given[rows].clone()}))

    def original(self, call: Call, grad: bool = False) -> Any:
        """Run the module itself with the caller's arguments, rows cast and normalised as for graphs."""
        packed = self.spec.row_input
        arguments = dict(call.original)
        arguments[packed.name] = arguments[packed.name].to(self.row_dtype)
        if packed.normalize is not None:
            rows = packed.rows_first(arguments[packed.name])
            table = exact_table(self.spec, read_layout(self.spec, call), rows.device)
            arguments[packed.name] = packed.as_argument(self._normalized(rows, table, self.spec.rows_form.dims))
        for one in self.spec.inputs if call.inputs else ():
            if one.name in call.inputs:
                value = one.as_tensor(arguments[one.name])
                arguments[one.name] = value.to(call.rows.device, self.input_dtype(one), copy=True)
        by_row = self._by_row(call)
        for name in filter(None, [self.spec.layout.name * self.spec.layout.has_argument, packed.padded_by]):
            if not (self.spec.layout.optional or self.is_module) or arguments.get(name) is not None:
                arguments[name] = as_tensor(name, arguments[name], call.rows.device).to(call.rows.device)
        run = partial(self._run_itself, call.positional, grad)
        if self.function is None and self._is_right(call.key):
            return run(arguments | by_row)
        try:
            return run(arguments)
        except Exception:
            if not by_row:
                raise
            return run(arguments | by_row)

    def _by_row(self, call: Call) -> dict[str, Tensor]:
        """Return tensors with an entry an item that the captured forward gets an entry a row of, in that form.

        The module itself is tried in the caller's form first, until the declaration is verified: it may be wrong.
        """
        given = {name: call.inputs[name] for name in self.spec.inputs_by_row if name in call.inputs}
        if not given:
            return {}
        rows = torch.tensor(read_layout(self.spec, call).rows, device=call.rows.device)
        by_name = {one.name: one for one in self.spec.inputs}
        return {
            name: tensor.to(call.rows.device, self.input_dtype(by_name[name])).repeat_interleave(rows, 0)
            for name, tensor in given.items()
        }

    def _run_itself(self, positional: int, grad: bool, arguments: dict[str, Any]) -> Any:
        args, arguments = self._signature.as_passed(positional, arguments)
        with torch.set_grad_enabled(grad):
            return self._guarded(partial(self._running, partial(self.itself, *args, **arguments)))

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Run the module eager: a shadow without writes to what it shares, and with random numbers of its own."""
        return run() if self._guard is None else self._guard(run)

    def _run(self, **arguments: Any) -> Any:
        return self.function(self.module, **arguments) if self.function else self.itself(**arguments)

    def _normalized(self, rows: Tensor, table: ItemTable, dims: Sequence[str]) -> Tensor:
        normalize = self.spec.row_input.normalize
        if isinstance(normalize, Patches):
            return normalize(rows, table, self.module_dtype)
        assert normalize is not None  # noqa: S101 - callers ask
        return normalize(rows.flatten(0, len(dims) - 1), self.module_dtype).view(rows.shape)

    @property
    def itself(self) -> Callable[..., Any]:
        """The module, its method if another one is meant, or its own forward if an encoder was put in its place.

        Accelerate keeps the forward that it wraps as `_old_forward`.
        """
        return self.module_forward if self.method != "forward" or self._places else self.module

    @property
    def _places(self) -> list[str]:
        """The attributes of the module that hold an encoder of it."""
        own = [(name, vars(self._encoded).get(name)) for name in {"forward", "_old_forward", self.method}]
        return [name for name, one in own if getattr(getattr(one, "__self__", one), "module", None) is self._encoded]
