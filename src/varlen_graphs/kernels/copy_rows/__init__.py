"""Copy of the rows of a call, from an address that each replay reads anew, and zeros as their padding."""
