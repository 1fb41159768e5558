"""Process-wide hooks leave compiled models of the process alone."""

from tests.support.scripts import run_script

COMPILED = """
    class Sliced(torch.nn.Module):  # a slice of a list is a new list, on which submodules are registered
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:
                x = layer(x)
            return x.resize_(x.shape)

    def count(graph, inputs):
        compiled.append(graph)
        return graph

    compiled, sliced = [], torch.compile(Sliced().eval(), backend=count)
    with torch.no_grad():
        sliced(rows)
    before = len(compiled)
"""


def test_a_capture_makes_no_compiled_model_compile_again():
    (before, after, replays), _ = run_script(COMPILED, """
        for _ in range(2):
            encoder = attention_encoder(budgets=[vg.Budget(16, 4)], spec=spec)
            with torch.no_grad():
                encoder(rows, lengths=[6])
                sliced(rows)
        print(before, len(compiled), encoder.stats.replays.total())
    """)  # fmt: skip
    assert (int(before), int(after), int(replays)) == (1, 1, 1)
