"""What a request would cost each worker: its work, and the terms that add to it."""
