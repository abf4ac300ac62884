"""This process: whose child it is, what its container lets it use, and which files are its user's alone."""
