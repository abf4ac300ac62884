"""Commands about what a fleet serves: its models, and their LoRA adapters."""
