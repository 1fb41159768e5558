"""Whether the items in a table are those of the rows that came with them, checked where the table is."""
