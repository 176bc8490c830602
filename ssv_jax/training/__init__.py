"""Training on token sets: sparse adaptation of a dense checkpoint, and drafters for it."""
