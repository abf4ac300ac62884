"""Predicted times, and the estimates that they are made of: learned while serving, and too old after a while."""
