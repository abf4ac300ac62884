"""The fleet to look at: a page, its stream of samples, and the last hour behind both."""
