"""What one frontend knows of the fleet: workers and their load, cached prefixes, the queue, and the desired ratio."""
