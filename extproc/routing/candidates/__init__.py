"""The workers that may answer a request, their ranks, and a sample of them."""
