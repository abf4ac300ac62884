"""This process: whose child it is, what its container lets it use, which files are its user's alone, and its logs."""
