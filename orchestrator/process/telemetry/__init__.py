"""What this process reports about itself and its requests: logs, metrics, latencies, and a line for each request."""
