"""The apps of the models that a frontend serves, and the door that chooses among them."""
