"""Read a call of a module, and find by running it whether it takes a batch of one size or a padded one."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, PaddedLadder
from varlen_graphs.checks.values import is_dense
from varlen_graphs.declaration.budgets import BATCHES
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.static_args import alike
from varlen_graphs.errors import CaptureError, SpecError, VarlenGraphsError
from varlen_graphs.inputs.extra import Input, PerCall, PerItem
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.outputs.declared import Declared
from varlen_graphs.outputs.entries import Items, Rows
from varlen_graphs.outputs.parts import CONSTANTS, flatten
from varlen_graphs.recipes.automatic.batch_probe import MORE, BatchProbe
from varlen_graphs.recipes.inspection import fields_of
from varlen_graphs.recipes.modes.cached_tables import CachedTable, cached_tables, why_changed
from varlen_graphs.recipes.modes.skip_mask_checks import keeps_masks
from varlen_graphs.recipes.probe import itself
from varlen_graphs.recipes.rounding import difference
from varlen_graphs.recipes.towers import device_of
from varlen_graphs.shadows.shadow import Shadow, same_bits
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode

PADDING = 16
"""Rows of padding that must not change an output."""

LARGEST = 4096
"""Batch size up to which default budgets go where the call from which they are learned is as large."""

LONGEST = 512
"""Rows of the longest item that default budgets of padded batches hold, at least."""


class CallForm(NamedTuple):
    """The arguments of a call.

    Attributes:
        tensors: Its tensors by name.
        fixed: All other arguments that are not at their defaults.
        more: Names of those that a module takes as `**kwargs`, in their order.
    """

    tensors: dict[str, Tensor]
    fixed: dict[str, Any]
    more: tuple[str, ...] = ()


class CallReader:
    """Reads the arguments of calls of a module.

    Args:
        module: The module.
        forward: Its forward, which calls mean.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._name = type(module).__name__
        self._signature = inspect.signature(forward)
        parameters = self._signature.parameters.values()
        self._by_position = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._named = {*self._by_position, *(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)}
        self._defaults = {one.name: one.default for one in parameters if one.default is not one.empty}

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallForm:
        """Return the arguments of a call.

        Raises:
            TypeError: The module takes no such arguments.
            SpecError: Some have no name, or are one tensor.
        """
        names = self._by_position[: len(args)]
        if len(names) < len(args) or not (kwargs.keys() <= self._named and kwargs.keys().isdisjoint(names)):
            call = self._bound(args, kwargs)
        else:  # nearly always
            call = {**dict(zip(names, args, strict=True)), **kwargs}
        form = CallForm({}, {}, tuple([name for name in call if name not in self._named]))
        for name, value in call.items():
            if isinstance(value, Tensor):
                form.tensors[name] = value
            elif name not in self._defaults or not alike(value, self._defaults[name]):
                form.fixed[name] = value
        if len({*map(id, form.tensors.values())}) < len(form.tensors):  # the forward may ask whether they are the same
            kept = [*map(id, form.tensors.values())]
            shared = [name for name, one in form.tensors.items() if kept.count(id(one)) > 1]
            raise SpecError(f"{self._name} takes one tensor as {shared}: expected a tensor each; try x.clone() for one")
        return form

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        call: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise SpecError(f"{self._name} takes {name!r} by position alone: expected arguments with names")
            call |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return call

    def to_learn(self, form: CallForm) -> CallForm:
        """Return a form with its tensors in the order of the arguments, the batch first, and a copy of the others.

        Raises:
            SpecError: There is no batch, or there are tensors that are no arguments by themselves.
        """
        held = [one for one, value in form.fixed.items() if any(isinstance(x, Tensor) for x in tree_leaves(value))]
        if held:
            raise SpecError(f"{self._name} takes {held}, which hold tensors: expected tensors as arguments themselves")
        order = [*self._signature.parameters]
        names = sorted(form.tensors, key=lambda name: order.index(name) if name in order else len(order))
        tensors = {name: form.tensors[name] for name in names}
        dense = all(is_dense(tensor) and tensor.numel() for tensor in tensors.values())
        if not tensors or not tensors[names[0]].dim() or not dense:
            came = [*form.tensors, *form.fixed]
            raise SpecError(
                f"{self._name} takes {came}: expected a dense tensor [items, ...] first, and others beside it, none of "
                "them empty"
            )
        try:
            copied = deepcopy(form.fixed)
        except Exception as error:  # objects may refuse to be copied
            raise SpecError(f"{self._name} takes {[*form.fixed]}, which cannot be copied: {error!r}") from error
        if unlike := [name for name, value in copied.items() if not alike(value, form.fixed[name])]:
            raise SpecError(
                f"{self._name} takes {unlike}, which cannot be compared from call to call: expected numbers, strings "
                "and the like, and lists and dicts of these"
            )
        return CallForm(tensors, copied, form.more)


