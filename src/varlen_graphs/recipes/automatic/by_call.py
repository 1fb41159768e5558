"""Recipe for any module, declared by its calls: its own forward over a batch of items of one size, or a padded one."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.capture.parts import is_hooked
from varlen_graphs.declaration.static_args import alike
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.recipes.automatic.call_probes import CallForm, CallReader, Learned, learn
from varlen_graphs.recipes.tower_encoder import SeveralEncoders, options_of_others
from varlen_graphs.recipes.towers import check_loaded
from varlen_graphs.torch_dispatch.thread_modes import run_aside

FORMS = 16
"""Number of forms of calls that an encoder learns from."""


def by_call(
    module: Any, budgets: Budgets | None = None, *, call: Mapping[str, Any], padded: bool = False, **options: Any
) -> "CallEncoder":
    """Graph a module that takes a batch, declared by one of its calls: towers of timm, torchvision, Whisper and others.

        encoder = vg.recipes.by_call(model, call={"x": images})
        features = encoder(images)

    The first tensor of the call is the batch, `[items, ...]`; of the others, those with as many entries belong to its
    items, and the rest to the call. Each shape of an item has graphs of its own, over the batch as it comes.

    This function runs the module on items made of those of the call, infers the extents of its outputs, and checks that
    no output depends on the other items of a batch, that the module writes to no argument, and that it can be captured.
    The runs are those of a copy that shares the weights, and sync with the host. Calls of other forms, with other
    arguments or with tensors of other shapes beside the batch, are learned from as they come, up to `FORMS`; those that
    cannot be graphed raise, and `vg.wrap` runs them eager.

    Args:
        module: The module, on its device, in its dtype, and in evaluation mode.
        budgets: Batch sizes; `None` is `[1, 2, 4, 8, 16, 32]`, and doubled up to the batch of the call, or 4096. For
            `padded` batches a `PaddedLadder`, which in place of anything else is one of items of 512 rows, or as
            many as the call has.
        call: The arguments of a call by name.
        padded: If True, a mask `[items, length]` that marks the first rows of each item, or all but these, or lengths
            of items (int64 `[items]`) make the batch a padded one, if trying shows that they keep the module from the
            rows behind. Graphs of a few lengths then serve all calls, and outputs hold zeros past the end of an item,
            which nobody may read.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: The call has no batch, or one tensor as two arguments, the module accepts no batch of other sizes, an
            output depends on several items, or it cannot be captured. The message names the argument, the output or the
            line.
    """
    check_loaded(module)
    if module.training:
        name = type(module).__name__
        raise SpecError(f"{name} is in training mode, in which it does not repeat its outputs: call model.eval() first")
    reader = CallReader(module, module.forward)
    learned = learn(module, reader.to_learn(reader.read((), call)), padded)
    return CallEncoder(module, reader, learned, budgets, options, padded)


class _Refused(NamedTuple):
    """Calls that cannot be graphed: their tensors, their other arguments, and why."""

    tensors: Mapping[str, tuple[torch.dtype, torch.Size]]
    fixed: dict[str, Any]
    error: SpecError


class CallEncoder(SeveralEncoders):
    """Encoder of a module that was learned from its calls: see `by_call`. Each form has an encoder of its own.

    Args:
        module: The module.
        reader: Reads its calls.
        learned: What calls of the first form are graphed by.
        budgets: Budgets of all.
        options: Options of all.
        padded: True if batches may be padded ones.

    Attributes:
        as_it_was: Context in which the forward of the module is its own, which `vg.wrap` replaces.
    """

    def __init__(
        self, module: nn.Module, reader: CallReader, learned: Learned, budgets: Budgets | None,
        options: dict[str, Any], padded: bool,
    ) -> None:  # fmt: skip
        super().__init__(learned.module, learned.budgets(budgets), learned.spec, **options | learned.options)
        self._reader, self._padded = reader, padded
        self._called, self._call = (module,), module.forward  # in a tuple: it may be inside of `learned.module`
        self._budgets_asked, self._options = budgets, options
        self._learned: tuple[Learned, ...] = (learned,)
        self._refused: tuple[_Refused, ...] = ()
        self._learning = threading.Lock()
        self.as_it_was: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def _own_forward(self) -> Callable[..., Any]:
        return self._call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode a batch.

        Raises:
            SpecError: A call of another form cannot be graphed.
            InputError, LayoutError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        if self.executor.forward.is_running:
            return super().forward(*args, **kwargs)
        form = self._reader.read(args, kwargs)
        encoder = self._encoder_of(form)
        return super().forward(**form.tensors) if encoder is self else encoder(**form.tensors)

    def _encoder_of(self, form: CallForm) -> GraphedEncoder:
        """Return the encoder for calls of a form, made at the first of them.

        Raises:
            SpecError: They cannot be graphed.
        """
        if (found := self._found(form)) is not None:
            return found
        with self._learning:
            return self._found(form) or self._made(form)

    def _found(self, form: CallForm) -> GraphedEncoder | None:
        if self._learned[0].takes(form):  # nearly always
            return self
        encoders = zip(self._learned[1:], self.others, strict=False)  # another thread may be adding one
        return next((encoder for learned, encoder in encoders if learned.takes(form)), None)

    def _made(self, form: CallForm) -> GraphedEncoder:
        (module,) = self._called
        tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in form.tensors.items()}
        for refused in self._refused:
            if refused.tensors == tensors and alike(refused.fixed, form.fixed):
                raise refused.error
        if is_hooked(module):
            raise SpecError(
                f"{type(module).__name__} was called in a new form, and has forward hooks, which would see the runs "
                "that show what it does: remove them for one call"
            )
        if len(self._learned) + len(self._refused) >= FORMS:
            raise SpecError(
                f"{type(module).__name__} was called in {FORMS} forms before, with other arguments or tensors of other "
                "shapes: expected a few; try padded=True for sequences with a mask, or declare what changes, see "
                "docs/declarations.md"
            )
        with self.as_it_was():
            try:
                learned = run_aside(partial(learn, module, self._reader.to_learn(form), self._padded))
            except SpecError as error:
                self._refused += (_Refused(tensors, deepcopy(form.fixed), error.with_traceback(None)),)
                raise
            options = options_of_others(self, self._options) | learned.options
            made = GraphedEncoder(learned.module, learned.budgets(self._budgets_asked), learned.spec, **options)
        made.executor.mode.expect_evaluation()
        self.others += (made,)
        self._learned += (learned,)
        return made
