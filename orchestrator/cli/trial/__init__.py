"""Commands that try policies without engines, measure what a simulation needs, and check a simulation."""
