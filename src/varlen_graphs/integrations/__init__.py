"""Bridges to other libraries. Importing this package imports none of them."""
