"""The padding contract, for any encoder: what padding holds never reaches an active row."""

from tests.support.towers import distance, equal_bits


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
