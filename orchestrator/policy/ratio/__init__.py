"""How many workers should prefill: the load of a fleet, the cost of prompts, and the headroom of each split."""
