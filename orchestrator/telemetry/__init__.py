"""What this process tells of itself and its requests: metrics, the line of each request, latencies, traces."""
