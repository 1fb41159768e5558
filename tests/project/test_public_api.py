import subprocess
import sys

import varlen_graphs as vg


def test_everything_public_is_documented():
    for name in vg.__all__:
        member = getattr(vg, name)
        assert member.__doc__, name
        for attribute, method in vars(member).items() if isinstance(member, type) else ():
            if callable(method) and not attribute.startswith("_"):
                assert method.__doc__, f"{name}.{attribute}"


def test_importing_the_package_imports_neither_triton_nor_transformers():
    """Torch itself may import triton: what counts is that this package adds nothing."""
    code = (
        "import sys, torch, einops; before = set(sys.modules); import varlen_graphs; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "bad = new & {'triton', 'transformers', 'skimage', 'PIL', 'tqdm'}; sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_errors_have_one_base():
    errors = [getattr(vg, name) for name in vg.__all__ if name.endswith("Error")]
    assert len(errors) == 11
    assert all(issubclass(error, vg.VarlenGraphsError) for error in errors)
