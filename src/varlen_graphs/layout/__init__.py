"""Items: how calls describe them, and what follows from their sizes."""
