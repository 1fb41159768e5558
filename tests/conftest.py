"""One hypothesis profile for all tests: speed is measured elsewhere, and CI machines pause."""

from hypothesis import settings

settings.register_profile("varlen_graphs", deadline=None)
settings.load_profile("varlen_graphs")
