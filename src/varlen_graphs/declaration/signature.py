"""Sort the arguments of a call into rows, items and static arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn, strided
from torch.utils._pytree import tree_leaves

from varlen_graphs.checks.values import check_has_values
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.other_outputs import (
    OTHER_OUTPUTS,
    OUTPUT_HIDDEN_STATES,
    asked_by_config,
    declares_hidden_states,
    settings_now,
    with_hidden_states,
)
from varlen_graphs.declaration.parameters import HANDED_ON, WITHOUT_EFFECT, parameters_of
from varlen_graphs.declaration.static_args import ChangeableError, alike, static_form
from varlen_graphs.declaration.undeclared import declaration_of
from varlen_graphs.errors import InputError, SpecError, counted
from varlen_graphs.torch_dispatch.leaves import PLAIN_TENSORS

ORDINARY = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

WITHOUT_IT = (
    "leave it out, call the module itself (encoder.module, or vg.unwrap(model)), or declare the module yourself, see "
    "docs/recipes.md"
)
"""Remedy for users of a recipe, about an argument that it does not know."""

EagerIf = Callable[[nn.Module], str | None]
"""Returns the reason why a call made now must run eager, or `None`."""


class Signature:
    """The arguments an encoder takes: the module's own, without computed ones, plus those that describe the items.

    Args:
        module: The module.
        forward: Function that runs in place of the module, called as `forward(module, **arguments)`; `None` runs the
            module itself.
        spec: The declaration.
        eager_if: Asked at each call; see `GraphedEncoder`.
        method: Name of the module's method that calls mean.

    Attributes:
        names: Names of declared arguments, and of those of the module.
        positional: Names of arguments that a call may pass by position, in order.
        asks_user: True if each call asks a function of the user's whether it must run eager.
        optional: Names of declared arguments that a call may leave out.

    Raises:
        SpecError: A declared argument that the module (or `forward`) does not have, or a forward that does not tell its
            arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any] | None,
        spec: BufferSpec,
        eager_if: EagerIf | None = None,
        method: str = "forward",
    ) -> None:
        self._spec = spec
        self._module = module
        self._eager_if = eager_if
        self.asks_user = eager_if is not None
        self._who = type(module).__name__
        compiled = dict(module.named_children()).get("_orig_mod")  # by torch.compile
        own = parameters_of(getattr(module if compiled is None else compiled, method), f"{self._who}.{method}")
        self._replaced = forward is not None
        self._module_needs = {n for n, p in own.items() if p.default is p.empty and p.kind in ORDINARY}
        captured = dict(own)
        if forward is not None:
            captured = dict(list(parameters_of(forward, f"forward={forward!r}").items())[1:])
        captured = {name: p for name, p in captured.items() if p.kind is not p.POSITIONAL_ONLY}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in captured.values())
        self._module_takes_any = any(p.kind is p.VAR_KEYWORD for p in own.values())
        self._own_positional = [name for name, p in own.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._module_takes = {name for name, p in own.items() if p.kind is not p.VAR_KEYWORD}
        self._captured = captured
        buffers = [buffer.name for buffer in spec.buffers]
        self._produced = {*buffers, *(column.name for column in spec.layout.columns if column.function is not None)}
        self._inputs = {one.name: one for one in spec.inputs}
        for name in (spec.row_input.name, *buffers, *self._inputs, *spec.ignored):
            if not self.takes(name):
                raise SpecError(
                    f"{self._who} has no argument {name!r}, but it is declared: it takes {list(captured)} by name; "
                    "rename the declaration, or pass forward= with a function that takes it"
                )
        if spec.layout.packed and spec.layout.name in captured:
            raise SpecError(
                f"{self._who} takes {spec.layout.name!r}, the mask of a padded batch, but {spec.layout!r} says that "
                "its rows are packed: declare Mask, or pass forward= with a function of packed rows and no mask"
            )
        declared = [spec.row_input.name, *spec.describing, *self._inputs]
        order = own if spec.row_input.name in own else captured
        positional = [n for n, p in order.items() if p.kind is p.POSITIONAL_OR_KEYWORD and n not in self._produced]
        self.positional = positional + [name for name in declared if name not in positional]
        self._declared = frozenset(declared)
        self.names = self._declared | self._module_takes
        self.optional = {column.name for column in spec.layout.columns if column.default is not None}
        self.optional |= {one.name for one in spec.inputs if one.default is not None}
        self.optional |= {spec.layout.name} if spec.layout.optional else set()
        # A None of the caller's means another default to the module than to the encoder.
        defaults = {name: own[name].default for name in self.optional & own.keys()}
        self._never_none = {
            name for name, one in defaults.items() if one is not None and one is not inspect.Parameter.empty
        }
        self._expected = [name for name in self.positional if name in self._declared - self.optional]
        self._required = [
            name
            for name, parameter in captured.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind in ORDINARY
            and name not in {*declared, *self._produced}
        ]
        self._graphs_hidden_states = self.takes(OUTPUT_HIDDEN_STATES) and declares_hidden_states(
            spec.outputs, by_module=forward is None
        )
        graphed = {OUTPUT_HIDDEN_STATES} if self._graphs_hidden_states else set()
        self._others = {name: other for name, other in OTHER_OUTPUTS.items() if name not in graphed}
        self._no_static_args: tuple[tuple[Any, ...], dict[str, Any], str | None] | None = None
        self._asked = self._asked_by_config()  # by the configuration that the module itself is captured with
        # True if something else than the module is captured, and the module takes the encoder's arguments too.
        hands_on = self._module_takes_any and (
            spec.row_input.name in own or all(p.kind not in ORDINARY for p in own.values())
        )
        self.original_takes_call = self._replaced and (hands_on or self._declared <= self._module_takes)

    def takes(self, name: str) -> bool:
        """Return True if the captured forward takes an argument of this name."""
        return name in self._captured or self._takes_any

    def _original_takes(self, name: str) -> bool:
        """Return True if the original module can answer a call with an argument of this name."""
        return self.original_takes_call and (self._module_takes_any or name in self._module_takes)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Sort the arguments of a call. Reads no values, so nothing syncs; `Call.layout` stays `None`.

        Raises:
            InputError: An argument is missing, unknown, given twice, computed by the graph, or an undeclared tensor.
        """
        arguments = self._named(args, kwargs)
        for name, value in arguments.items():
            if type(value) not in PLAIN_TENSORS:
                check_has_values(name, value)
        packed = self._spec.row_input
        rows = arguments[packed.name]
        if not isinstance(rows, Tensor):
            raise InputError(f"{packed.name} is a {type(rows).__name__}: expected a tensor {self._spec.rows_form}")
        if rows.layout is not strided or rows.is_nested:
            raise InputError(
                f"{packed.name} is a sparse or nested tensor: expected a dense one, "
                f"{self._spec.rows_form}; try {packed.name}.to_dense()"
            )
        self._check_shape(rows.shape)
        if packed.rows_dim:
            rows = packed.rows_first(rows)
        description: dict[str, Any] = {}
        if not self._spec.layout.has_argument:
            description[self._spec.layout.name] = range(rows.shape[0])
        description |= dict.fromkeys(self._spec.describing)
        inputs = {}
        others = {}
        for name, value in arguments.items():
            if name in description:
                description[name] = value
            elif name in self._inputs:
                if value is not None:
                    inputs[name] = self._inputs[name].read(value, self._spec.call_extent)
            elif name != packed.name:
                others[name] = value
        if self._spec.layout.optional and description[self._spec.layout.name] is None:
            description[self._spec.layout.name] = self._spec.layout.missing(rows.shape)
        static_args, eager_reason = (
            self.bind_static_args(others, rows.shape, description) if others else self.bind_no_static_args()
        )
        if eager_reason is None and self._eager_if is not None:
            eager_reason = self.why_eager()
        key = self._spec.key(static_args, self._spec.rows_form.row_shape(rows.shape))
        return Call(rows, description, static_args, key, arguments, eager_reason, inputs=inputs, positional=len(args))

    def why_eager(self) -> str | None:
        """Return the reason why the user lets calls run eager now, or `None`."""
        return None if self._eager_if is None else self._eager_if(self._module)

    def bind_static_args(
        self, arguments: Mapping[str, Any], rows: Sequence[int] = (), description: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], str | None]:
        """Sort arguments that are neither rows nor items.

        The shape of the rows and the description of the items, if given, tell how an undeclared tensor is declared.

        Returns:
            The arguments that graphs are captured for, without those at their defaults; and the reason why only the
            original module can answer, if there is one.

        Raises:
            InputError: An argument is unknown, missing, or may change; or it is a tensor that is not declared, or is
                computed in the graph, and the original module does not take it.
        """
        static_args: dict[str, Any] = {}
        eager_reason = None
        if self._graphs_hidden_states:
            arguments = with_hidden_states(arguments, self._module, self._captured.get(OUTPUT_HIDDEN_STATES))
        for name, value in arguments.items():
            asks_other = value is not None and name in self._others and bool(value) is self._others[name]
            reason = f"{name}={value}" if asks_other else f"argument {name!r}"
            original = self._original_takes(name)
            if name in self._declared or (name in self._produced and not original):
                raise InputError(f"argument {name!r} is not a static argument: it is computed, or comes with each call")
            takes = self.takes(name) and name not in self._produced
            known = original and name in self._module_takes | self._produced | HANDED_ON
            if (takes or not known) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                declaration = declaration_of(self._spec, name, value, rows, description or {})
                declared = f"declare {declaration}, or a buffer of this name if it follows from the items"
                raise InputError(
                    f"argument {name!r} holds a tensor that is not declared: a graph would keep reading the first one; "
                    f"{self._spec.advice(declared, WITHOUT_IT)}"
                )
            if takes:
                if not self._is_default(name, value):
                    static_args[name] = self._static(name, value)
                    eager_reason = reason if asks_other else eager_reason
            elif name in WITHOUT_EFFECT or (name in self._others and not asks_other):
                continue
            elif original:
                eager_reason = eager_reason if value is None else reason
            else:
                raise InputError(f"{self._who} has no argument {name!r}; it takes {self.positional}")
        if self._required and (missing := [name for name in self._required if name not in arguments]):
            declared = "pass them if they are the same in every call, or declare buffers of these names"
            raise InputError(
                f"arguments {missing} are missing: {self._who} has no default for them; "
                f"{self._spec.advice(declared, 'pass them')}"
            )
        if eager_reason is None and self.original_takes_call:
            eager_reason = asked_by_config(arguments, self._module)
        elif eager_reason is None and not self._replaced and (asked := self._asked_by_config()) != self._asked:
            eager_reason = asked or f"no {self._asked} any more"
        return static_args, eager_reason

    def bind_no_static_args(self) -> tuple[dict[str, Any], str | None]:
        """Return what `bind_static_args` returns for no arguments, which changes with the configuration alone."""
        settings = settings_now(self._module)
        if self._no_static_args is None or self._no_static_args[0] != settings:
            self._no_static_args = settings, *self.bind_static_args({})
        _, static_args, eager_reason = self._no_static_args
        return {**static_args}, eager_reason

    def _asked_by_config(self) -> str | None:
        graphed = {OUTPUT_HIDDEN_STATES: True} if self._graphs_hidden_states else {}
        return asked_by_config(graphed, self._module)

    def original_answers(self, call: Call) -> bool:
        """Return True if something else is captured, and the module itself can run with the arguments of this call.

        Something else is a function in its place, or the module with arguments that it computes from the items if it
        does not get them: then it takes the argument that describes these.
        """
        names = call.original.keys()
        computes = self._spec.computes_arguments and self._spec.layout.name in self._module_takes
        more = self._inputs.keys() if self._module_takes_any else set()  # which it hands on, or ignores
        takes = self._declared - more <= self._module_takes and self._module_needs <= names
        return takes and (self._replaced or computes) and (self._module_takes_any or names <= self._module_takes)

    def leaves_out(self, call: Call) -> bool:
        """Return True if a call leaves out an argument that it may, or passes `None` for it."""
        return any(call.original.get(name) is None for name in self.optional)

    def leaving_out(self, call: Call) -> Call:
        """Return a call without the arguments that calls may leave out; those that the module needs are `None`."""
        given = {name: value for name, value in call.original.items() if name not in self.optional}
        return self.bind((), given | dict.fromkeys(self.optional & self._module_needs))

    def as_passed(self, positional: int, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the module's arguments that its caller passed by position, as its hooks see them, and the others."""
        came = self.positional[:positional]
        names = takewhile(lambda name: name in came and name in arguments, self._own_positional)
        named = dict(arguments)
        return [named.pop(name) for name in names], named

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments by name."""
        if len(args) > len(self.positional):
            raise InputError(
                f"got {counted(len(args), 'positional argument')}; {self._who} takes {self.positional} here"
            )
        arguments = dict(zip(self.positional, args, strict=False))
        for name, value in kwargs.items():
            if name in arguments:
                raise InputError(f"argument {name!r} came twice, by position and by name")
            if name in self._produced and not self._original_takes(name):
                raise InputError(
                    f"argument {name!r} is computed inside the graph; leave it out of the call, and describe the items "
                    f"by {self._spec.layout.name!r}"
                )
            arguments[name] = value
        for name in self._spec.ignored:
            arguments.pop(name, None)
        for name in self._never_none & arguments.keys():
            if arguments[name] is None:
                raise InputError(
                    f"argument {name!r} is None, but {self._who} has another default for it: leave it out, or pass a "
                    "tensor"
                )
        for name in self._expected:
            if arguments.get(name) is None:
                others = sorted(arguments.keys() - self._declared)
                raise InputError(
                    f"argument {name!r} is missing: the call needs {sorted(self._expected)}"
                    + (f", and got {others}" if others else "")
                )
        return arguments

    def _is_default(self, name: str, value: Any) -> bool:
        if name not in self._captured:
            return False
        return alike(value, self._captured[name].default)

    def _static(self, name: str, value: Any) -> Any:
        try:
            static_form(value)
        except ChangeableError as error:
            part = "" if error.kind is type(value) else f"holds a {error.kind.__name__}, and "
            raise InputError(
                f"argument {name!r} is a {type(value).__name__}, which {part}may change, while the graphs captured for "
                "it do not; pass a number, a string, a tuple, an enum, or a frozen dataclass of these"
            ) from None
        return value

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if not self._spec.rows_form.accepts(shape):
            name, form = self._spec.row_input.name, self._spec.rows_form
            why = form.other_row(shape) or f", {self._spec.call_rows_are}"
            raise InputError(f"{name} is {list(shape)}: expected {form}{why}")
