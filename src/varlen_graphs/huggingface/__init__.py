"""Whole Hugging Face models: find their towers and graph them in place."""

import sys

from varlen_graphs.huggingface import installed

sys.modules.setdefault("varlen_graphs.installed", installed)  # its name in older pickles of wrapped models
