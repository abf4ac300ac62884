"""What is added to the loop of an engine: what it waits for, and how its group shares steps."""
