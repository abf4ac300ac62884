"""The simulator's loads on a real server, over its OpenAI API: its latencies, and a profile from measurements."""
