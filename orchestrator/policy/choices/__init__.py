"""Decode choices: those of other projects, and the choice among ranks that step together."""
