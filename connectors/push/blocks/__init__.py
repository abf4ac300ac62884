"""Where a prompt's blocks are, which goes into which of decode's, and whose make room."""
