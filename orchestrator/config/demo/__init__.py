"""The demo: the configuration of its fleet, and the program that prepares its model."""
