"""Copy of the rows of a call, from an address that each replay reads anew."""
