"""Whether graphs give what the module gives: proved on example calls, or on the first calls in service."""
