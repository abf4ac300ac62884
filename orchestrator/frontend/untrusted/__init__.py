"""What clients may not make a frontend do: keep or wait without end, fail, or connect to what only it reaches."""
