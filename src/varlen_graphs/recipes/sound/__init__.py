"""The recipe of speech encoders, and what it finds out of them."""
