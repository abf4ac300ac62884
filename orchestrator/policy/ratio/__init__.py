"""How many workers should prefill: what a fleet's load is, what prompts would cost, and what each split would bear."""
