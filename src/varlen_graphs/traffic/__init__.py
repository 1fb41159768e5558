"""Budgets from traffic: the sizes of the calls that came, and the budgets that suit them."""