class Learned(NamedTuple):
    """Result of `learn`: the module and the declaration by which calls of one form are graphed.

    Attributes:
        tensors: What tensors these calls bring, by name.
        form: The form of these calls, with no tensors.
        module: The module, with these arguments fixed.
        spec: Its declaration.
        options: Options of its encoder.
        ladder: Default budgets, which padded batches have in place of any but a `PaddedLadder`.
    """

    tensors: Mapping[str, "_Accepted"]
    form: CallForm
    module: nn.Module
    spec: BufferSpec
    options: dict[str, Any]
    ladder: DefaultBudgets

    def takes(self, form: CallForm) -> bool:
        """Return True for calls of this form."""
        return (
            form.tensors.keys() == self.tensors.keys()
            and all(self.tensors[name].takes(tensor) for name, tensor in form.tensors.items())
            and form.more == self.form.more
            and alike(form.fixed, self.form.fixed)
        )

    def budgets(self, budgets: Budgets | None) -> Budgets:
        """Return the budgets of its encoder, where these are asked for."""
        if budgets is None or (self.spec.layout.padded and not isinstance(budgets, PaddedLadder)):
            return self.ladder
        return budgets


def learn(module: nn.Module, form: CallForm, padded: bool) -> Learned:
    """Return what calls of a form are graphed by, found by running a shadow of the module on their items. Syncs.

    Only if `padded`, a batch may be understood as a padded one.

    Raises:
        SpecError: They cannot be graphed.
    """
    failures: dict[str, None] = {}
    target = _with_arguments(module, form.fixed) if form.fixed else module
    _check_arguments_stay(Shadow(module).module, form)
    tables = [*cached_tables(module, device_of(module))]
    for model in _models(Shadow(target).module, tables, form.tensors, padded):
        try:
            spec = model.declare()
        except CaptureError as error:  # no other way would help
            raise _refusal(module, [_first_lines(error)]) from error
        except Exception as error:  # the module may raise anything for a batch that it does not take
            failures.setdefault(_first_lines(error))
            continue
        options = {"forward": model.function} | ({"eager_if": partial(why_changed, tables)} if tables else {})
        return Learned(model.accepted(), form._replace(tensors={}), target, spec, options, model.ladder)
    shadow = Shadow(target).module
    run = keeps_masks(itself(shadow.forward))
    with suppress(Exception):  # that of the module for this call, which it raises again
        try:
            CaptureRulesMode(device_of(module), "it").watch(lambda: run(shadow, **form.tensors))
        except CaptureError as error:  # then whatever was tried says less
            failures = {_first_lines(error): None}
    raise _refusal(module, failures)


def _first_lines(error: Exception) -> str:
    what = str(error) if isinstance(error, VarlenGraphsError) else repr(error)
    return " ".join(what.splitlines()[:2])


def _refusal(module: nn.Module, failures: Iterable[str]) -> SpecError:
    tried = "".join(f"\n- {why}" for why in failures)
    return SpecError(f"{type(module).__name__} cannot be graphed as this call takes it:{tried}")


