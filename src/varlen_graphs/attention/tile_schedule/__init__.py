"""Which tile of queries is which part of which segment."""
