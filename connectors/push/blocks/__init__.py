"""Where a prompt's blocks are, what of them goes into which of decode's and when, and whose make room."""
