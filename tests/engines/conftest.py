"""What engines need before they are imported."""

import importlib.util

if importlib.util.find_spec("sglang") is not None:
    from tests.engines import torchvision_operators  # noqa: F401
