"""The simulator's loads on a real server, over its OpenAI API: how long it makes its users wait, and what that says."""
