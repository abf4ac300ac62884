"""What operators set and look at while a fleet runs: lists that its processes follow, and events."""
