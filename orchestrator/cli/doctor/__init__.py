"""`orchestrator doctor`: whether this host, a fleet's Redis and the way between two workers are fit."""
