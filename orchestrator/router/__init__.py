"""The way of a request through a frontend: decided, dispatched, bound to a decode worker, streamed, retried, logged."""
