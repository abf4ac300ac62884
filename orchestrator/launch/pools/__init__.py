"""What a launcher runs: so many workers of each role of a model, and so many frontends for all models."""