class _WithArguments(nn.Module):
    """A module with some of its arguments fixed."""

    def __init__(self, module: nn.Module, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.training = False  # the module tells
        self._run = module.forward  # now: vg.wrap puts an encoder in its place
        self._fixed = fixed

    def forward(self, **tensors: Any) -> Any:
        """Run the module."""
        return self._run(**tensors, **self._fixed)


def _with_arguments(module: nn.Module, fixed: Mapping[str, Any]) -> nn.Module:
    """Return a module with some of its arguments fixed, by the name of its class, which messages tell."""
    made: nn.Module = type(type(module).__name__, (_WithArguments,), {})(module, fixed)
    return made


def _check_arguments_stay(module: nn.Module, form: CallForm) -> None:
    """Check that a run writes to none of its arguments, which no graph does for its caller.

    Raises:
        SpecError: It writes to one.
    """
    with torch.inference_mode(False):  # torch counts writes to these, which may change no value this time
        tensors, fixed = {name: tensor.clone() for name, tensor in form.tensors.items()}, deepcopy(form.fixed)
    versions, outputs = {name: tensor._version for name, tensor in tensors.items()}, list[Any]()
    with torch.no_grad(), suppress(Exception):  # the module raises it again
        outputs = [one for one in tree_leaves(module.forward(**tensors, **fixed)) if isinstance(one, Tensor)]
    given = {id(tensor) for tensor in tensors.values()}
    if any(id(one) in given for one in outputs):
        raise SpecError("it returns an argument, of which graphs would return a copy: expected other tensors")
    written = [
        name
        for name, tensor in tensors.items()
        if tensor._version != versions[name] or not same_bits(tensor, form.tensors[name])
    ]
    written += [name for name, value in fixed.items() if not alike(value, form.fixed[name])]
    if written:
        raise SpecError(f"it writes to its arguments {written}, which graphs do not: expected outputs alone")


class _Accepted(NamedTuple):
    """A tensor of a call: its dtype and dimensions, and its shape from dimension `first` on; `None` for any."""

    dtype: torch.dtype
    dims: int
    shape: torch.Size | None
    first: int

    def takes(self, tensor: Tensor) -> bool:
        """Return True for a tensor like this."""
        same = tensor.dtype is self.dtype and tensor.dim() == self.dims
        if self.shape is None:
            return same and 0 not in tensor.shape[1:]
        return same and tensor.shape[self.first :] == self.shape


class _CallProbe(BatchProbe):
    """A module, and the tensors of a call, some of which have an entry for each item.

    Attributes:
        ladder: See `Learned`.
    """

    ladder: DefaultBudgets

    def __init__(
        self, module: nn.Module, tables: list[CachedTable], tensors: Mapping[str, Tensor], of_items: set[str],
        declared: set[str],
    ) -> None:  # fmt: skip
        super().__init__(module, tables)
        self.tensors, self.of_items, self._declared = tensors, of_items, declared
        self.name, self.batch = next(iter(tensors.items()))
        beside = {name: one for name, one in tensors.items() if name not in declared}
        self.inputs: list[Input] = [
            PerItem(name, tuple(one.shape[1:]), one.dtype)
            if name in of_items
            else PerCall(name, tuple(one.shape), one.dtype)
            for name, one in beside.items()
        ]

    def accepted(self) -> dict[str, _Accepted]:
        """Return what tensors graphs take."""
        found = {}
        for name, one in self.tensors.items():
            first = int(name in self.of_items)
            shape = None if name in self._declared else one.shape[first:]
            found[name] = _Accepted(one.dtype, one.dim(), shape, first)
        return found


def _models(
    module: nn.Module, tables: list[CachedTable], tensors: Mapping[str, Tensor], padded: bool
) -> Iterator[_CallProbe]:
    """Yield ways to understand a call, the more general first."""
    (name, batch), *others = tensors.items()
    of_items = [one for one, tensor in others if tensor.shape[:1] == batch.shape[:1]]
    for layout in _layouts(batch, dict(others)) if padded else ():
        yield _Padded(module, tables, tensors, {name, *of_items}, layout)
    # At a batch of one, or as many as something else has entries, a tensor may belong to the call all the same.
    without = [{*of_items} - {one} for one in of_items] + [set[str]()] * (len(of_items) > 1)
    for some in ({*of_items}, *without):
        yield _OfOneSize(module, tables, tensors, {name, *some}, {name})


def _layouts(batch: Tensor, others: Mapping[str, Tensor]) -> Iterator[Mask | Lengths]:
    """Yield the declarations of other tensors by which a batch is a padded one. Syncs."""
    for name, tensor in others.items():
        if batch.dim() < 2 or not len(batch) or tensor.is_floating_point():
            continue
        if tensor.shape == batch.shape[:2]:
            firsts = {*tensor[:, 0].tolist()}
            if len(firsts) == 1 and bool(((tensor == 0) | (tensor == 1)).all()):
                yield Mask(name, dtype=tensor.dtype, real=bool(firsts.pop()))
        elif tensor.shape == batch.shape[:1] and tensor.dtype is torch.int64 and int(tensor.max()) == batch.shape[1]:
            yield Lengths(name, padded=True)


class _OfOneSize(_CallProbe):
    """A module, and batches made of the items of a call."""

    @property
    def ladder(self) -> DefaultBudgets:  # type: ignore[override]
        """Batch sizes: the default ones, and more up to the batch of the call."""
        sizes = [*BATCHES]
        while sizes[-1] < min(len(self.batch), LARGEST):
            sizes.append(2 * sizes[-1])
        return DefaultBudgets(sizes)

    @property
    def rows(self) -> InputRows:  # type: ignore[override]
        """Declaration of the batch."""
        return InputRows(self.name, dtype=self.batch.dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of one item."""
        return tuple(self.batch.shape[1:])

    def example(self, count: int, first: int = 0) -> dict[str, Any]:
        """Return so many items of the call, each moved by another number of places so that none equals another.

        Integers move along the first dimension that is long enough: those of a later one may be of several kinds.
        """
        numbers = range(first, first + count)
        at = [number % len(self.batch) for number in numbers]
        entries = {name: one[at] if name in self.of_items else one for name, one in self.tensors.items()}
        if self.shape:
            last = len(self.shape) - 1
            long = (dim for dim, size in enumerate(self.shape) if size > MORE)
            dim = last if self.batch.is_floating_point() else next(long, last)
            entries[self.name] = torch.stack(
                [self.batch[place].roll(n, dim) for n, place in zip(numbers, at, strict=True)]
            )
        return entries


class _Padded(_CallProbe):
    """A module that takes a padded batch, as a call brings it."""

    def __init__(
        self, module: nn.Module, tables: list[CachedTable], tensors: Mapping[str, Tensor], of_items: set[str],
        layout: Mask | Lengths,
    ) -> None:  # fmt: skip
        super().__init__(module, tables, tensors, of_items, {next(iter(tensors)), layout.name})
        self.layout = layout
        self.length = self.batch.shape[1]
        # Each item is cut, and there are at least two, so that padding and other items show in outputs.
        self.items = [number % len(self.batch) for number in range(max(2, len(self.batch)))]
        self.lengths = [max(1, self.length // 2 - number % 2) for number in range(len(self.items))]
        self.ladder = DefaultBudgets(PaddedLadder(length=max(LONGEST, self.length), min_length=32))

    def declare(self) -> BufferSpec:
        """Return the declaration, checked.

        Raises:
            SpecError: An output has no entry for each row or item, or depends on the other items, or on padding; or
                what lies past the end of an item is no padding.
            CaptureError: A run does what no graph can hold.
        """
        items, cut, whole = range(len(self.items)), self.lengths, [self.length] * len(self.items)
        own, other = (self._output(items, cut, self.length, moved=moved) for moved in (0, 1))
        wider = self._output(items, cut, self.length + PADDING, moved=2)
        outputs = self._outputs_of(own, wider)
        seen, unseen = (self._output(items, whole, self.length, moved=moved) for moved in (0, 1))
        if all(same for item in items for same in self._same(seen, unseen, outputs, item)):
            raise SpecError(f"rows past those that {self.layout.name} marks change nothing, whatever it marks")
        for item in items:
            alone = self._output([item], [cut[item]], cut[item])
            if not all((*self._same(own, other, outputs, item), *self._same(own, wider, outputs, item))):
                raise SpecError(f"an output depends on rows past those that {self.layout.name} marks")
            if not all(self._same(own, alone, outputs, item, 0)):
                raise SpecError("an output depends on the other items of the batch, or on chance")
        rows = InputRows(self.name, tuple(self.batch.shape[2:]), self.batch.dtype)
        spec = BufferSpec(rows, self.layout, inputs=self.inputs, outputs=outputs, declared_by="recipe")
        call = self._call(items, cut, self.length + PADDING, moved=2)
        self.try_function(spec, Budget.padded(len(items), self.length + PADDING), call, wider)
        return spec

    def _output(self, items: Sequence[int], lengths: Sequence[int], length: int, moved: int = 0) -> Any:
        return self.run(self._call(items, lengths, length, moved))

    def _call(self, items: Sequence[int], lengths: Sequence[int], length: int, moved: int = 0) -> dict[str, Any]:
        """Return a call of some items, said to be of these lengths; `moved` chooses the rows behind the cut ones."""
        at = [self.items[item] for item in items]
        call = {name: one[at] if name in self.of_items else one for name, one in self.tensors.items()}
        places = torch.arange(length, device=self.batch.device)
        ends, cut = (
            torch.tensor(each, device=self.batch.device) for each in (lengths, [self.lengths[item] for item in items])
        )
        real, cut = places < ends[:, None], places < cut[:, None]
        source = torch.where(cut, places, (places + moved * (self.length // 3 + 1)) % self.length)
        numbers = torch.tensor([*items], device=self.batch.device)[:, None]  # no two items have the same rows
        call[self.name] = call[self.name][numbers - numbers[0], (source + numbers) % self.length]
        if isinstance(self.layout, Mask):
            call[self.layout.name] = (real == self.layout.real).to(self.layout.dtype)
        else:
            call[self.layout.name] = ends
        return call

    def _same(self, one: Any, other: Any, outputs: Declared, item: int, at: int | None = None) -> Iterator[bool]:
        """Yield for each output if two runs agree on what belongs to an item, at another place in the other run."""
        first, second = flatten(one, outputs), flatten(other, outputs)
        for extent, left, right in zip(first.extents, first.tensors, second.tensors, strict=True):
            real = slice(self.lengths[item]) if isinstance(extent, Rows) else ...
            there = item if at is None else at
            yield difference(right[there, real], left[item, real]) is None

    def _outputs_of(self, own: Any, wider: Any) -> Declared:
        """Return the extents of outputs, from those of the call, and of one with more padding."""
        if isinstance(own, Tensor):
            if own.shape[:2] == (len(self.items), self.length) and wider.shape[1:2] == (self.length + PADDING,):
                return Rows()
            if own.shape[:1] == (len(self.items),) and own.shape == wider.shape:
                return Items()
            raise SpecError(f"an output {list(own.shape)} has an entry neither for each row nor for each item")
        if isinstance(own, CONSTANTS):
            return Rows()
        if (fields := fields_of(own)) is not None:
            others = fields_of(wider) or {}
            return {name: self._outputs_of(part, others[name]) for name, part in fields.items()}
        if isinstance(own, list | tuple):
            return [self._outputs_of(part, other) for part, other in zip(own, wider, strict=True)]
        raise SpecError(f"an output is a {type(own).__name__}: expected tensors")
