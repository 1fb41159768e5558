"""What earlier calls left in padding, which calls find cleared."""


def keep_leftovers(encoder):
    """Leave padding as it is for the next call, as if graphs did not clear it."""
    for arena in encoder.executor.store.arenas.values():
        arena.keeps_padding = True
