"""Who each worker is: its address, its engine, what it serves, and what of it is remembered."""
