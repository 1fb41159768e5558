"""Modules within reach of objects that raise at any access, as vLLM's placeholders of absent packages do."""

import functools
import types

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.segments import relative


class Placeholder:
    """Raises for all attributes that it does not have, as vLLM's `PlaceholderModule` does."""

    def __getattr__(self, name):
        raise ModuleNotFoundError(f"No module named 'absent': {name}")


def refuse(self, *args, **kwargs):
    raise RuntimeError("nobody may look at this object")


OPERATIONS = (
    "__getattribute__", "__setattr__", "__delattr__", "__eq__", "__ne__", "__lt__", "__hash__", "__bool__", "__len__",
    "__iter__", "__next__", "__contains__", "__getitem__", "__call__", "__repr__", "__str__", "__format__", "__dir__",
    "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__getstate__", "__sizeof__", "__index__", "__int__",
    "__float__", "__enter__", "__exit__", "__get__", "__fspath__", "__array__", "__torch_function__",
)  # fmt: skip

Absent = type("Absent", (), dict.fromkeys(OPERATIONS, refuse) | {"__class__": property(refuse)})


class RaisingMeta(type):
    def __getattr__(cls, name):
        raise RuntimeError("nobody may look at this class")

    __instancecheck__ = __subclasscheck__ = __eq__ = __bool__ = __len__ = __iter__ = __repr__ = __dir__ = refuse
    __hash__ = refuse


class AbsentBase(metaclass=RaisingMeta):
    """A class that raises, as placeholders of decorators and base classes do."""


OBJECTS = {"placeholder": Placeholder, "absent": Absent, "absent class": lambda: AbsentBase}
by_object = pytest.mark.parametrize("made", OBJECTS.values(), ids=OBJECTS)


class Scaled(nn.Module):
    """Its function may refer to anything."""

    def __init__(self, function=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        vars(self)["function"] = function
        self.ready = False
        self.eval()

    def forward(self, x):
        self.ready = True
        return vars(self)["function"](self.lin(x))


def check_is_graphed(module):
    """Capture a module by its first call and ahead of it; all outputs have to be right, and replayed."""
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    for ahead in (False, True):
        encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="tape")
        if ahead:
            encoder.capture()
        for lengths in ([5], [150], [3, 4], [7]):
            rows = rows_for(lengths)
            assert relative(encoder(rows, lengths=lengths), torch.relu(module.lin(rows))) < 1e-5
        assert encoder.stats.replays.total() >= 3
        encoder.check()


@by_object
def test_objects_in_globals(made):
    namespace = types.ModuleType("a_model")
    code = """
        import torch

        def activation(x):
            if x is absent or False and (absent.attribute or nested or held or holder):
                return absent(x)
            return torch.relu(x)
    """
    namespace.absent = made()
    namespace.nested, namespace.held = {"package": [made()]}, (made(), made)
    namespace.holder = types.SimpleNamespace(package=made())
    exec("\n".join(line.removeprefix(" " * 8) for line in code.splitlines()), vars(namespace))
    check_is_graphed(Scaled(namespace.activation))


@by_object
def test_objects_in_attributes(made):
    module = Scaled()
    vars(module)["absent"] = made()
    vars(module.lin)["absent"] = made()
    check_is_graphed(module)


@by_object
def test_objects_in_containers_of_attributes(made):
    module = Scaled()
    vars(module).update(absent=[made()], by_name={"absent": made()}, pair=(made(), [made()]))
    vars(module)["helper"] = types.SimpleNamespace(package=made(), packages=[made()])
    check_is_graphed(module)


@by_object
def test_objects_in_closures_defaults_and_partials(made):
    absent = made()

    def of_a_closure(x, package=made(), *, other=made()):  # noqa: B008
        return absent if x is None else torch.relu(x)

    def first(package, x):
        return torch.relu(x)

    check_is_graphed(Scaled(of_a_closure))
    check_is_graphed(Scaled(functools.partial(first, made())))


@by_object
def test_objects_in_class_attributes_and_slots(made):
    class Helper:
        __slots__ = ("package",)

    class Module(Scaled):
        absent, by_name = made(), {"absent": made()}

    module = Module()
    helper = vars(module)["helper"] = Helper()
    object.__setattr__(helper, "package", made())
    check_is_graphed(module)


@by_object
def test_objects_that_a_declared_forward_sees(made):
    absent = made()

    def forward(module, x):
        return absent if x is None else module(x)

    module = Scaled()
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64], spec, forward=forward, backend="tape")
    rows = rows_for([5])
    assert relative(encoder(rows, lengths=[5]), torch.relu(module.lin(rows))) < 1e-5
    assert encoder.stats.replays.total() == 1


def test_a_property_that_raises():
    """What a class computes when it is asked is nobody's to ask."""

    class Module(Scaled):
        @property
        def secret(self):
            raise RuntimeError("nobody may ask")

        def __getattr__(self, name):
            if name in ("lin", "_parameters", "_buffers", "_modules") or name.startswith("__"):
                return super().__getattr__(name)
            raise RuntimeError(f"nobody may ask for {name}")

    module = Module()
    assert relative(module(rows_for([5])), torch.relu(module.lin(rows_for([5])))) < 1e-5
    check_is_graphed(module)
