"""How much each worker has to do, and how fast it computes and sends."""
