"""Tile schedule of the attention kernel: the part of a segment that each tile of query rows covers."""
