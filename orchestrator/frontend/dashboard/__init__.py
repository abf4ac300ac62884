"""The dashboard: its page, its stream of samples, and the data of the last hour."""
