"""Plain data that the floors hand to each other. No torch here."""
