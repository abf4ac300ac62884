"""What a user configures: the file and its defaults, the model it names, and the engine arguments it carries."""
