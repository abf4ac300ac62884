"""Where a prompt's blocks are, and which goes into which of decode's."""
