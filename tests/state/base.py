"""What the modules of the corpus have in common."""

from torch import nn


class Stateful(nn.Module):
    """A module of packed rows of 8 numbers, with a weight.

    What else it keeps at first comes with the class, as `class Counts(Stateful, calls=0)`, or is made by `start`.

    Attributes:
        takes: `"rows"`, or `"segments"`: `cu_seqlens` and `max_seqlen`, too.
        in_training: Whether it is in training mode.
        harmless: Whether a graph can hold it as it is, so that it must not be refused.
        draws: Whether it draws random numbers on the device of its rows, so that outputs are not comparable.
        beyond_reach: Whether it keeps something where no copy of a module reaches it, such as globals.
        opaque: Whether it keeps something that can be neither copied nor compared.
    """

    takes = "rows"
    in_training = False
    harmless = False
    draws = False
    beyond_reach = False
    opaque = False

    def __init_subclass__(cls, **kept):
        super().__init_subclass__()
        cls.at_first = kept

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        for name, value in self.at_first.items():
            setattr(self, name, value)
        self.start()

    def start(self):
        pass


class InCode(Stateful):
    """A module whose code keeps something in globals, classes, defaults or caches."""

    beyond_reach = True
