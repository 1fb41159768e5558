"""Limits of memory for tests of what may allocate without bound."""

from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limit(more):
    """Lets this process have only so many bytes more than it has now."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
