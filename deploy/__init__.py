"""What runs tokenwire: the local supervisor, and files for containers and clusters."""
