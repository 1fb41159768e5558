"""The padding contract, for any encoder: what padding holds never reaches an active row."""

from tests.support.towers import distance, equal_bits, tensors


def check_padding_contract(encoder, original, make_rows, argument, layouts, tolerance, more=lambda layout: {}):
    """Replay `layouts` over poisoned memory, and compare with the original and across paddings.

    `layouts` go from large to small to larger; each is replayed once with NaN in all padding, and once over what the
    replay of the first (the largest, of other data) left behind. `more` gives the other arguments of a call.
    """
    encoder.capture()
    for number, layout in enumerate(layouts):
        rows = make_rows(layout, seed=number)
        call = {argument: layout, **more(layout)}
        encoder.poison()
        over_nan = encoder(rows, **call)
        encoder(make_rows(layouts[0], seed=100), **{argument: layouts[0], **more(layouts[0])})
        over_leftovers = encoder(rows, **call)
        assert distance(over_nan, original(rows, layout)) <= tolerance, layout
        assert equal_bits(over_nan, over_leftovers), layout
    assert not encoder.stats.eager


def check_half_precision(output, eager, exact, dtype):
    """Check that an output is of a dtype, and about as close to that of float32 as the original's eager run."""
    assert distance(output, exact) <= 1.3 * distance(eager, exact)
    assert {tensor.dtype for tensor in tensors(output).values()} == {dtype}
