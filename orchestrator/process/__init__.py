"""This process: whose child it is, and what its container lets it use."""
