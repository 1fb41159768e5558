"""The command line, where packages that a command needs are not installed."""

import re

from tests.support.scripts import run_script
from varlen_graphs.__main__ import main

COMMANDS = """
    import contextlib, io, sys
    import varlen_graphs as vg
    from varlen_graphs.__main__ import main

    trace = vg.traffic.Trace()
    trace.count(vg.traffic.trace.Size(100, 1, 1, 100, 100))
    trace.save(sys.argv[1] + "/trace.json")

    def command(missing, *arguments):
        sys.modules[missing] = None
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = main([*arguments])
            except SystemExit as end:
                status = end.code
        del sys.modules[missing]
        assert status in (1, 2), (missing, arguments, status)
        return said.getvalue()

    def factory():
        import a_package_of_ones_own

    sys.modules["own"] = sys.modules["__main__"]
"""

CHECKS = """
    for missing in ("transformers", "skimage"):
        told = command(missing, "demo", "--device", "cpu")
        assert missing in told and "try pip install 'transformers>=4.57' pillow scikit-image" in told, told
    told = command("matplotlib", "plan", sys.argv[1] + "/trace.json", "--plot", "plan.png")
    assert "matplotlib" in told and "try pip install matplotlib" in told, told
    for missing in ("transformers", "fastapi"):
        told = command(missing, "serve", "a/model")
        assert missing in told and "try pip install 'transformers[serving]'" in told, told
    told = command("a_package_of_ones_own", "doctor", "own:factory")
    assert "a_package_of_ones_own" in told and "raised an error" in told, told
    print("said")
"""


def test_a_command_without_its_packages_says_what_to_install(tmp_path):
    place = f"import sys; sys.argv[1:] = [{str(tmp_path)!r}]\n"
    assert run_script(place, COMMANDS, CHECKS, prelude="")[0] == ["said"]


def test_without_a_command_it_lists_all_with_an_example_each(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    (commands,) = re.findall(r"\{(.*?)\} \.\.\.", shown)
    for command in commands.split(","):
        assert f"  python -m varlen_graphs {command}" in shown
