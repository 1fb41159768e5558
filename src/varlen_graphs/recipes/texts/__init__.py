"""The recipe of text encoders, and what it finds out of them."""
