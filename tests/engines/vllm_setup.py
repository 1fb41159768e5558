"""Setup for vLLM's released Python files without its compiled extensions: vLLM's own CPU platform. Import it first."""

import os

from tests.engines import torchvision_operators  # noqa: F401

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
